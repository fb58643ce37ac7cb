"""ds-nvme against fio and DeepSpeed's aio_handle: one file, the same blocks and depth, interleaved.

    .venv/bin/python tests/bench/nvme.py --folder /mnt/nvme
    .venv/bin/python tests/bench/nvme.py --block 131072 --only ours-libaio fio-libaio --rounds 15

Every contender overwrites and then reads the same file in every round, in an order shuffled anew, around the page
cache. Rates are medians over the rounds; a ratio is the median of the ratios within rounds, with the 10th and 90th
percentile beside it. Processor time is the whole process's for ours and DeepSpeed, the job's own for fio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from measure import Spread
from nvme_contenders import (
    FIO_ENGINES,
    HERE,
    Contender,
    ContenderError,
    Cost,
    Server,
    Transfer,
    environment,
    fio,
    fio_reason,
    last_line,
    peers_reason,
)
from nvme_report import print_costs, print_first_bytes, print_verdicts

ROOT = HERE.parent.parent
FEWEST_ROUNDS = 3
Costs = dict[str, dict[str, list[Cost]]]
"""By order and contender."""


def contenders(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Contender]:
    """Those that were asked for and can run here, by name; for the others a line says why not."""
    found: dict[str, Contender] = {}
    for kind, python, reason in (
        ("ours", sys.executable, None),
        ("deepspeed", arguments.peers, peers_reason(arguments.peers)),
    ):
        if arguments.only and not any(name.startswith(kind) for name in arguments.only):
            continue
        try:
            if reason is not None:
                raise ContenderError(reason)
            server = Server(python, kind, arguments.size)
        except ContenderError as error:
            print(f"{kind} is left out: {error}")
            continue
        stack.callback(server.close)
        found |= {f"{kind}-{variant}": partial(server.run, variant) for variant in server.variants}
    if (reason := fio_reason()) is None:
        found |= {f"fio-{engine}": partial(fio, engine) for engine in FIO_ENGINES}
    else:
        print(f"fio is left out: {reason}")
    return {name: run for name, run in found.items() if not arguments.only or name in arguments.only}


def measure(found: dict[str, Contender], arguments: argparse.Namespace, path: str) -> dict[int, Costs]:
    """Rounds of all contenders, by block size. One that fails in the first round, which warms up, is left out."""
    costs: dict[int, Costs] = {b: {o: {n: [] for n in found} for o in ("write", "read")} for b in arguments.block}
    deadline = time.monotonic() + arguments.budget
    for number in range(arguments.rounds + 1):
        began = time.monotonic()
        for block in arguments.block:
            for name in random.sample(list(found), len(found)):
                for order, values in costs[block].items():
                    try:
                        cost = found[name](Transfer(order, block, arguments.depth, arguments.size, path))
                    except ContenderError as error:
                        if number:
                            raise
                        print(f"{name} is left out: {error}")
                        del found[name]
                        for each in costs.values():
                            each["write"].pop(name), each["read"].pop(name)
                        break
                    if number:
                        values[name].append(cost)
        if number >= FEWEST_ROUNDS and time.monotonic() + (time.monotonic() - began) > deadline:
            break
    return costs


def first_bytes(arguments: argparse.Namespace, path: str) -> dict[str, Spread]:
    """Seconds from import to the first bytes moved, in fresh processes, interleaved; the first of each warms up."""
    seconds: dict[str, list[float]] = {"ours": []}
    if peers_reason(arguments.peers) is None:
        seconds["deepspeed"] = []
    for _ in range(arguments.repeats + 1):
        for kind in list(seconds):
            python = sys.executable if kind == "ours" else arguments.peers
            command = [python, str(HERE / "nvme_first_byte.py"), kind, path]
            done = subprocess.run(command, capture_output=True, text=True, env=environment(python))
            if done.returncode:
                print(f"{kind} moves no first byte: {last_line(done.stderr)}")
                del seconds[kind]
            else:
                seconds[kind].append(float(last_line(done.stdout)))
    return {kind: Spread.of(values[1:]) for kind, values in seconds.items()}


def fill(path: str, nbytes: int) -> None:
    """Make the file, with bytes that nothing on the way can compress."""
    piece = os.urandom(1 << 20)
    with open(path, "wb") as file:
        for start in range(0, nbytes, len(piece)):
            file.write(piece[: nbytes - start])
        os.fsync(file.fileno())


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "build" / "nvme-bench"
    parser.add_argument("--folder", type=Path, default=default, help="on the drive to measure (build/nvme-bench)")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the file (1 GiB)")
    parser.add_argument("--block", type=int, nargs="+", default=[1 << 20, 128 << 10], help="bytes of a request")
    parser.add_argument("--depth", type=int, default=32, help="requests in flight (32)")
    parser.add_argument("--rounds", type=int, default=7, help="at most (7)")
    parser.add_argument("--budget", type=float, default=180, help=f"seconds, then no round after {FEWEST_ROUNDS} (180)")
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes for the time to the first byte (5)")
    parser.add_argument("--only", nargs="*", help="contenders, such as ours-libaio fio-libaio (all)")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers/bin/python"), help="Python that has DeepSpeed")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    arguments = parser.parse_args(words)
    if arguments.rounds < 1 or arguments.repeats < 1:
        parser.error("--rounds and --repeats are 1 or more")
    return arguments


def main() -> int:
    """Measures and prints; 1 where nothing of ours could run."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what stands below is undone
    with ExitStack() as stack:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        path = str(arguments.folder / f"ds-nvme-bench-{os.getpid()}")
        stack.callback(Path(path).unlink, missing_ok=True)
        fill(path, arguments.size)
        found = contenders(arguments, stack)
        costs = measure(found, arguments, path)
        first = first_bytes(arguments, path)
    for block, each in costs.items():
        for order, values in each.items():
            print_costs(values, f"{order}, {block >> 10} KiB", arguments.size)
    print_verdicts(costs)
    print_first_bytes(first)
    if arguments.json:
        rows = {b: {o: {n: [[c.wall, c.processor] for c in v] for n, v in w.items()} for o, w in e.items()}
                for b, e in costs.items()}  # fmt: skip
        arguments.json.write_text(json.dumps(rows))
    return 0 if any(name.startswith("ours") for name in found) else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
