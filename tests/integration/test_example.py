"""The example a newcomer starts with: its corpus, and a short run of it through the real launcher."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

EXAMPLE = Path(__file__).parents[2] / "packages" / "ds-engine" / "examples" / "gpt"
PNG_HEADER = b"\x89PNG\r\n\x1a\n"


def load_module(name: str) -> ModuleType:
    """A file of the example. Under another name: the example's are too common to be left in sys.modules."""
    spec = importlib.util.spec_from_file_location(f"example_gpt_{name}", EXAMPLE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


data = load_module("data")
model = load_module("model")


def free_port() -> int:
    """A port at which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library in which every file consists of a byte of its own."""
    for number in range(64):
        folder = tmp_path / ("test" if number % 8 == 7 else f"package{number % 3}")
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_bytes(bytes([number]) * 100)
    return tmp_path


def test_no_file_is_both_trained_on_and_held_out(library: Path) -> None:
    corpus = data.load(library)
    assert set(corpus.train_files).isdisjoint(corpus.held_out_files)
    assert set(corpus.train.tolist()).isdisjoint(corpus.held_out.tolist())
    assert len(corpus.train) + len(corpus.held_out) == 56 * 100  # all but the folder of tests
    assert corpus.train.dtype == corpus.held_out.dtype == torch.uint8
    assert not any("test" in Path(name).parts for name in corpus.train_files + corpus.held_out_files)


def test_files_stay_where_they_are_when_others_come(library: Path) -> None:
    before = data.load(library)
    for number in range(50):
        (library / f"new{number}.py").write_text("pass\n")
    after = data.load(library)
    assert set(before.train_files) <= set(after.train_files)
    assert set(before.held_out_files) <= set(after.held_out_files)


def test_the_corpus_is_the_same_at_each_load_and_capped(library: Path) -> None:
    first, second = data.load(library), data.load(library)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    assert list(first.train_files) == sorted(first.train_files)
    capped = data.load(library, max_bytes=4000)
    assert len(capped.train) + len(capped.held_out) == 4000


def test_a_corpus_too_small_to_hold_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"1 \.py files, too few"):
        data.load(tmp_path)


def test_the_standard_library_is_enough() -> None:
    corpus = data.load()
    assert len(corpus.train) > 4_000_000
    assert len(corpus.held_out) > 100_000


def test_samples_depend_on_step_rank_and_seed_alone() -> None:
    text = torch.randint(256, (10_000,), dtype=torch.uint8)
    x, y = data.sample(text, 4, 32, step=3, rank=1, seed=5)
    assert x.shape == y.shape == (4, 32)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])  # the target of a byte is the byte after it
    assert torch.equal(x, data.sample(text, 4, 32, step=3, rank=1, seed=5)[0])
    for other in ({"step": 4}, {"rank": 0}, {"seed": 6}):
        arguments = {"step": 3, "rank": 1, "seed": 5} | other
        assert not torch.equal(x, data.sample(text, 4, 32, **arguments)[0])


def test_held_out_windows_are_dealt_out_once() -> None:
    text = torch.arange(4000).remainder(251).to(torch.uint8)
    whole = [row for x, _ in data.held_out_batches(text, 4, 16, count=6) for row in x.tolist()]
    shares = [
        row
        for rank in range(2)
        for x, y in data.held_out_batches(text, 4, 16, count=3, rank=rank, world_size=2)
        for row in x.tolist()
    ]
    assert len(whole) == 24
    assert sorted(shares) == sorted(whole)


def test_generate_continues_the_prompt_and_repeats_itself() -> None:
    torch.manual_seed(0)
    gpt = model.GPT(width=32, num_layers=1, num_heads=2, context=8)
    prompt = torch.tensor(list(b"def "))
    written = gpt.generate(prompt, num_new=12)
    assert written[:4].tolist() == prompt.tolist()
    assert len(written) == 16
    assert torch.equal(written, gpt.generate(prompt, num_new=12))


def test_no_byte_sees_a_later_one() -> None:
    torch.manual_seed(0)
    gpt = model.GPT(width=32, num_layers=2, num_heads=2, context=16)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    before, after = gpt(tokens), gpt(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_short_run_learns_and_leaves_its_curves(tmp_path: Path, stage: int) -> None:
    out = tmp_path / "run"
    # A port of its own: jobs that start at the same time all find the default one free.
    command = [Path(sys.executable).with_name("deepspeed"), "--num_accelerators", 2, "--master_port", free_port()]
    command += [
        EXAMPLE / "train.py",
        "--zero",
        stage,
        "--steps",
        16,
        "--evaluate-every",
        8,
        "--held-out-batches",
        1,
        "--out",
        out,
    ]
    command += ["--width", 64, "--layers", 1, "--heads", 2, "--context", 64, "--max-bytes", 1_000_000]
    command += ["--sample-bytes", 40]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    history = json.loads((out / "history.json").read_text())
    assert [row["step"] for row in history["steps"]] == list(range(1, 17))
    assert [row["step"] for row in history["held_out"]] == [1, 8, 16]
    assert history["steps"][0]["loss"] == pytest.approx(5.55, abs=0.15)  # log 256: it knows nothing yet
    assert history["held_out"][-1]["loss"] < 4.5
    assert history["facts"]["ranks"] == 2
    assert history["sample"].startswith("def ")
    assert (out / "loss.png").read_bytes().startswith(PNG_HEADER)
    assert history["sample"] in done.stdout
    assert str(out / "loss.png") in done.stdout.replace("\n", "")
    assert "step 16/16" in done.stdout  # plain lines, since stdout is no terminal


def test_what_is_written_can_be_printed() -> None:
    text = data.decode(torch.tensor(list(b"def f():\n\tx\x1b[2J\r\xff")))
    assert text == "def f():\n\ufffdx\ufffd[2J\ufffd\ufffd"


def test_the_panel_shows_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    history = load_module("history")
    monkeypatch.setitem(sys.modules, "history", history)  # under the name by which view.py imports it
    view = load_module("view")
    run = history.History("run")
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, color_system=None, width=100)
    facts = {"tokens": 64, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 10.0, "memory_bytes": 2**20}
    with view.View(run, 8, "a run", console) as panel:
        for step in range(1, 9):
            run.steps.append(facts | {"step": step, "seconds": step / 2, "loss": 9.0 - step})
            panel.refresh()
    assert "█▇▆▅▄▃▂▁" in terminal.getvalue()
    assert "8/8" in terminal.getvalue()


def test_plot_overlays_runs(tmp_path: Path) -> None:
    rows = [{"step": step, "seconds": step / 2, "tokens": step * 8, "loss": 5.0 / step} for step in range(1, 9)]
    paths = [tmp_path / name / "history.json" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        run = {"name": path.parent.name, "facts": {}, "steps": rows, "held_out": rows[::4], "sample": ""}
        path.write_text(json.dumps(run))
    command = [
        sys.executable,
        EXAMPLE / "plot.py",
        *paths,
        "--against",
        "tokens",
        "--out",
        tmp_path / "c.png",
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c.png").read_bytes().startswith(PNG_HEADER)
