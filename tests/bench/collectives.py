"""Times of gloo's collectives and of ds_comm's over tensors of several sizes, on ranks of one thread each.

    .venv/bin/python tests/bench/collectives.py --world 2

Sizes are those of the whole tensor: what all_reduce reduces, reduce_scatter_tensor takes,
all_gather_into_tensor gives, and the ranks of an exchange send (to every other rank its part).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from jobs import HERE, OUR_PYTHON, ForeignLoad, free_port, rank_environment

if TYPE_CHECKING:
    import torch

    Call = Callable[["torch.Tensor", "torch.Tensor"], None]
    """Takes the whole tensor and one of the same size for scratch and results."""

OPERATIONS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "exchange")
NUM_ELEMENTS = (16_384, 262_144, 2_621_440, 23_175_168)
BUDGET_S = 1.5
"""About how long one cell (operation, size, dtype, contender) is repeated."""


def gloo_calls() -> dict[str, Call]:
    """torch.distributed's own."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    # torch 2.13 renamed two of them and warns at the old names.
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    def all_reduce(whole: torch.Tensor, scratch: torch.Tensor) -> None:
        dist.all_reduce(whole)

    def reduce_scatter_tensor(whole: torch.Tensor, scratch: torch.Tensor) -> None:
        reduce_scatter(scratch.chunk(world)[rank], whole)

    def all_gather_into_tensor(whole: torch.Tensor, scratch: torch.Tensor) -> None:
        all_gather(scratch, whole.chunk(world)[rank])

    def exchange(whole: torch.Tensor, scratch: torch.Tensor) -> None:
        others = [other for other in range(world) if other != rank]
        sends = [dist.P2POp(dist.isend, whole.chunk(world)[other], other) for other in others]
        receives = [dist.P2POp(dist.irecv, scratch.chunk(world)[other], other) for other in others]
        for work in dist.batch_isend_irecv(receives + sends):
            work.wait()

    return {call.__name__: call for call in (all_reduce, reduce_scatter_tensor, all_gather_into_tensor, exchange)}


def our_calls() -> dict[str, Call]:
    """ds_comm's, as far as it has them."""
    import torch.distributed as dist

    ds_comm = importlib.import_module("ds_comm")
    rank, world = dist.get_rank(), dist.get_world_size()
    calls: dict[str, Call] = {
        "all_reduce": lambda whole, scratch: ds_comm.all_reduce(whole),
        "reduce_scatter_tensor": lambda whole, scratch: ds_comm.reduce_scatter_tensor(
            scratch.chunk(world)[rank], whole
        ),
        "all_gather_into_tensor": lambda whole, scratch: ds_comm.all_gather_into_tensor(
            scratch, whole.chunk(world)[rank]
        ),
    }
    return {name: call for name, call in calls.items() if hasattr(ds_comm, name)}


def check(operation: str, call: Call, dtype: torch.dtype) -> None:
    """Raises unless the operation gives what it should, on small whole numbers that any dtype holds."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    size = 12 * world
    inputs = [(torch.arange(size) % 7 + other).to(dtype) for other in range(world)]
    whole, scratch = inputs[rank].clone(), torch.zeros(size, dtype=dtype)
    call(whole, scratch)
    total = torch.stack(inputs).sum(0)
    part = range(world)
    if operation == "all_reduce":
        good = torch.equal(whole, total)
    elif operation == "reduce_scatter_tensor":
        good = torch.equal(scratch.chunk(world)[rank], total.chunk(world)[rank])
    elif operation == "all_gather_into_tensor":
        good = torch.equal(scratch, torch.cat([inputs[i].chunk(world)[i] for i in part]))
    else:
        mine = [inputs[i].chunk(world)[rank] for i in part if i != rank]
        good = torch.equal(torch.cat([scratch.chunk(world)[i] for i in part if i != rank]), torch.cat(mine))
    if not good:
        raise ArithmeticError(f"{operation} of {dtype} gave a wrong result")


def serve_rank(sizes: Sequence[int]) -> None:
    """One rank: measures every cell, contenders in turn; rank 0 prints a JSON line of rows."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders: dict[str, dict[str, Call]] = {"gloo": gloo_calls()}
    missing = ""
    try:
        contenders["ds_comm"] = our_calls()
    except Exception as error:  # being written, or not installed: the peers are measured all the same
        missing = f"{type(error).__name__}: {error}"
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for operation in OPERATIONS:
            able = {name: calls[operation] for name, calls in contenders.items() if operation in calls}
            for call in able.values():
                check(operation, call, dtype)
            for num_elements in sizes:
                times = _measure(able, num_elements // dist.get_world_size() * dist.get_world_size(), dtype)
                num_bytes = num_elements * dtype.itemsize
                rows.append({"operation": operation, "dtype": str(dtype), "bytes": num_bytes, "ms": times})
    if dist.get_rank() == 0:
        print(json.dumps({"rows": rows, "missing": missing}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _measure(able: dict[str, Call], num_elements: int, dtype: torch.dtype) -> dict[str, float]:
    """Median milliseconds of each contender's calls, each from a barrier to its slowest rank's return."""
    import torch
    import torch.distributed as dist

    whole, scratch = torch.zeros(num_elements, dtype=dtype), torch.zeros(num_elements, dtype=dtype)
    times: dict[str, list[float]] = {name: [] for name in able}
    repeats = 2
    done = 0
    while done < repeats:
        for name, call in able.items():
            dist.barrier()
            start = time.perf_counter()
            call(whole, scratch)
            times[name].append((time.perf_counter() - start) * 1e3)
        done += 1
        if done == 2:  # the first is warm-up, the second says how many more fit; all ranks must agree
            slowest = torch.tensor([max(values[1] for values in times.values())])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            repeats = 2 + min(50, max(5, int(BUDGET_S * 1e3 / slowest.item())))
    slowest_rank = {}
    for name, values in times.items():
        each = torch.tensor(values[1:])
        dist.all_reduce(each, dist.ReduceOp.MAX)
        slowest_rank[name] = median(each.tolist())
    return slowest_rank


def main() -> int:
    """Starts the ranks and shows their table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--sizes", type=int, nargs="+", default=NUM_ELEMENTS, help="numbers of elements")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        serve_rank(arguments.sizes)
        return 0
    port = free_port()
    command = [str(OUR_PYTHON), str(HERE / "collectives.py"), "--sizes", *map(str, arguments.sizes)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=rank_environment(rank, arguments.world, port))
        for rank in range(arguments.world)
    ]
    load = ForeignLoad([rank.pid for rank in ranks])
    assert ranks[0].stdout is not None
    line = ranks[0].stdout.readline()
    foreign = load.share() if line else 0.0
    statuses = [rank.wait() for rank in ranks]
    if not line or any(statuses):
        print(f"ranks ended with {statuses}", file=sys.stderr)
        return 1
    show(json.loads(line), arguments.world, foreign)
    return 0


def show(answer: dict[str, Any], world: int, foreign: float) -> None:
    """Prints the table: milliseconds, and ours as a multiple of gloo's."""
    from report import make_console
    from rich.table import Table

    console = make_console()
    table = Table(title=f"collectives of {world} ranks, median ms", title_justify="left")
    for heading in ("operation", "dtype"):
        table.add_column(heading)
    for heading in ("MB", "gloo", "gloo GB/s", "ds_comm", "× gloo"):
        table.add_column(heading, justify="right")
    for row in answer["rows"]:
        gloo, ours = row["ms"]["gloo"], row["ms"].get("ds_comm")
        table.add_row(
            row["operation"],
            row["dtype"].removeprefix("torch."),
            f"{row['bytes'] / 1e6:.2f}",
            f"{gloo:.2f}",
            f"{row['bytes'] / gloo / 1e6:.2f}",
            "" if ours is None else f"{ours:.2f}",
            "" if ours is None else f"{ours / gloo:.2f}",
        )
    console.print(table)
    if answer["missing"]:
        console.print(f"ds_comm was left out: {answer['missing']}", markup=False)
    console.print(f"Others used {foreign:.2f} processors meanwhile (0.00 is a quiet machine).", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
