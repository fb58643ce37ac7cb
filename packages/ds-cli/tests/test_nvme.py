"""`ds_nvme_tune` and `ds_io`: through the runner, as processes, in a terminal, and interrupted."""

from __future__ import annotations

import csv
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ds_cli.ds_io
import ds_cli.ds_nvme_tune
import ds_cli.main
from ds_nvme import AioConfig, page_cache, places, sweep

QUICK = ["--budget", "0.3", "--loops", "2", "--io_size", "1M"]
SPACE = {"engine": ["threads"], "block_size": ["64K"], "queue_depth": [4], "intra_op_parallelism": [1, 2]}
DRAWS = find_spec("pandas") is not None and find_spec("matplotlib") is not None
WAIT_S = 180.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the commands run; holds a sweep configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page_cache, "_SWITCH", str(tmp_path / "absent" / "switch"))  # never the real one
    (tmp_path / "sweep.json").write_text(json.dumps(SPACE))
    (tmp_path / "drive").mkdir()
    yield tmp_path
    assert not list((tmp_path / "drive").iterdir()), "nothing stays on the drive"


def tune(*options: str) -> Any:
    return CliRunner().invoke(ds_cli.ds_nvme_tune.app, ["--nvme_dir", "drive", *options])


def io(*options: str) -> Any:
    return CliRunner().invoke(ds_cli.ds_io.app, [*options])


def test_it_finds_a_configuration(folder: Path) -> None:
    done = tune(*QUICK, "--sweep-config", "sweep.json", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["complete"] and found["measured"] == found["combinations"] == 2
    assert AioConfig.model_validate(found["aio"]).block_size == 65536
    assert found["engine"] == "threads" and "engine='threads'" in found["python"]
    assert found["read_gb_s"] > 0 and found["write_gb_s"] > 0 and found["spread"] >= 0 and found["loops"] == 2
    assert "over 2 loops" in found["confidence"]
    assert "best so far: read = " in done.stderr
    if DRAWS:
        with open(folder / found["csv"]) as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == 2
        assert rows[0]["intra_op_parallelism"] == str(found["aio"]["thread_count"])
        assert (folder / found["png"]).read_bytes().startswith(b"\x89PNG")
    else:
        assert found["csv"] is None and "pip install 'ds-nvme[tune]'" in done.stderr


def test_for_people_it_ends_with_section_line_and_confidence(folder: Path) -> None:
    options = [*QUICK, "--sweep_config", "sweep.json", "--no_write", "--verbose", "--engine", "threads"]
    (folder / "drive" / "other").mkdir()
    done = CliRunner().invoke(ds_cli.main.app, ["nvme-tune", "--nvme_dir", "drive", "drive/other", *options])
    (folder / "drive" / "other").rmdir()
    assert done.exit_code == 0, done.stderr
    text = done.stdout
    assert text.startswith("Best performance (GB/sec): read = ") and "write =" not in text.splitlines()[0]
    section = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert section["aio"]["queue_depth"] == 4
    assert "\nhandle = ds_nvme.aio_handle(engine='threads', block_size=65536, queue_depth=4," in text
    assert "\nvaries by " in text and "\nmeasured 2 of 2 combinations in " in text
    assert sum(line.startswith("round 0: read = ") for line in done.stderr.splitlines()) == 4


def test_without_its_libraries_it_measures_all_the_same(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    done = tune(*QUICK, "--sweep_config", "sweep.json", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["csv"] is None
    assert "no table and no picture: table and picture of a sweep need pandas and matplotlib" in done.stderr
    assert not (folder / "_aio_bench_logs").exists()
    done = tune(*QUICK, "--log_dir", "logs")
    assert done.exit_code == 2 and "--log_dir: " in done.stderr and "pip install 'ds-nvme[tune]'" in done.stderr


@pytest.mark.skipif(not DRAWS, reason="pandas and matplotlib are not installed")
def test_the_folder_of_the_logs_is_made(folder: Path) -> None:
    done = tune(*QUICK, "--sweep_config", "sweep.json", "--log_dir", "deep/logs", "--flush_page_cache")
    assert done.exit_code == 0, done.stderr
    assert sorted(path.name for path in (folder / "deep" / "logs").iterdir()) == ["sweep.csv", "sweep.png"]
    assert "only the files' own pages are dropped: " in done.stderr and "root only" in done.stderr
    assert "see deep/logs/sweep.csv and deep/logs/sweep.png" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--no_read", "--no_write"], "got neither"),
        (["--nvme_dir", "absent"], "absent"),
        (["--sweep_config", "absent.json"], "absent.json"),
        (["--sweep_config", "bad.json"], "did you mean 'queue_depth'"),
        (["--engine", "aio"], "an engine is one of auto, libaio, io_uring, threads: got 'aio'"),
        (["--io_size", "much"], "got 'much'"),
        (["--loops", "0"], "it must be 1 or more; it is '0'"),
        (["--budget", "long"], "it must be a number; it is 'long'"),
        (["--budget", "-1"], "-1.0 seconds"),
        (["--gpu"], "--gpu: GPU memory is torch's: torch can't be imported"),
        (["--gds"], "--gds: GPU memory is torch's: torch can't be imported"),
        (["--bogus"], "--bogus"),
    ],
)
def test_tuning_errors_exit_with_2(
    options: list[str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (folder / "bad.json").write_text('{"queue_dept": [1]}')
    done = tune(*options)
    assert (done.exit_code, done.stdout) == (2, ""), done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


def test_gds_has_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.Place, "refusal", lambda self: None)
    done = tune("--gds", "--engine", "threads")
    assert done.exit_code == 2 and "without an engine of aio_handle: got --engine threads" in done.stderr


# --- one transfer


@pytest.mark.parametrize("operation", ["read", "write"])
def test_one_transfer(operation: str) -> None:
    options = [f"--{operation}", "--folder", "drive", "--io_size", "300K", "--block-size", "64K", "--loops", "3"]
    done = io(*options, "--threads", "2", "--engine", "threads", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["operation"], found["io_size"], found["loops"], len(found["seconds"])) == (operation, 307200, 3, 3)
    assert (found["engine"], found["block_size"], found["intra_op_parallelism"]) == ("threads", 65536, 2)
    assert found["gb_s_min"] <= found["gb_s"] <= found["gb_s_max"]
    text = io(*options).stdout
    assert text.startswith(operation) and "300K of host memory, drive" in text and "page cache" in text


def test_a_file_is_written_then_read(folder: Path) -> None:
    assert io("--write", "--file", "new", "--io_size", "5000", "--loops", "1").exit_code == 0
    assert (folder / "new").stat().st_size == 5000
    done = io("--read", "--file", "new", "--loops", "1", "--json", "--flush_page_cache")
    assert json.loads(done.stdout)["io_size"] == 5000 and "root only" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "one of --read and --write must be given: neither is"),
        (["--read", "--write", "--folder", "drive"], "both is"),
        (["--read"], "one of --folder and --file must be given: neither is"),
        (["--read", "--folder", "drive", "--file", "x"], "both is"),
        (["--read", "--folder", "absent"], "absent"),
        (["--read", "--file", "absent"], "absent"),
        (["--write", "--file", "sweep.json"], "name a new file"),
        (["--read", "--file", "drive"], "regular files"),
        (["--read", "--folder", "drive", "--engine", "aio"], "got 'aio'"),
        (["--read", "--folder", "drive", "--queue_depth", "few"], "it is 'few'"),
        (["--read", "--folder", "drive", "--gpu"], "torch can't be imported"),
    ],
)
def test_transfer_errors_exit_with_2(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = io(*options)
    assert (done.exit_code, done.stdout) == (2, ""), done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


def test_a_drive_that_fails_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_nvme import AioHandle
    from ds_nvme.errors import NoSpaceError

    def fail(*_: object) -> int:
        raise NoSpaceError(28, "file", 4096, "free space")

    monkeypatch.setattr(AioHandle, "sync_pwrite", fail)
    for done in (io("--write", "--folder", "drive"), tune(*QUICK)):
        assert (done.exit_code, done.stdout) == (1, "")
        assert "at offset 4096; free space" in done.stderr


# --- as processes


@pytest.mark.parametrize("command", [["ds_nvme_tune"], ["ds", "nvme-tune"], ["ds_io"], ["ds", "io"]], ids=" ".join)
def test_console_scripts_start_light_and_are_plain_in_a_pipe(command: list[str], scripts_dir: Path) -> None:
    env = {**os.environ, "FORCE_COLOR": "1", "GITHUB_ACTIONS": "true", "PY_COLORS": "1"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", scripts_dir / command[0], *command[1:], "--help"],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout and "\x1b" not in done.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert loaded.isdisjoint({"torch", "numpy", "pandas", "matplotlib", "ds_nvme", "rich"})


LONG = ["--nvme_dir", "drive", "--io_size", "4M", "--budget", "10", "--sweep_config", "sweep.json", "--verbose"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_prints_the_best_so_far(number: signal.Signals, scripts_dir: Path) -> None:
    env = {**os.environ, "FORCE_COLOR": "1"}
    with subprocess.Popen(
        [scripts_dir / "ds_nvme_tune", *LONG, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        # pytest itself may run under nohup or in a shell's background, which the command would honour.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        shown = ""
        while "round 0: " not in shown:
            line = process.stderr.readline()
            assert line, shown
            shown += line
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + number, err
    found = json.loads(out)
    assert found["complete"] is False and found["read_gb_s"] > 0 and "stopped early" in found["confidence"]
    assert AioConfig.model_validate(found["aio"])
    assert "\x1b" not in out + shown + err and "Traceback" not in err
    if DRAWS:
        assert os.path.exists(found["png"])


def test_interrupted_before_it_measured_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_nvme import AioHandle

    monkeypatch.setattr(AioHandle, "sync_pwrite", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    for done in (tune(*QUICK, "--io_size", "40M"), io("--read", "--folder", "drive", "--io_size", "4K")):
        assert (done.exit_code, done.stdout) == (143, "")
        assert "stopped before anything was measured" in done.stderr
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_killed_search_leaves_nothing(scripts_dir: Path) -> None:
    with subprocess.Popen([scripts_dir / "ds_nvme_tune", *LONG], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "round 0: " not in process.stderr.readline():
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL  # and the fixture looks at the drive


def test_in_a_terminal_there_is_a_bar(scripts_dir: Path) -> None:
    """On standard error only: standard output, redirected, stays plain."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"}
    with subprocess.Popen(
        [scripts_dir / "ds_nvme_tune", "--nvme_dir", "drive", *QUICK, "--sweep_config", "sweep.json"],
        stdout=subprocess.PIPE,
        stderr=follower,
        env=env,
    ) as process:
        os.close(follower)
        shown, end = b"", time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if select.select([leader], [], [], 0.05)[0]:
                try:
                    shown += os.read(leader, 65536)
                except OSError:  # it has ended
                    break
        out, _ = process.communicate(timeout=WAIT_S)
    os.close(leader)
    assert process.returncode == 0, shown
    assert b"100%" in shown and b"best so far: read = " in shown and b"\x1b[" in shown
    assert out.startswith(b"Best performance") and b"\x1b" not in out
