"""Plans: what is moved how, without I/O."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_nvme.alignment import PAGE, Alignment, without_direct
from ds_nvme.plan import TransferPlan, plan_transfer

ALIGNMENTS = [
    without_direct("test"),
    Alignment(True, 4, 512, "test"),
    Alignment(True, 512, 512, "test"),
    Alignment(True, 4096, 4096, "test"),
    Alignment(True, 65536, 65536, "test"),
]


def make(write: bool, nbytes: int, offset: int = 0, address: int = 1 << 30, **options: object) -> TransferPlan:
    arguments: dict = {"file_size": 0 if write else offset + nbytes, "alignment": ALIGNMENTS[2], "block_size": 1 << 20}
    return plan_transfer(write=write, address=address, nbytes=nbytes, file_offset=offset, **(arguments | options))


def test_an_aligned_read_is_one_direct_segment() -> None:
    plan = make(False, 8 << 20)
    assert [(s.direct, s.bounce, s.blocks) for s in plan.segments] == [(True, False, 8)]
    assert str(plan) == "read of 8388608 bytes at offset 0\n  [0, 8388608) direct, 8 blocks of 1048576"


def test_an_unaligned_end_of_a_write_goes_through_the_page_cache() -> None:
    plan = make(True, (1 << 20) + 5, file_size=1 << 30)
    assert [(s.file_offset, s.nbytes, s.direct) for s in plan.segments] == [(0, 1 << 20, True), (1 << 20, 5, False)]


def test_a_growing_file_gets_its_last_block_last() -> None:
    plan = make(True, 3 << 20)
    assert [s.last for s in plan.segments] == [False, True]
    assert plan.grow_to == 2 << 20
    assert not any(s.last for s in make(True, 3 << 20, file_size=3 << 20).segments)


def test_an_unaligned_address_takes_bounce_buffers() -> None:
    assert all(s.bounce for s in make(False, 8 << 20, address=(1 << 30) + 64).segments)
    assert not any(s.bounce for s in make(False, 8 << 20, address=(1 << 30) + 64, alignment=ALIGNMENTS[1]).segments)


@given(
    write=st.booleans(),
    nbytes=st.integers(0, 1 << 22),
    offset=st.integers(0, 1 << 20),
    address=st.integers(1 << 30, (1 << 30) + 70000),
    size=st.integers(0, 1 << 22),
    alignment=st.sampled_from(ALIGNMENTS),
    block_size=st.integers(1, 1 << 19),
)
def test_every_plan_keeps_the_rules(
    write: bool, nbytes: int, offset: int, address: int, size: int, alignment: Alignment, block_size: int
) -> None:
    if not write:
        size = offset + nbytes
    plan = make(write, nbytes, offset, address, file_size=size, alignment=alignment, block_size=block_size)
    position = offset
    for number, segment in enumerate(plan.segments):
        start, stop = segment.file_offset, segment.file_offset + segment.nbytes
        # Together they cover the range without a gap; only a bounced read may take more than was asked for.
        assert max(start, offset) == position and stop > position
        position = min(stop, offset + nbytes)
        assert segment.buffer_offset == start - offset
        if start < offset or stop > offset + nbytes:
            assert segment.bounce and not write
        if segment.direct:
            assert start % alignment.offset == segment.nbytes % alignment.offset == 0
            assert segment.block_nbytes % max(alignment.offset, alignment.memory) == 0
            assert segment.bounce or (address + segment.buffer_offset) % alignment.memory == 0
        assert not segment.last or number == len(plan.segments) - 1
    assert position == offset + nbytes
    if write:
        pages: dict[bool, set[int]] = {True: set(), False: set()}
        for s in plan.segments:
            pages[s.direct] |= set(range(s.file_offset // PAGE, -(-(s.file_offset + s.nbytes) // PAGE)))
        assert not pages[True] & pages[False], "no page is written both ways"
    if plan.grow_to is not None:
        assert size < plan.grow_to < offset + nbytes
    if write and nbytes and offset + nbytes > size:
        assert plan.segments[-1].last and plan.segments[-1].blocks == 1
