"""What a transfer will do, as data: which bytes go how, in which order. Made and printed without any I/O.

Note [edges]
    O_DIRECT moves whole aligned blocks. A read may take more than was asked for: the blocks at its ends are read into
    a bounce buffer and the wanted part copied. A write may not: the bytes around it belong to others, perhaps to
    another process that writes them at this moment. So a write's unaligned ends go through the page cache, where the
    kernel merges bytes, and the direct part begins and ends at page boundaries, so that no page is written both ways.

Note [growing files]
    A file that grows is first given its blocks up to the start of its last block (an O_DIRECT write that extends a
    file is synchronous in most filesystems, one inside it is not), and its last block is written after all others have
    arrived. A file whose writer died is therefore always shorter than it should be, and reading it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_nvme.alignment import PAGE, Alignment

BOUNCE_BLOCK = 1 << 20
"""Largest block that goes through a bounce buffer, in bytes: bounded memory, and enough to keep a drive busy."""


@dataclass(frozen=True)
class Segment:
    """Consecutive bytes of the file that move in one way, block by block.

    Args:
        file_offset: first byte of the file.
        nbytes: bytes to move.
        block_nbytes: bytes a block; the last block may be shorter.
        buffer_offset: where in the buffer the first byte lies; negative where I/O begins before what was asked for.
        direct: around the page cache.
        bounce: through an aligned buffer of ours.
        last: only after all other segments have arrived.
    """

    file_offset: int
    nbytes: int
    block_nbytes: int
    buffer_offset: int
    direct: bool
    bounce: bool = False
    last: bool = False

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.nbytes // self.block_nbytes)

    def __str__(self) -> str:
        way = ("direct" if self.direct else "cached") + (" by bounce buffer" if self.bounce else "")
        count = f"{self.blocks} block{'s' if self.blocks > 1 else ''} of {min(self.block_nbytes, self.nbytes)}"
        end = self.file_offset + self.nbytes
        return f"[{self.file_offset}, {end}) {way}, {count}{', after all others' if self.last else ''}"


@dataclass(frozen=True)
class TransferPlan:
    """A transfer between a buffer and a file.

    Args:
        write: buffer to file; otherwise file to buffer.
        file_offset: first byte of the file.
        nbytes: bytes asked for.
        segments: what moves how; they don't overlap inside the asked range and cover all of it.
        grow_to: size that a growing file is given before the first block; None where nothing is reserved.
    """

    write: bool
    file_offset: int
    nbytes: int
    segments: tuple[Segment, ...]
    grow_to: int | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(segment.blocks for segment in self.segments)

    @property
    def any_cached(self) -> bool:
        """Whether a part goes through the page cache."""
        return not all(segment.direct for segment in self.segments)

    def __str__(self) -> str:
        head = f"{'write' if self.write else 'read'} of {self.nbytes} bytes at offset {self.file_offset}"
        if self.grow_to is not None:
            head += f", file first grown to {self.grow_to}"
        return "\n  ".join([head, *map(str, self.segments)])


def plan_transfer(
    *,
    write: bool,
    address: int,
    nbytes: int,
    file_offset: int,
    file_size: int,
    alignment: Alignment,
    block_size: int,
) -> TransferPlan:
    """Decide how a transfer goes.

    Args:
        write: buffer to file.
        address: of the buffer's first byte; only its alignment matters.
        nbytes: bytes to move.
        file_offset: first byte of the file.
        file_size: the file's size now, in bytes.
        alignment: what O_DIRECT needs on this file.
        block_size: bytes a request; rounded up to the alignment where a part goes direct.
    """
    if nbytes == 0:
        return TransferPlan(write, file_offset, 0, ())
    if not alignment.direct:
        segments = [Segment(file_offset, nbytes, block_size, 0, direct=False)]
    elif write:
        segments = _direct_write(address, nbytes, file_offset, alignment, block_size)
    else:
        segments = _direct_read(address, nbytes, file_offset, alignment, block_size)
    if not write or file_offset + nbytes <= file_size:
        return TransferPlan(write, file_offset, nbytes, tuple(segments))
    segments = _last_apart(segments)
    grow_to = segments[-1].file_offset if len(segments) > 1 and any(s.direct for s in segments[:-1]) else None
    if grow_to is not None and grow_to <= file_size:
        grow_to = None
    return TransferPlan(write, file_offset, nbytes, tuple(segments), grow_to)


def _direct_write(address: int, nbytes: int, offset: int, alignment: Alignment, block_size: int) -> list[Segment]:
    """Unaligned ends through the page cache, whole pages between them direct: see note [edges]."""
    page = max(PAGE, alignment.offset)
    start, end = _up(offset, page), _down(offset + nbytes, page)
    if end <= start:
        return [Segment(offset, nbytes, nbytes, 0, direct=False)]
    segments = []
    if start > offset:
        segments.append(Segment(offset, start - offset, start - offset, 0, direct=False))
    bounce = (address + start - offset) % alignment.memory != 0
    segments.append(_direct(start, end - start, start - offset, alignment, block_size, bounce))
    if tail := offset + nbytes - end:
        segments.append(Segment(end, tail, tail, end - offset, direct=False))
    return segments


def _direct_read(address: int, nbytes: int, offset: int, alignment: Alignment, block_size: int) -> list[Segment]:
    """Aligned blocks straight into the buffer where its address allows it, all else through bounce buffers."""
    step = alignment.offset
    cover_start, cover_end = _down(offset, step), _up(offset + nbytes, step)
    start, end = _up(offset, step), _down(offset + nbytes, step)
    fits = (address + start - offset) % alignment.memory == 0
    aligned = start == offset and end == offset + nbytes
    small = cover_end - cover_start <= min(block_size, 16 * PAGE)  # one request beats saving a copy
    if end <= start or not fits or (small and not aligned):
        return [_direct(cover_start, cover_end - cover_start, cover_start - offset, alignment, block_size, True)]
    segments = []
    if start > offset:
        segments.append(_direct(cover_start, step, cover_start - offset, alignment, step, True))
    segments.append(_direct(start, end - start, start - offset, alignment, block_size, False))
    if end < offset + nbytes:
        segments.append(_direct(end, step, end - offset, alignment, step, True))
    return segments


def _direct(
    start: int, nbytes: int, buffer_offset: int, alignment: Alignment, block_size: int, bounce: bool
) -> Segment:
    step = max(alignment.offset, alignment.memory)
    block = _up(min(block_size, BOUNCE_BLOCK) if bounce else block_size, step)
    return Segment(start, nbytes, block, buffer_offset, direct=True, bounce=bounce)


def _last_apart(segments: list[Segment]) -> list[Segment]:
    """The final block as a segment of its own, which waits for all others: see note [growing files]."""
    *others, final = segments
    cut = (final.blocks - 1) * final.block_nbytes
    if cut:
        others.append(
            Segment(final.file_offset, cut, final.block_nbytes, final.buffer_offset, final.direct, final.bounce)
        )
    rest = Segment(
        final.file_offset + cut,
        final.nbytes - cut,
        final.block_nbytes,
        final.buffer_offset + cut,
        final.direct,
        final.bounce,
        last=True,
    )
    return [*others, rest]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _down(value: int, step: int) -> int:
    return value // step * step
