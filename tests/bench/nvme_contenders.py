"""Who takes part in nvme.py: ds-nvme and DeepSpeed in processes that stay alive, fio in a process a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIO_ENGINES = ("libaio", "io_uring", "psync")


@dataclass(frozen=True)
class Transfer:
    """One file, moved once: `order` is "read" or "write", sizes in bytes."""

    order: str
    block: int
    depth: int
    nbytes: int
    path: str


@dataclass(frozen=True)
class Cost:
    """What a transfer took, in seconds of the clock and of processors."""

    wall: float
    processor: float


Contender = Callable[[Transfer], Cost]


class ContenderError(RuntimeError):
    """A contender can't run here, or failed. The message ends with what it said last."""


class Server:
    """A process that stays alive, with one or several variants of a contender."""

    def __init__(self, python: str, kind: str, nbytes: int) -> None:
        # A session of its own: Ctrl-C is ours to handle, and our end closes its input, which ends it.
        self._process = subprocess.Popen(
            [python, str(HERE / "nvme_worker.py"), kind, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment(python),
        )
        try:
            self.variants: list[str] = self._answer()
        except BaseException:  # interrupted while it starts, which takes DeepSpeed seconds
            self.close()
            raise

    def run(self, variant: str, transfer: Transfer) -> Cost:
        """Let a variant carry out a transfer."""
        assert self._process.stdin is not None
        order = [variant, transfer.block, transfer.depth, transfer.order, transfer.path]
        with suppress(BrokenPipeError):  # the answer says why
            print(json.dumps(order), file=self._process.stdin, flush=True)
        return Cost(*self._answer())

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            try:
                if isinstance(answer := json.loads(line), list):
                    return answer
            except json.JSONDecodeError:
                continue  # something that a library prints
        _, errors = self._process.communicate()
        raise ContenderError(last_line(errors) or f"it ended with {self._process.returncode}")


def fio(engine: str, transfer: Transfer) -> Cost:
    """A run of fio with one job, spared its own latency statistics (gtod_reduce)."""
    command = [
        "fio",
        "--name=job",
        f"--filename={transfer.path}",
        f"--size={transfer.nbytes}",
        f"--bs={transfer.block}",
        f"--ioengine={engine}",
        f"--iodepth={1 if engine == 'psync' else transfer.depth}",
        f"--rw={transfer.order}",
        "--direct=1",
        "--overwrite=1",
        "--scramble_buffers=0",
        "--invalidate=0",
        "--gtod_reduce=1",
        "--output-format=json",
    ]
    # A session of its own: fio touches the terminal, which stops whoever runs it in the background.
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
    if done.returncode:
        raise ContenderError(last_line(done.stderr or done.stdout) or f"fio ended with {done.returncode}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]  # notes may come first
    processor = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Cost(job[transfer.order]["runtime"] / 1000, processor)


def environment(python: str) -> dict[str, str]:
    """Of a contender's process: its interpreter's tools are found (DeepSpeed needs ninja), and what DeepSpeed compiles
    stays beside its environment. Another Python than ours sees none of our packages."""
    folder = os.path.dirname(os.path.abspath(python))
    values = {"TORCH_EXTENSIONS_DIR": os.path.join(os.path.dirname(folder), "torch-extensions")} | dict(os.environ)
    if python != sys.executable:
        values.pop("PYTHONPATH", None)
    return values | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}", "DS_ACCELERATOR": "cpu"}


def last_line(text: str) -> str:
    """The last line that isn't empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def fio_reason() -> str | None:
    """Why fio can't take part, or None."""
    return None if shutil.which("fio") else "it isn't installed (apt install fio)"


def peers_reason(python: str) -> str | None:
    """Why DeepSpeed can't take part, or None; that its operator loads is not known yet."""
    return None if os.path.exists(python) else f"there is no {python} (make .venv-peers/.deepspeed)"
