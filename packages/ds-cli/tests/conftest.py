"""Fixtures: launchers as real processes, with small scripts as ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WAIT_S = 180.0
"""How long anything may take before a test calls it a hang. Far above what it does take."""

_PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
RANK = int(os.environ["RANK"])
HERE = Path(__file__).parent

def mark(name, text=""):
    part = HERE / f".{name}.{os.getpid()}"
    part.write_text(str(text))
    part.rename(HERE / name)

def await_mark(name):
    while not (HERE / name).exists():
        time.sleep(0.01)
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


class Launched:
    """A launcher that was started, and the folder in which its ranks leave marks."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.out = b""
        self.err = b""

    def wait(self) -> int:
        """Waits for the end, collects `out` and `err`, returns the exit code."""
        self.out, self.err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode

    def mark(self, name: str) -> str:
        """Waits until a rank has left this mark; returns its text."""
        self.until((self.folder / name).exists, f"mark {name}")
        return (self.folder / name).read_text()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition holds."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"waited {WAIT_S} s for {what}"
            time.sleep(0.01)

    def until_dead(self, *pids: int) -> None:
        """Waits until none of the processes runs."""
        self.until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


Launch = Callable[..., Launched]


@pytest.fixture
def scripts_dir() -> Path:
    """Where the console scripts are installed."""
    return Path(sysconfig.get_path("scripts"))


@pytest.fixture
def launch(tmp_path: Path, scripts_dir: Path) -> Iterator[Launch]:
    """`launch(code, *options, args=(), **popen)` starts `ds launch OPTIONS SCRIPT ARGS`."""
    started: list[Launched] = []

    def start(code: str, *options: str, args: tuple[str, ...] = (), **popen: object) -> Launched:
        script = tmp_path / "script.py"
        script.write_text(_PRELUDE + textwrap.dedent(code))
        settings: dict[str, object] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": tmp_path,
            # pytest itself may run under nohup, which the launcher would honour.
            "preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        }
        settings.update(popen)
        process = subprocess.Popen(
            [scripts_dir / "ds", "launch", *options, str(script), *args],
            **settings,  # type: ignore[call-overload]
        )
        started.append(Launched(process, tmp_path))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGKILL)
            each.process.wait()
        for pipe in (each.process.stdin, each.process.stdout, each.process.stderr):
            if pipe is not None:
                pipe.close()
    # What a failed test left behind must not disturb the next.
    for mark in tmp_path.glob("pid*"):
        pid = int(mark.read_text())
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """`alive(pid)`: whether a process runs."""
    return is_alive
