"""Links: how the ranks of one host tell one another how far they are, and who is lost.

Every pair of ranks has a Unix socket. A signal names the call it belongs to, so ranks that make different calls
find out in the first exchange.

Note [Who ended]: a rank whose process ends closes its sockets, and so does a rank that gives up because of it. To
tell the two apart, who gives up first sends last words that say why: whoever finds a socket closed looks for them
and repeats them, and names the peer itself only where there are none. Thus all ranks name the one that ended.

Note [Forked children]: a socket is closed when its last copy is, and a forked child has copies, with which it would
hide its parent's end. So children give theirs up as they are born. Python tells us of its own forks only (os.fork,
multiprocessing): behind a child that native code forks and that runs no other program, a rank's end is noticed when
the child ends or the limit is over.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import weakref
from typing import NoReturn

import torch

from ds_comm.errors import CommError
from ds_comm.routes import SHARED_DTYPES

REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE = 1, 2, 3

_NAMES = {REDUCE_SCATTER: "reduce_scatter", ALL_GATHER: "all_gather", ALL_REDUCE: "all_reduce"}
_SIGNAL = struct.Struct("<IHHQ")  # number of the call, kind, dtype, elements
_LAST_WORDS = _SIGNAL.pack(0, 0, 0, 0)  # and then UTF-8 text: longer than any signal
_LONGEST_BYTES = 4096
_LONGEST_WAIT_MS = 2**31 - 1  # what poll takes: 24 days


class Links:
    """The sockets to a group's other ranks. Used by one thread at a time; `close` may come from another.

    Args:
        rank: this process's rank.
        sockets: connected, of type SOCK_SEQPACKET, by peer. They are owned from here on.
        timeout_s: how long an exchange waits for a peer, in seconds.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float):
        self.rank = rank
        self.peers = list(sockets)
        self.broken = ""
        """Why the links can't be used any more; empty while they can."""
        self._sockets = sockets
        self._peer_of = {link.fileno(): peer for peer, link in sockets.items()}
        self._timeout_s = timeout_s
        self._timeout_ms = min(int(timeout_s * 1000), _LONGEST_WAIT_MS)
        self._call = 0
        for link in sockets.values():
            link.setblocking(False)  # poll waits, and for all at once
        self._finalizer = weakref.finalize(self, _close, list(sockets.values()))
        self._finalizer.atexit = False  # a process that ends closes them itself, and says nothing
        _watch_forks()
        _alive.add(self)

    def signal(self, kind: int, dtype: torch.dtype, numel: int) -> bytes:
        """Begins a call; returns what its exchanges send.

        Raises:
            CommError: the links can't be used any more.
        """
        if self.broken:
            raise CommError(self._unusable())
        dtype_number = SHARED_DTYPES.index(dtype)
        self._call = (self._call + 1) & 0xFFFFFFFF
        return _SIGNAL.pack(self._call, kind, dtype_number, numel)

    def exchange(self, signal: bytes) -> None:
        """Sends `signal` to every peer, and returns when every peer's has come.

        Raises:
            CommError: a peer ended, gave up, sent another signal, or did not come within the limit. From then on
                the links can't be used, here and at every peer.
        """
        watch = select.poll()
        for peer, link in self._sockets.items():
            try:
                link.send(signal, socket.MSG_NOSIGNAL)  # never blocks: at most two signals lie unread in a socket
            except OSError:
                self._lose(peer, signal, _last_words(link))
        for fd in self._peer_of:
            watch.register(fd, select.POLLIN)
        missing = set(self.peers)
        while missing:
            ready = watch.poll(self._timeout_ms)
            if not ready:
                late = " and ".join(f"rank {peer}" for peer in sorted(missing))
                self._fail(f"{late} did not come within {self._timeout_s:g} s")
            for fd, _ in ready:
                peer = self._peer_of[fd]
                got = _receive(self._sockets[peer])
                if got is None:
                    continue
                if got != signal:
                    self._lose(peer, signal, got)
                missing.remove(peer)
                watch.unregister(fd)  # a faster peer may have sent the next signal, or have closed after its last call

    def leave(self) -> None:
        """Tells every peer that this rank goes, and ends every wait, here and there. The sockets stay open."""
        if not self.broken:
            self.broken = "the group was closed"
            self._say(f"rank {self.rank} closed the group")

    def close(self) -> None:
        """Leaves, if that was not done, and closes the sockets. No other thread may be in an exchange."""
        self.leave()
        self._finalizer()

    def disown(self) -> None:
        """In a forked child: closes its copies of the sockets. See Note [Forked children]."""
        self.broken = f"it is rank {self.rank}'s, from which this process was forked"
        self._finalizer()

    def _lose(self, peer: int, signal: bytes, got: bytes) -> NoReturn:
        """Raises what became of a peer from which `got` came instead of `signal`; empty: nothing more will."""
        if self.broken:  # closed by another thread
            raise CommError(self._unusable())
        if not got:
            self._fail(f"rank {peer} ended while rank {self.rank} was in {_describe(signal)}")
        if got.startswith(_LAST_WORDS):
            words = got[len(_LAST_WORDS) :].decode(errors="replace")
            self._fail(f"{words} (heard from rank {peer})", words)
        self._fail(
            "ranks make the same collectives in the same order: "
            f"rank {self.rank} is in {_describe(signal)}, rank {peer} in {_describe(got)}; "
            "make every rank run the same steps"
        )

    def _fail(self, message: str, words: str = "") -> NoReturn:
        """Gives up: raises `message`, and leaves the peers `words` (default: the same)."""
        self.broken = message
        self._say(words or message)
        raise CommError(message)

    def _say(self, words: str) -> None:
        message = (_LAST_WORDS + words.encode())[:_LONGEST_BYTES]
        for link in self._sockets.values():
            with contextlib.suppress(OSError):  # who is gone needs no words
                link.send(message, socket.MSG_NOSIGNAL)
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # reaches a wait of another thread, and copies in forked children

    def _unusable(self) -> str:
        return f"this group can't be used any more: {self.broken}; start the job again"


def _receive(link: socket.socket) -> bytes | None:
    """The next message; empty where the peer has closed and none is left; None where none has come yet."""
    for _ in range(2):  # an error is told once, and before the messages that came earlier
        try:
            return link.recv(_LONGEST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            continue
    return b""


def _last_words(link: socket.socket) -> bytes:
    """What a peer that takes no more messages said last, or nothing. See Note [Who ended]."""
    while (got := _receive(link)) and not got.startswith(_LAST_WORDS):
        pass  # a signal from before
    return got or b""


def _describe(signal: bytes) -> str:
    call, kind, dtype, numel = _SIGNAL.unpack(signal)
    name = str(SHARED_DTYPES[dtype]).removeprefix("torch.") if dtype < len(SHARED_DTYPES) else "?"
    return f"call {call}: {_NAMES.get(kind, '?')} of {numel} {name}"


def _close(sockets: list[socket.socket]) -> None:
    for link in sockets:
        link.close()


_alive: weakref.WeakSet[Links] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    """From now on forked children disown their copies of links. See Note [Forked children]."""
    os.register_at_fork(after_in_child=_disown_all)


def _disown_all() -> None:
    for links in list(_alive):
        links.disown()
