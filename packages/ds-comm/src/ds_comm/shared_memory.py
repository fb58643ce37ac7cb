"""Collectives between ranks of one host through memory they share.

Every rank owns a segment (an anonymous memory file: nothing is left behind when a process dies) of two
slots; peers map it. A transfer goes chunk by chunk: write what others need into one slot, tell them, read
theirs. Telling is a message on a Unix socket, which blocks without burning a core, orders memory on every
processor, and fails at once when the other side dies.

Note [Two slots are enough]: to write chunk c+1 a rank must know that every peer has read chunk c-1, which
lay in the same slot. It has passed the signal of chunk c, which a peer sends only after reading c-1. The
slot counter runs on from call to call, so this holds between calls too and no closing signal is needed.

Note [Same order]: sums run in rank order whoever holds the result and however the tensor is cut, so results
do not depend on chunk, bucket or shard boundaries, bit for bit.
"""

from __future__ import annotations

import mmap
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ds_comm.errors import CommError
from ds_comm.work import Queued

SEGMENT_SLOT_BYTES = 2 << 20

_SIGNAL = struct.Struct("<IHHQ")  # number of the call, kind, dtype, elements
_KINDS = {1: "reduce_scatter", 2: "all_gather"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def even_splits(numel: int, world: int) -> tuple[int, ...]:
    """Boundaries of `world` pieces of `numel` elements, as equal as can be: world + 1 numbers from 0 to numel."""
    base, more = divmod(numel, world)
    return tuple(accumulate((base + (rank < more) for rank in range(world)), initial=0))


class SharedMemoryTransport:
    """The shared segments and signal sockets of one group. Made by `open`, used by every rank alike."""

    def __init__(self, rank: int, segments: list[torch.Tensor], sockets: dict[int, socket.socket], timeout_s: float):
        self.rank, self.world = rank, len(segments)
        self._segments = segments  # by rank: uint8 [2 * SEGMENT_SLOT_BYTES]
        self._sockets = sockets  # by peer
        self._timeout_s = timeout_s
        self._chunk = 0  # see Note [Two slots are enough]
        self._call = 0
        self._broken: str | None = None
        self._jobs: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, group: dist.ProcessGroup, timeout_s: float) -> SharedMemoryTransport | None:
        """Connects the ranks of `group`; None, on every rank, where they can't share memory. Collective."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        place, listener, address = _place(), None, b""
        if place is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            address = b"\0ds-comm-" + secrets.token_hex(16).encode()
            listener.bind(address)
            listener.listen(world)
        cards: list[tuple[str | None, bytes]] = [(None, b"")] * world
        dist.all_gather_object(cards, (place, address), group=group)
        transport, error = None, ""
        if place is not None and listener is not None and all(card[0] == place for card in cards):
            try:
                transport = cls._connect(rank, listener, [card[1] for card in cards], timeout_s)
            except OSError as reason:
                error = str(reason)
        if listener is not None:
            listener.close()
        outcomes = [""] * world
        dist.all_gather_object(outcomes, "" if transport is not None else error or "elsewhere", group=group)
        if any(outcomes):
            if transport is not None:
                transport.close()
            return None
        return transport

    @classmethod
    def _connect(
        cls, rank: int, listener: socket.socket, addresses: list[bytes], timeout_s: float
    ) -> SharedMemoryTransport:
        world = len(addresses)
        fd = os.memfd_create("ds-comm", os.MFD_CLOEXEC)
        sockets: dict[int, socket.socket] = {}
        fds: dict[int, int] = {rank: fd}
        try:
            os.ftruncate(fd, 2 * SEGMENT_SLOT_BYTES)
            for peer in range(rank):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[peer] = link
                link.settimeout(timeout_s)
                link.connect(addresses[peer])
                socket.send_fds(link, [addresses[rank] + b"%d" % rank], [fd])
            listener.settimeout(timeout_s)
            while len(sockets) < world - 1:
                link, _ = listener.accept()
                link.settimeout(timeout_s)
                # Abstract addresses know no permissions: the card proves the peer has read our group's store.
                hello, got, _, _ = socket.recv_fds(link, 256, 1)
                known = {addresses[peer] + b"%d" % peer: peer for peer in range(rank + 1, world)}
                if hello not in known or not got:
                    link.close()
                    continue
                peer = known[hello]
                sockets[peer], fds[peer] = link, got[0]
                socket.send_fds(link, [b"welcome"], [fd])
            for peer in range(rank):
                _, got, _, _ = socket.recv_fds(sockets[peer], 256, 1)
                if not got:
                    raise OSError(f"rank {peer} sent no memory")
                fds[peer] = got[0]
            segments = [_map(fds[peer]) for peer in range(world)]
        except OSError:
            for link in sockets.values():
                link.close()
            raise
        finally:
            for each in fds.values():
                os.close(each)
        return cls(rank, segments, sockets, timeout_s)

    def close(self) -> None:
        """Ends the worker and closes the sockets; the memory goes with the last process that maps it."""
        if self._worker is not None:
            self._jobs.put(None)
            self._worker.join(1.0)
            self._worker = None
        for link in self._sockets.values():
            link.close()
        self._sockets = {}
        self._broken = "the group was closed"

    def submit(self, job: Callable[[], None]) -> Queued:
        """Runs `job` (calls of this transport) on the worker thread, after those submitted before."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="ds-comm", daemon=True)
            self._worker.start()
        queued = Queued(job)
        with self._lock:
            self._waiting += 1
        self._jobs.put(queued)
        return queued

    def run(self, job: Callable[[], None]) -> None:
        """Runs `job` now, in this thread; after what was submitted, if any of that is left."""
        with self._lock:
            busy = self._waiting > 0
        if busy:
            self.submit(job).wait()
        else:
            job()

    def _work(self) -> None:
        while (queued := self._jobs.get()) is not None:
            queued.run()
            with self._lock:
                self._waiting -= 1

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, splits: Sequence[int], scale: float | None = None
    ) -> None:
        """`output` = sum over ranks of `input[splits[rank]:splits[rank + 1]]`, times `scale`.

        Args:
            output: flat, contiguous; may be wider than `input` (the sum is made in its dtype) and may be
                `input`'s own piece.
            input: flat, contiguous.
            splits: world + 1 boundaries.
        """
        rank, world = self.rank, self.world
        signal = self._signal(1, input)
        room = SEGMENT_SLOT_BYTES // (world - 1) // 64 * 64
        step = room // input.element_size()
        longest = max(stop - start for start, stop in pairwise(splits))
        own = input[splits[rank] : splits[rank + 1]]
        for start in range(0, longest, step):
            slots = self._slots(input.dtype)
            for peer in self._sockets:
                piece = input[splits[peer] : splits[peer + 1]][start : start + step]
                slots[rank][_offset(rank, peer) * step :][: piece.numel()].copy_(piece)
            self._exchange(signal)
            target = output[start : start + step]
            if (count := target.numel()) == 0:
                continue
            parts = [
                own[start : start + step] if peer == rank else slots[peer][_offset(peer, rank) * step :][:count]
                for peer in range(world)
            ]
            if world == 2 and output.dtype == input.dtype:
                torch.add(parts[0], parts[1], out=target)
            else:
                _sum(target, parts, rank)
            if scale is not None:
                target.mul_(scale)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, splits: Sequence[int]) -> None:
        """`output[splits[r]:splits[r + 1]]` = rank r's `input`, on every rank.

        Args:
            output: flat, contiguous.
            input: this rank's piece; may be its place in `output`.
            splits: world + 1 boundaries.
        """
        rank, world = self.rank, self.world
        signal = self._signal(2, output)
        step = SEGMENT_SLOT_BYTES // output.element_size()
        longest = max(stop - start for start, stop in pairwise(splits))
        own = output[splits[rank] : splits[rank + 1]]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        for start in range(0, longest, step):
            slots = self._slots(output.dtype)
            piece = own[start : start + step]
            slots[rank][: piece.numel()].copy_(piece)
            self._exchange(signal)
            for peer in range(world):
                if peer != rank:
                    target = output[splits[peer] : splits[peer + 1]][start : start + step]
                    target.copy_(slots[peer][: target.numel()])

    def all_reduce(self, tensor: torch.Tensor, scale: float | None = None) -> None:
        """`tensor` = sum over ranks, times `scale`, in place. A reduce-scatter and an all-gather."""
        splits = even_splits(tensor.numel(), self.world)
        own = tensor[splits[self.rank] : splits[self.rank + 1]]
        self.reduce_scatter(own, tensor, splits, scale)
        self.all_gather(tensor, own, splits)

    def _slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's current slot, as `dtype`."""
        start = (self._chunk & 1) * SEGMENT_SLOT_BYTES
        self._chunk += 1
        return [segment[start : start + SEGMENT_SLOT_BYTES].view(dtype) for segment in self._segments]

    def _signal(self, kind: int, tensor: torch.Tensor) -> bytes:
        if self._broken:
            raise CommError(f"this group can't be used any more: {self._broken}; start the job again")
        self._call = (self._call + 1) & 0xFFFFFFFF
        return _SIGNAL.pack(self._call, kind, _DTYPES.index(tensor.dtype), tensor.numel())

    def _exchange(self, signal: bytes) -> None:
        """Tells every peer that our slot is filled, and waits until theirs are."""
        for peer, link in self._sockets.items():
            self._guard(peer, link.send, signal)
        for peer, link in self._sockets.items():
            got = self._guard(peer, link.recv, _SIGNAL.size)
            if got == signal:
                continue
            if not got:
                self._fail(f"rank {peer} ended while rank {self.rank} was in {_describe(signal)}")
            self._fail(
                "ranks make the same collectives in the same order: "
                f"rank {self.rank} is in {_describe(signal)}, rank {peer} in {_describe(got)}; "
                "make every rank run the same steps"
            )

    def _guard(self, peer: int, call: Callable, argument: bytes | int) -> bytes:
        try:
            return call(argument)
        except TimeoutError:
            self._fail(f"rank {peer} did not come within {self._timeout_s:.0f} s")
        except OSError as error:
            self._fail(f"rank {peer} can't be reached ({error}): it has probably ended")
        raise AssertionError("unreachable")

    def _fail(self, message: str) -> None:
        self._broken = message
        for link in self._sockets.values():
            link.close()  # so that peers waiting for us learn it now
        raise CommError(message)


def _offset(owner: int, reader: int) -> int:
    """Which part of `owner`'s slot is for `reader`: it keeps none for itself."""
    return reader if reader < owner else reader - 1


def _sum(target: torch.Tensor, parts: list[torch.Tensor], rank: int) -> None:
    """`target` = parts[0] + parts[1] + …, in that order, in target's dtype; parts[rank] may be target."""
    if parts[rank].data_ptr() == target.data_ptr() and rank != 0:
        own = target.clone()
        parts = [own if index == rank else part for index, part in enumerate(parts)]
    target.copy_(parts[0])
    for part in parts[1:]:
        target.add_(part)


def _describe(signal: bytes) -> str:
    call, kind, dtype, numel = _SIGNAL.unpack(signal)
    name = str(_DTYPES[dtype]).removeprefix("torch.") if dtype < len(_DTYPES) else "?"
    return f"call {call}: {_KINDS.get(kind, '?')} of {numel} {name}"


def _map(fd: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, 2 * SEGMENT_SLOT_BYTES), dtype=torch.uint8)


def _place() -> str | None:
    """Names the host, network namespace and user: processes with the same name can share memory."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"
    except OSError:
        return None


def splits_are_even(splits: Sequence[int]) -> bool:
    """Every piece has the same size, so that the backends' plain collectives apply."""
    sizes: Iterator[int] = (stop - start for start, stop in pairwise(splits))
    return len(set(sizes)) == 1
