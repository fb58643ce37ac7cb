"""The search: on a made-up drive, where the truth is known, and shortly on a real one."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from ds_nvme.drives import Drives
from ds_nvme.options import Candidate
from ds_nvme.tune import Space, Trial, tune


def truth(candidate: Candidate, write: bool) -> float:
    """A drive with one best combination: rates fall off around it."""
    off = abs(math.log2(candidate.block_size / (512 << 10))) + 0.5 * abs(math.log2(candidate.queue_depth / 32))
    off += (
        0.3 * (candidate.intra_op_parallelism - 1) + {"io_uring": 0.0, "libaio": 0.2, "threads": 0.9}[candidate.engine]
    )
    return (2e9 if write else 3e9) / (1 + 0.2 * off)


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_the_full_grid_finds(seed: int) -> None:
    noise = random.Random(seed)
    spent = 0

    def measure(candidate: Candidate, write: bool, seconds: float) -> float:
        nonlocal spent
        spent += 1
        return truth(candidate, write) * noise.uniform(0.97, 1.03)

    space = Space(engine=("libaio", "io_uring", "threads"))
    found = tune([], space=space, measure=measure, budget=60.0, loops=5, seed=seed)
    best = max(truth(candidate, True) for candidate in space.candidates())
    assert truth(found.best.candidate, True) > 0.97 * best
    assert len(found.best.read) == 5 and len(found.trials) <= len(space.candidates())
    assert spent < 2 * len(space.candidates()) * 2.5, "about two measurements a candidate, each way"
    assert "5 loops" in found.confidence()


def test_one_direction_and_progress() -> None:
    seen: list[Trial] = []
    found = tune(
        [],
        space=Space(engine=("libaio",), block_size=(4096, 8192), queue_depth=(1,), intra_op_parallelism=(1,)),
        measure=lambda candidate, write, _: 1.0 * candidate.block_size,
        write=False,
        loops=2,
        budget=0.1,
        progress=lambda trial, best, part: seen.append(best),
    )
    assert found.best.candidate.block_size == 8192 and not found.best.write and len(seen) == 4
    assert found.best.candidate.section() == {
        "aio": {"block_size": 8192, "queue_depth": 1, "thread_count": 1, "single_submit": False, "overlap_events": True}
    }
    assert eval(found.best.candidate.python().removeprefix("handle = ").replace("ds_nvme.aio_handle", "dict")) == {
        "engine": "libaio",
        "block_size": 8192,
        "queue_depth": 1,
        "single_submit": False,
        "overlap_events": True,
        "intra_op_parallelism": 1,
    }
    with pytest.raises(ValueError, match="got neither"):
        tune([], read=False, write=False)
    with pytest.raises(ValueError, match="no combination"):
        tune([], space=Space(block_size=()))


def test_on_a_drive(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    space = Space(block_size=(65536,), queue_depth=(4,), intra_op_parallelism=(1, 2))
    found = tune(folders, space=space, io_size=1 << 20, loops=2, budget=0.2)
    assert found.best.score > 0
    assert not any(list(folder.iterdir()) for folder in folders), "nothing is left behind"
    with Drives(tmp_path, 1 << 20) as drives:
        assert drives.measure(found.best.candidate, True, 0.01) > 0
        assert not [path for path in tmp_path.iterdir() if path.is_file()]
