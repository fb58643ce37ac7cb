"""Whatever is transferred in whatever order and however much at once: a file does what a bytearray does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_nvme import AioHandle, Operation, aio_handle, engine_names
from ds_nvme.engines.choose import refusal
from ds_nvme.memory import Memory

CASES = 2000
"""Each of up to ten transfers."""
MOST_OFFSET, MOST_BYTES = 50_000, 100_000
MOST_SHIFT = 600
HANDLES = 30
ENGINES = [name for name in engine_names() if refusal(name) is None]
RANDOM = random.Random(5).randbytes(MOST_BYTES + 256)


@dataclass(frozen=True)
class Step:
    """One transfer, begun while those before it may be in flight."""

    write: bool
    handle: int
    """Which one."""
    offset: int
    nbytes: int
    shift: int
    """Of the memory from a page's start."""
    wait: bool
    """Until nothing is in flight, before it begins."""


@dataclass
class Flight:
    """What is in flight on one file, and what it must come to."""

    content: bytearray = field(default_factory=bytearray)
    """Of the file, when all has landed."""
    settled: int = 0
    """Bytes of the file that are there already."""
    writes: list[tuple[int, int, Operation]] = field(default_factory=list)
    reads: list[tuple[int, int, Operation, memoryview, bytes]] = field(default_factory=list)

    def meets(self, start: int, stop: int, write: bool) -> bool:
        """Whether it would meet bytes in flight that it must not meet."""
        busy = [(a, b) for a, b, _ in self.writes]
        busy += [(a, b) for a, b, *_ in self.reads] if write else []
        return any(start < b and a < stop for a, b in busy)

    @property
    def exists(self) -> bool:
        """Whether there is a file."""
        return bool(self.writes or self.content)

    def put(self, offset: int, data: memoryview) -> None:
        """It will hold these bytes."""
        if len(data):
            self.content.extend(bytes(max(offset + len(data) - len(self.content), 0)))
            self.content[offset : offset + len(data)] = data

    def land(self) -> None:
        """Wait for everything, and compare what was read."""
        for start, stop, write in self.writes:
            assert write.result(60) == stop - start
        for start, stop, read, buffer, wanted in self.reads:
            assert read.result(60) == stop - start
            assert buffer == wanted
        self.writes.clear()
        self.reads.clear()
        self.settled = len(self.content)


EDGES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 16383, 16384, 16385]
STEPS = st.builds(
    Step,
    st.booleans(),
    handle=st.integers(0, HANDLES - 1),
    offset=st.one_of(st.sampled_from(EDGES), st.integers(0, MOST_OFFSET)),
    nbytes=st.one_of(st.sampled_from([*EDGES, 81_920, 81_927]), st.integers(0, MOST_BYTES)),
    shift=st.one_of(st.sampled_from([0, 512]), st.integers(0, MOST_SHIFT)),
    wait=st.booleans(),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is."""
    folder: Path = tmp_path_factory.mktemp("properties")
    return folder / "file"


@pytest.fixture(scope="module")
def handles() -> Iterator[list[AioHandle]]:
    """Handles with options of every kind. All cases use the same: to close one takes longer than a case."""
    chance = random.Random(7)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                aio_handle(
                    chance.choice([512, 4096, 16384, 65536]),
                    chance.randint(1, 20),
                    chance.random() < 0.3,
                    chance.random() < 0.7,
                    chance.randint(1, 3),
                    engine=ENGINES[number % len(ENGINES)],
                )
            )
            for number in range(HANDLES)
        ]


@settings(max_examples=CASES, deadline=None)
@given(steps=st.lists(STEPS, max_size=10))
def test_like_a_plain_file(file: Path, handles: list[AioHandle], steps: list[Step]) -> None:
    file.unlink(missing_ok=True)
    flight = Flight()
    for number, step in enumerate(steps):
        handle = handles[step.handle]
        stop = step.offset + step.nbytes
        write = step.write or not flight.exists or stop > len(flight.content)  # there is nothing to read yet
        if step.wait or flight.meets(step.offset, stop, write) or (not write and stop > flight.settled):
            flight.land()
        buffer = Memory(step.nbytes + step.shift).buffer[step.shift : step.shift + step.nbytes]
        if write:
            buffer[:] = RANDOM[number : number + step.nbytes]
            flight.writes.append((step.offset, stop, handle.start_write(buffer, file, step.offset)))
            flight.put(step.offset, buffer)
        else:
            wanted = bytes(flight.content[step.offset : stop])
            flight.reads.append((step.offset, stop, handle.start_read(buffer, file, step.offset), buffer, wanted))
    flight.land()
    assert (file.read_bytes() if flight.exists else b"") == flight.content
