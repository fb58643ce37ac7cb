"""What is around a search: sizes, spaces from files, places, the page cache, one transfer, table and picture."""

from __future__ import annotations

import json
import math
import os
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ds_nvme import page_cache, sweep
from ds_nvme.drives import Drives
from ds_nvme.errors import FileError, MissingFileError, StoppedError, TruncatedFileError
from ds_nvme.gauge import gauge
from ds_nvme.options import GDS, Candidate
from ds_nvme.places import HOST, Place
from ds_nvme.sizes import format_size, parse_size
from ds_nvme.space import Space
from ds_nvme.trial import Trial, Tuned

CANDIDATE = Candidate("auto", 65536, 4)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(512, 512), ("4096", 4096), ("128K", 131072), ("1m", 1 << 20), ("1.5 GiB", 3 << 29), ("2TB", 2 << 40)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes == parse_size(format_size(nbytes))


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "12X", "K", "1e6", True, 0])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError, match="a whole number of bytes from 1 up: got"):
        parse_size(text)


def test_a_space_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(
        json.dumps(
            {
                "engine": "threads",
                "block_size": ["128K", 1048576, "128K"],
                "queue_depth": 8,
                "io_parallel": [1, 2],
                "single_submit": ["false", True],
            }
        )
    )
    space = Space.read(path)
    assert space == Space(("threads",), (131072, 1 << 20), (8,), (False, True), (True,), (1, 2))
    assert len(space.candidates()) == len(set(space.candidates())) == 8
    assert Candidate("threads", 1 << 20, 8, True, True, 2) in space.candidates()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not"),
        ("[]", "holds a list"),
        ('{"blocksize": [1]}', "did you mean 'block_size'"),
        ('{"zzz": [1]}', "the keys are engine, block_size"),
        ('{"block_size": ["big"]}', "block_size: a size is .* got 'big'"),
        ('{"queue_depth": [true]}', "queue_depth: a count is .* got True"),
        ('{"queue_depth": [0]}', "got 0"),
        ('{"queue_depth": []}', "empty list for 'queue_depth'"),
        ('{"overlap_events": [2]}', "true or false: got 2"),
        ('{"engine": ["aio"]}', "one of libaio, io_uring, threads: got 'aio'"),
        ('{"thread_count": 1, "intra_op_parallelism": 2}', "twice"),
    ],
)
def test_what_is_no_space(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        Space.read(tmp_path / "sweep.json")
    assert "sweep.json" in str(caught.value)


def test_without_torch_there_is_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HOST.refusal() is None
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch can't be imported" in str(Place(gpu=True).refusal())


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A torch that has a CUDA device, as far as looking for one goes."""
    torch = types.SimpleNamespace(
        __version__="9.9",
        version=types.SimpleNamespace(cuda="13.0"),
        cuda=types.SimpleNamespace(is_available=lambda: True),
        uint8="uint8",
        randint=lambda low, high, shape, dtype, device: (device, *shape),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def test_gds_is_tried_before_it_is_used(fake_gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    import ds_nvme

    calls: list[object] = []

    class Handle:
        def __init__(self, **options: object) -> None:
            calls.append(options)

        def __enter__(self) -> Handle:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            calls.append("closed")

        def pin_device_tensor(self, tensor: object) -> None:
            calls.append(("pinned", tensor))

        def unpin_device_tensor(self, tensor: object) -> None:
            calls.append(("unpinned", tensor))

    def refuse() -> None:
        raise OSError("no driver")

    direct = Place(gpu=True, gds=True)
    monkeypatch.setattr(ds_nvme, "gds_handle", refuse, raising=False)
    assert direct.refusal() == "GPUDirect Storage can't run here: no driver"
    monkeypatch.setattr(ds_nvme, "gds_handle", Handle, raising=False)
    assert direct.refusal() is None and calls == [{}, "closed"]
    candidates = direct.candidates(Space(engine=("libaio", "threads"), block_size=(4096,), queue_depth=(1,)))
    assert [(c.engine, c.intra_op_parallelism) for c in candidates] == [(GDS, 1), (GDS, 2), (GDS, 4)]
    assert candidates[0].python() == (
        "handle = ds_nvme.gds_handle(block_size=4096, queue_depth=1, single_submit=False, overlap_events=True, "
        "intra_op_parallelism=1)"
    )
    calls.clear()
    direct.open(candidates[1])
    with ExitStack() as stack:
        assert direct.allocate(7, stack) == ("cuda", 7)
    assert "engine" not in calls[0] and calls[0]["intra_op_parallelism"] == 2  # type: ignore[index,operator]
    assert calls[1:] == [{}, ("pinned", ("cuda", 7)), ("unpinned", ("cuda", 7)), "closed"]
    fake_gpu.version.cuda, fake_gpu.cuda.is_available = None, lambda: False
    assert direct.refusal() == "GPU memory is on a CUDA device: torch 9.9 is built without CUDA"


def test_what_is_measured_is_not_zeros() -> None:
    with ExitStack() as stack:
        buffer = HOST.allocate((1 << 20) + 7, stack)
        assert len(buffer) == (1 << 20) + 7 and bytes(buffer[-7:]) == bytes(buffer[:7]) != bytes(7)


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], str]:
    """The kernel's switch, replaced: dropping everything would slow down the whole machine."""
    switch = tmp_path / "switch"
    switch.write_text("")
    monkeypatch.setattr(page_cache, "_SWITCH", str(switch))
    return switch.read_text


def test_the_page_cache_is_dropped_when_asked(
    drops: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: advised.append(fd))
    for flush in (False, True):
        with Drives(tmp_path, 1 << 20, flush=flush) as drives:
            direct = not drives._paged
            drives.measure(CANDIDATE, True, 0.0)
            assert not advised and drops() == "", "writing drops nothing"
            drives.measure(CANDIDATE, False, 0.0)
        assert bool(advised) == (flush or not direct) and drops() == ("1" if flush else "")
        advised.clear()
    monkeypatch.setattr(page_cache, "_SWITCH", str(tmp_path / "absent" / "switch"))
    assert "by root only" in str(page_cache.drop_everything())


def test_files_in_memory_are_dropped_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no tmpfs here")
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: advised.append(fd))
    found = gauge(CANDIDATE, write=False, folder="/dev/shm", io_size=8192, loops=2)
    assert len(advised) == (0 if found.direct else 2)


@pytest.mark.parametrize("write", [True, False])
def test_one_transfer(write: bool, engine: str, tmp_path: Path) -> None:
    candidate = Candidate(engine, 65536, 4, intra_op_parallelism=2)
    found = gauge(candidate, write=write, folder=tmp_path, io_size=300_001, loops=3)
    assert (found.write, found.nbytes, len(found.seconds), found.engine) == (write, 300_001, 3, engine)
    assert min(found.rates) <= found.rate <= max(found.rates) and found.spread >= 0
    assert math.isclose(found.processor_seconds_per_gib * 3 * 300_001 / (1 << 30), found.processor_seconds)
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_new_and_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    gauge(CANDIDATE, write=True, file=path, io_size=5000, loops=1)
    content = path.read_bytes()
    assert len(content) == 5000 and content != bytes(5000)
    assert gauge(CANDIDATE, write=False, file=path, loops=1).nbytes == 5000
    assert gauge(CANDIDATE, write=False, file=path, io_size=999, loops=1).nbytes == 999
    with pytest.raises(FileError, match="name a new file"):
        gauge(CANDIDATE, write=True, file=path)
    with pytest.raises(TruncatedFileError):
        gauge(CANDIDATE, write=False, file=path, io_size=5001)
    with pytest.raises(MissingFileError):
        gauge(CANDIDATE, write=False, file=tmp_path / "absent")
    (tmp_path / "empty").touch()
    with pytest.raises(FileError, match="it is empty"):
        gauge(CANDIDATE, write=False, file=tmp_path / "empty")
    with pytest.raises(ValueError, match="one of them"):
        gauge(CANDIDATE, write=False, file=path, folder=tmp_path)
    assert path.read_bytes() == content


def test_a_stopped_transfer_keeps_what_it_measured(tmp_path: Path) -> None:
    answers = iter([False, False, True])
    found = gauge(CANDIDATE, write=True, folder=tmp_path, io_size=4096, stop=lambda: next(answers))
    assert len(found.seconds) == 2
    with pytest.raises(StoppedError):
        gauge(CANDIDATE, write=True, file=tmp_path / "new", io_size=4096, stop=lambda: True)
    assert not list(tmp_path.iterdir()), "a file that was not finished does not stay"


def tuned() -> Tuned:
    def trial(engine: str, block: int, depth: int, threads: int, rate: float, came: int) -> Trial:
        return Trial(
            Candidate(engine, block, depth, intra_op_parallelism=threads),
            read=[rate, rate * 1.1],
            typical_read=rate,
            round=came,
        )

    trials = (
        trial("libaio", 1 << 20, 32, 1, 3e9, 1),
        trial("io_uring", 1 << 20, 8, 2, 2.9e9, 1),
        trial("libaio", 4096, 32, 1, 1e8, 0),
    )
    return Tuned(trials[0], trials, 60.0)


def test_a_sweep_as_a_table(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    found = sweep.table(tuned())
    assert list(found["block_size"]) == [1 << 20, 1 << 20, 4096] and list(found["read_gb_s"]) == [3.0, 2.9, 0.1]
    assert found["write_gb_s"].isna().all() and list(found["loops"]) == [2, 2, 2]
    found.to_csv(tmp_path / "sweep.csv", index=False)
    assert (tmp_path / "sweep.csv").read_text().splitlines()[1].startswith("libaio,1048576,32,False,True,1,3.0,,3.0,")


def test_a_sweep_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = {name for name in sys.modules if name.startswith("matplotlib.pyplot")}
    sweep.draw(tuned(), tmp_path / "sweep.png", "a drive")
    picture = (tmp_path / "sweep.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and 2000 < len(picture) < 60_000
    assert {name for name in sys.modules if name.startswith("matplotlib.pyplot")} == before


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "find_spec", lambda name: None if name == "pandas" else object())
    assert sweep.missing() == "table and picture of a sweep need pandas: pip install 'ds-nvme[tune]'"
    monkeypatch.setattr(sweep, "find_spec", lambda name: object())
    assert sweep.missing() is None
