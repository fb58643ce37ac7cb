"""One rank of one contender: reads a JSON command a line from stdin, answers a line on the first stdout.

Between commands it sleeps in that read, so idle contenders cost no processor time. Commands:
`{"cmd": "steps", "n": 5}`, `{"cmd": "memory"}`, `{"cmd": "profile", "n": 2, "rows": 25}`, `{"cmd": "stop"}`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO


def _claim_stdout() -> TextIO:
    """Keeps the pipe for answers and sends what libraries print to the log, which is stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _memory_mb(key: str) -> float:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {key}")


class Stopwatch:
    """Times one step and its phases."""

    def __init__(self) -> None:
        self.phases_ms: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """The phase has just ended."""
        now = time.perf_counter()
        self.phases_ms[phase] = (now - self._last) * 1e3
        self._last = now

    def total_ms(self) -> float:
        """Since the start."""
        return (time.perf_counter() - self._start) * 1e3


class Rank:
    """The contender's rank: its step, its data and what it measures."""

    def __init__(self, name: str, dtype: str):
        import torch
        import torch.distributed as dist
        from contenders import Contender
        from gpt import GPTShape, make_batches, make_model

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        contender = Contender.parse(name)
        contender.load()
        _touch_libraries()
        self.imports_mb = _memory_mb("VmRSS")
        self._dist = dist
        shape = GPTShape()
        model = make_model(shape)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._batches = make_batches(shape, dist.get_rank())
        self._step = contender.build(model, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        self._num_steps = 0

    def steps(self, n: int) -> dict[str, Any]:
        """Trains `n` steps: wall milliseconds of each, of its phases, and the rank's losses."""
        times: list[float] = []
        phases: list[dict[str, float]] = []
        losses: list[float] = []
        self._dist.barrier()
        for _ in range(n):
            tokens, targets = self._batches[self._num_steps % len(self._batches)]
            self._num_steps += 1
            watch = Stopwatch()
            loss = self._step(tokens, targets, watch.mark)
            times.append(watch.total_ms())
            phases.append(watch.phases_ms)
            losses.append(loss.item())
        return {"times_ms": times, "phases_ms": phases, "losses": losses}

    def memory(self) -> dict[str, float]:
        """Resident memory after the imports and at its highest, in MB."""
        return {"imports_mb": self.imports_mb, "peak_mb": _memory_mb("VmHWM")}

    def profile(self, n: int, rows: int) -> dict[str, str]:
        """torch's profile of `n` steps as a table of the ops with the most time of their own."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.steps(n)
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows)
        return {"table": table}


def _touch_libraries() -> None:
    """A tiny training step, so that lazily loaded parts of torch count as imports for every contender."""
    import torch

    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(64, 64)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    wide = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.mm(wide, wide)


def main() -> int:
    """Serves commands until stdin ends."""
    answers = _claim_stdout()

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    parser = argparse.ArgumentParser()
    parser.add_argument("contender")
    parser.add_argument("dtype", choices=["fp32", "bf16"])
    arguments = parser.parse_args()
    try:
        rank = Rank(arguments.contender, arguments.dtype)
        answer({"ready": True, "num_parameters": rank.num_parameters})
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "steps": rank.steps,
            "memory": rank.memory,
            "profile": rank.profile,
        }
        for line in sys.stdin:
            command = json.loads(line)
            name = command.pop("cmd")
            if name == "stop":
                break
            answer(commands[name](**command))
    except BaseException as error:  # the coordinator must hear of anything
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Without waiting for the other rank: libraries' exit handlers may want to talk to it.
    os._exit(status)
