"""A pool of ranks: processes with a gloo group, started once and handed one function after another.

Starting four processes and importing torch in each takes seconds; a parity matrix has hundreds of cells.
So a pool lives as long as the test session and every test that wants `world` ranks borrows the same one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


class RankError(AssertionError):
    """A rank raised: its number and traceback. `types` are the exception types by rank."""

    def __init__(self, message: str, types: dict[int, str]):
        super().__init__(message)
        self.types = types


class RankPool:
    """`world` processes of one gloo group that run functions and hand back what they return.

    Args:
        world: number of ranks.
        timeout_s: how long one call may take before the pool is killed and the test fails.
    """

    def __init__(self, world: int, timeout_s: float = 300.0):
        self.world = world
        self.timeout_s = timeout_s
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Calls `function(*args, **kwargs)` on every rank; returns their results, by rank.

        `function` must be importable (a module's own function). Inside, `torch.distributed` is up with gloo.

        Raises:
            RankError: a rank raised or did not answer in time. After a failure the pool is restarted,
                because ranks may have stopped halfway through a collective.
        """
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str]] = {}
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        limit = timeout_s or self.timeout_s
        while pending:
            # Once one rank has failed, its peers may wait for it for ever: give them a moment, no more.
            ready = wait(list(pending), timeout=15.0 if errors else limit)
            if not ready:
                break
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[index]
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    errors[rank] = ("died", f"the process ended with {self._processes[rank].exitcode}")
                    continue
                if kind == "ok":
                    results[rank] = value
                else:
                    errors[rank] = (kind, value)
        if not errors and not pending:
            return [results[rank] for rank in range(self.world)]
        late = sorted(pending.values())
        self.close()
        self._start()
        lines = [f"rank {rank} raised {kind}:\n{text}" for rank, (kind, text) in sorted(errors.items())]
        if late:
            lines.append(f"ranks {late} did not answer within {limit:.0f} s")
        raise RankError("\n".join(lines), {rank: kind for rank, (kind, _) in errors.items()})

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    while (call := _receive(pipe)) is not None:
        function, args, kwargs = call
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", DeprecationWarning)
                result = ("ok", function(*args, **kwargs))
        except BaseException as error:
            result = (type(error).__name__, traceback.format_exc())
        try:
            pipe.send(result)
        except Exception as error:  # what the function returned cannot be pickled
            pipe.send((type(error).__name__, traceback.format_exc()))
    os._exit(0)


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None
