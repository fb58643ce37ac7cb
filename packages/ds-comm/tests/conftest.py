"""Ranks that tests may kill: fresh processes, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what it returned, or what it raised, or neither (it was killed, or ran too long)."""

    value: Any = None
    error: str = ""
    exitcode: int | None = None


Launch = Callable[..., list[Ended]]


@pytest.fixture(scope="session")
def launch() -> Launch:
    """`launch(world, function, *args)` runs `function(rank, *args)` in `world` fresh processes.

    `env` (a dict, or a function of the rank) is all that they find of the launchers' variables. Ranks that
    have not ended after `limit_s` are killed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "ds_comm"])

    def run(
        world: int,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
        limit_s: float = 120.0,
    ) -> list[Ended]:
        began = time.monotonic()
        processes, pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            variables = env(rank) if callable(env) else env
            process = context.Process(target=_run, args=(theirs, rank, function, args, dict(variables or {})))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        ended: dict[int, Ended] = {}
        pending: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
        while pending and (left := began + limit_s - time.monotonic()) > 0:
            for pipe in wait(list(pending), timeout=left):
                rank = pending.pop(pipe)
                ended[rank] = _receive(pipe)
        for rank, process in enumerate(processes):
            if rank in pending.values():
                process.kill()
            process.join()
            found = ended.get(rank, Ended(error=f"did not end within {limit_s:.0f} s"))
            ended[rank] = Ended(found.value, found.error, process.exitcode)
            pipes[rank].close()
        return [ended[rank] for rank in range(world)]

    return run


def _receive(pipe: Any) -> Ended:
    try:
        value, error = pipe.recv()
    except EOFError:
        return Ended()
    return Ended(value, error)


def _run(pipe: Connection, rank: int, function: Callable[..., Any], args: tuple, env: Mapping[str, str]) -> None:
    import torch

    torch.set_num_threads(1)
    for key in list(os.environ):
        if key.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "MPI_", "DEEPSPEED_")):
            del os.environ[key]
    os.environ.update(env)
    try:
        result = (function(rank, *args), "")
    except BaseException as error:
        result = (None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    pipe.send(result)
    pipe.close()
    os._exit(0)  # no goodbyes to ranks that may be gone
