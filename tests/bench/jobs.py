"""Jobs of the coordinator: the ranks of one contender, started, asked and stopped together."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUR_PYTHON = ROOT / ".venv" / "bin" / "python"
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
CLOCK_HZ = os.sysconf("SC_CLK_TCK")


class JobError(RuntimeError):
    """A rank failed, died or did not answer. The message ends with the last lines of its log."""


def python_of(contender: str) -> Path:
    """The interpreter that runs a contender: ours for ours, the peers' for all others."""
    return OUR_PYTHON if contender.startswith("ours") else PEER_PYTHON


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher would set: addresses, ranks, one thread a rank."""
    venv_free = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return venv_free | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """The ranks of one contender, alive but asleep between commands. A context manager."""

    def __init__(self, contender: str, dtype: str, world: int, timeout_s: float = 300.0):
        self.contender = contender
        self.timeout_s = timeout_s
        self._files = ExitStack()
        self._logs: list[IO[bytes]] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        python = python_of(contender)
        if not python.exists():
            raise JobError(f"{contender}: no {python.relative_to(ROOT)}; `make bench` creates it")
        port = free_port()
        # A venv's console scripts (ninja, for what DeepSpeed compiles) are found as if it were activated.
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        for rank in range(world):
            log = self._files.enter_context(tempfile.TemporaryFile(prefix="bench-"))  # noqa: SIM115
            self._logs.append(log)
            process = subprocess.Popen(
                [str(python), str(HERE / "worker.py"), contender, dtype],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=rank_environment(rank, world, port) | {"PATH": path},
                cwd=ROOT,
            )
            self._ranks.append(process)
        self._buffers = [b""] * world
        try:
            self.num_parameters: int = self._gather()[0]["num_parameters"]
        except JobError:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return [process.pid for process in self._ranks]

    def ask(self, cmd: str, **arguments: Any) -> list[dict[str, Any]]:
        """Sends a command to all ranks; their answers, by rank."""
        line = json.dumps({"cmd": cmd, **arguments}).encode() + b"\n"
        for process in self._ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its last answer, or its log, says why
        return self._gather()

    def close(self) -> None:
        """Ends the ranks: asks, then kills."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + 10
        for process in self._ranks:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._files.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gather(self) -> list[dict[str, Any]]:
        """One answer of each rank, whichever comes first, so that a rank that died is heard at once."""
        deadline = time.monotonic() + self.timeout_s
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._ranks):
            waiting = {_pipe(self._ranks[rank]): rank for rank in range(len(self._ranks)) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(min(waiting.values()), f"silent for {self.timeout_s:.0f} s")
            for stream in ready:
                rank = waiting[stream]
                chunk = os.read(stream, 1 << 20)
                if not chunk:
                    raise self._failure(rank, "died")
                line, newline, rest = (self._buffers[rank] + chunk).partition(b"\n")
                if not newline:
                    self._buffers[rank] = line
                    continue
                self._buffers[rank] = rest
                answers[rank] = json.loads(line)
                if "error" in answers[rank]:
                    raise self._failure(rank, answers[rank]["error"])
        return [answers[rank] for rank in range(len(self._ranks))]

    def _failure(self, rank: int, what: str, num_bytes: int = 2000) -> JobError:
        log = self._logs[rank]
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - num_bytes))
        tail = log.read().decode(errors="replace")
        return JobError(f"{self.contender}: rank {rank}: {what}\n{tail}")


def _pipe(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return process.stdout.fileno()


class ForeignLoad:
    """How much processor others used while some processes ran: the machine's busy time less theirs."""

    def __init__(self, pids: Sequence[int]):
        self._pids = pids
        self._start = time.monotonic(), _busy_seconds(), _cpu_seconds(pids)

    def share(self) -> float:
        """Processors' worth of foreign work since the start: 0.0 is a quiet machine, 1.0 one core lost."""
        began, busy, own = self._start
        elapsed = max(time.monotonic() - began, 1e-3)
        foreign = (_busy_seconds() - busy) - (_cpu_seconds(self._pids) - own)
        return max(0.0, foreign / elapsed)


def machine_load(seconds: float) -> float:
    """How many processors were busy over the next so many seconds, whoever used them."""
    began, busy = time.monotonic(), _busy_seconds()
    time.sleep(seconds)
    return (_busy_seconds() - busy) / (time.monotonic() - began)


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time that these processes have used since they started."""
    ticks = 0
    for pid in pids:
        # Behind the process's name, which is in brackets and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / CLOCK_HZ


def _busy_seconds() -> float:
    """Processor time the whole machine has spent on anything, including what a hypervisor took."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / CLOCK_HZ
