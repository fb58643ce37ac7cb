"""Collectives between ranks of one host through memory they share.

Every rank owns a segment (an anonymous memory file: nothing is left behind when a process dies) of two
slots; peers map it. A transfer goes chunk by chunk: write what others need into one slot, tell them, read
theirs. Telling is a message on a Unix socket (see `links`), which blocks without burning a core, orders memory on
every processor, and fails at once when the other side dies.

Note [Two slots are enough]: to write chunk c+1 a rank must know that every peer has read chunk c-1, which
lay in the same slot. It has passed the signal of chunk c, which a peer sends only after reading c-1. The
slot counter runs on from call to call, so this holds between calls too and no closing signal is needed.

Note [Same order]: sums run in rank order whoever holds the result and however the tensor is cut, so results
do not depend on chunk, bucket or shard boundaries, bit for bit.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from ds_comm.links import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Links
from ds_comm.work import Queued, Worker

SEGMENT_SLOT_BYTES = 2 << 20


def even_splits(numel: int, world: int) -> tuple[int, ...]:
    """Boundaries of `world` pieces of `numel` elements, as equal as can be: world + 1 numbers from 0 to numel."""
    base, more = divmod(numel, world)
    return tuple(accumulate((base + (rank < more) for rank in range(world)), initial=0))


class SharedMemoryTransport:
    """The shared segments and signal sockets of one group. Made by `open`, used by every rank alike."""

    def __init__(self, links: Links, segments: list[torch.Tensor]):
        self.rank, self.world = links.rank, len(segments)
        self._links = links
        self._exchange = links.exchange
        self._segments = segments  # by rank: uint8 [2 * SEGMENT_SLOT_BYTES]
        self._chunk = 0  # see Note [Two slots are enough]
        self._worker = Worker()

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
        places = _all_gather_bytes(place.encode() if place is not None else b"", group)
        addresses = _all_gather_bytes(address, group)
        transport = None
        if listener is not None:
            with listener, contextlib.suppress(OSError):
                if all(other == places[rank] for other in places):
                    transport = cls._connect(rank, listener, addresses, timeout_s)
        if not all(_all_gather_bytes(b"" if transport is None else b"connected", group)):
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
        return cls(Links(rank, sockets, timeout_s), segments)

    def close(self) -> None:
        """Ends the jobs that wait, with an error, and the worker; closes the sockets. Waits for no peer.

        The memory goes with the last process that maps it.
        """
        self._links.leave()
        self._worker.close()
        self._links.close()

    def submit(self, job: Callable[[], None]) -> Queued:
        """Runs `job` (calls of this transport) on the worker thread, after those submitted before."""
        if self._links.broken:  # the job will say so; there may be no thread to run it, after close or in a fork
            queued = Queued(job)
            queued.run()
            return queued
        return self._worker.submit(job)

    def run(self, job: Callable[[], None]) -> None:
        """Runs `job` now, in this thread; after what was submitted, if any of that is left."""
        if self._links.broken:
            job()
        else:
            self._worker.run(job)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, splits: Sequence[int], scale: float | None = None
    ) -> None:
        """`output` = sum over ranks of `input[splits[rank]:splits[rank + 1]]`, times `scale`.

        Args:
            output: [splits[rank + 1] - splits[rank]], contiguous. Its dtype may differ from `input`'s: the sum is
                made in the wider of both. May be `input`'s own piece.
            input: [splits[-1]], contiguous, of a dtype in `routes.SHARED_DTYPES`.
            splits: world + 1 boundaries.
            scale: a factor for the sum. Default: 1.

        Raises:
            CommError: see `Links.exchange`.
        """
        self._reduce_scatter(self._signal(REDUCE_SCATTER, input), output, input, splits, scale)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, splits: Sequence[int]) -> None:
        """`output[splits[r]:splits[r + 1]]` = rank r's `input`, on every rank.

        Args:
            output: [splits[-1]], contiguous, of a dtype in `routes.SHARED_DTYPES`.
            input: [splits[rank + 1] - splits[rank]], of the same dtype; may be its place in `output`.
            splits: world + 1 boundaries.

        Raises:
            CommError: see `Links.exchange`.
        """
        self._all_gather(self._signal(ALL_GATHER, output), output, input, splits)

    def all_reduce(self, tensor: torch.Tensor, scale: float | None = None) -> None:
        """`tensor` = sum over ranks, times `scale`, in place. A reduce-scatter and an all-gather.

        Args:
            tensor: [any], contiguous, of a dtype in `routes.SHARED_DTYPES`.
            scale: a factor for the sum. Default: 1.

        Raises:
            CommError: see `Links.exchange`.
        """
        signal = self._signal(ALL_REDUCE, tensor)
        splits = even_splits(tensor.numel(), self.world)
        own = tensor[splits[self.rank] : splits[self.rank + 1]]
        self._reduce_scatter(signal, own, tensor, splits, scale)
        self._all_gather(signal, tensor, own, splits)

    def _signal(self, kind: int, tensor: torch.Tensor) -> bytes:
        return self._links.signal(kind, tensor.dtype, tensor.numel())

    def _reduce_scatter(
        self, signal: bytes, output: torch.Tensor, input: torch.Tensor, splits: Sequence[int], scale: float | None
    ) -> None:
        rank, world = self.rank, self.world
        room = SEGMENT_SLOT_BYTES // (world - 1) // 64 * 64
        step = room // input.element_size()
        longest = max(stop - start for start, stop in pairwise(splits))
        own = input[splits[rank] : splits[rank + 1]]
        for start in range(0, longest, step):
            slots = self._slots(input.dtype)
            for peer in self._links.peers:
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

    def _all_gather(self, signal: bytes, output: torch.Tensor, input: torch.Tensor, splits: Sequence[int]) -> None:
        rank, world = self.rank, self.world
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

    def _slots(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's current slot, as `dtype`."""
        start = (self._chunk & 1) * SEGMENT_SLOT_BYTES
        self._chunk += 1
        return [segment[start : start + SEGMENT_SLOT_BYTES].view(dtype) for segment in self._segments]


def _all_gather_bytes(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's `own`, at most 255 bytes. (torch's all_gather_object wants NumPy, which torch does not bring.)"""
    cards = [torch.empty(256, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(cards, torch.tensor(list(bytes([len(own)]) + own.ljust(255, b"\0")), dtype=torch.uint8), group)
    return [bytes(card[1 : 1 + card[0]]) for card in map(torch.Tensor.tolist, cards)]


def _offset(owner: int, reader: int) -> int:
    """Which part of `owner`'s slot is for `reader`: it keeps none for itself."""
    return reader if reader < owner else reader - 1


def _sum(target: torch.Tensor, parts: list[torch.Tensor], rank: int) -> None:
    """`target` = parts[0] + parts[1] + …, in that order, in the wider dtype; parts[rank] may be target."""
    dtype = torch.promote_types(target.dtype, parts[0].dtype)
    if dtype != target.dtype:
        total = torch.empty_like(target, dtype=dtype)
        _sum(total, parts, rank)
        target.copy_(total)
        return
    if parts[rank].data_ptr() == target.data_ptr() and rank != 0:
        own = target.clone()
        parts = [own if index == rank else part for index, part in enumerate(parts)]
    target.copy_(parts[0])
    for part in parts[1:]:
        target.add_(part)


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
