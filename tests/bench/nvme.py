"""ds-nvme against fio and DeepSpeed's aio_handle: one file, the same blocks and depth, interleaved.

    .venv/bin/python tests/bench/nvme.py --folder /mnt/nvme
    .venv/bin/python tests/bench/nvme.py --block 131072 --rounds 7

Every contender overwrites and then reads the same file in every round, in an order shuffled anew, around the page
cache. Rates are the medians over rounds; a ratio is the median of the ratios within rounds, with the 10th and 90th
percentile beside it. Processor time is the whole process's for ours and DeepSpeed, the job's own for fio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Result = tuple[float, float]  # seconds, processor seconds


class Server:
    """A contender that stays alive: ours or DeepSpeed's."""

    def __init__(self, python: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / "nvme_worker.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def __call__(self, order: str) -> Result:
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        wall, processor = self._answer()
        return wall, processor

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(("[", '"')) and line.rstrip().endswith(("]", '"')):
                try:
                    return json.loads(line)
                except json.JSONDecodeError:
                    continue  # something that a library prints
        _, errors = self._process.communicate()
        raise RuntimeError(errors[-2000:])

    def close(self) -> None:
        """End it."""
        self._process.communicate("end\n")


def fio(engine: str, arguments: argparse.Namespace, path: str) -> Callable[[str], Result]:
    """A run of fio with one job."""

    def run(order: str) -> Result:
        command = ["fio", "--name=job", f"--filename={path}", f"--size={arguments.size}", f"--bs={arguments.block}"]
        command += [
            f"--ioengine={engine}",
            f"--iodepth={1 if engine == 'psync' else arguments.depth}",
            "--direct=1",
            f"--rw={order}",
        ]
        command += ["--overwrite=1", "--scramble_buffers=0", "--output-format=json", "--invalidate=0"]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True
        )  # a session of its own: fio touches the terminal, which stops whoever runs it in the background
        output = done.stdout
        job = json.loads(output[output.index("{") :])["jobs"][0]  # notes may come first
        wall = job[order]["runtime"] / 1000
        return wall, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000

    return run


def contenders(arguments: argparse.Namespace, path: str) -> dict[str, Callable[[str], Result]]:
    """Those that were asked for and can run here, by name."""
    import ds_nvme
    from ds_nvme.engines.choose import refusal

    base = {"block": arguments.block, "depth": arguments.depth, "size": arguments.size, "path": path}
    makers: dict[str, Callable[[], Callable[[str], Result]]] = {}
    for engine in ds_nvme.engine_names():
        if refusal(engine) is None:
            ours = base | {"kind": "ours", "engine": engine, "threads": 1}
            makers[f"ours-{engine}"] = partial(Server, sys.executable, ours)
    if shutil.which("fio"):
        for engine in ("libaio", "io_uring", "psync"):
            makers[f"fio-{engine}"] = partial(fio, engine, arguments, path)
    if os.path.exists(arguments.peers):
        for threads in (1, 4):
            theirs = base | {"kind": "deepspeed", "threads": threads}
            makers[f"deepspeed-{threads}"] = partial(Server, arguments.peers, theirs)
    found = {}
    for name, make in makers.items():
        if not arguments.only or name in arguments.only:
            try:
                found[name] = make()
            except RuntimeError as error:
                print(f"{name} can't run: {str(error).strip().splitlines()[-1:]}")
    return found


def spread(values: list[float]) -> str:
    """Median and the 10th to 90th percentile."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return f"{statistics.median(values):.2f} ({tenths[0]:.2f}-{tenths[-1]:.2f})"


def report(results: dict[str, list[Result]], order: str, size: int) -> None:
    """Print one table."""
    gib = size / (1 << 30)
    peers = [name for name in results if not name.startswith("ours")]
    print(f"\n{order:<16}{'MiB/s':>8}{'s CPU/GiB':>12}   rate of ours as a multiple of the peer's, in the same round")
    for name, values in results.items():
        rate = statistics.median([gib * 1024 / wall for wall, _ in values])
        processor = statistics.median([cpu / gib for _, cpu in values])
        row = f"{name:<16}{rate:>8.0f}{processor:>12.3f}"
        if name.startswith("ours"):
            for peer in peers:
                ratios = [theirs[0] / mine[0] for mine, theirs in zip(values, results[peer])]
                row += f"  {peer} {spread(ratios)}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/tmp", help="on the drive to measure (default: /tmp)")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the file (default: 1 GiB)")
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes of a request (default: 1 MiB)")
    parser.add_argument("--depth", type=int, default=32, help="requests in flight (default: 32)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="contenders, such as ours-libaio fio-libaio (default: all)")
    parser.add_argument("--peers", default=".venv-peers/bin/python", help="Python that has DeepSpeed")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    arguments = parser.parse_args()
    path = os.path.join(arguments.folder, f"ds-nvme-bench-{os.getpid()}")
    try:
        with open(path, "wb") as file:
            for _ in range(0, arguments.size, 1 << 20):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        found = contenders(arguments, path)
        results: dict[str, dict[str, list[Result]]] = {o: {n: [] for n in found} for o in ("write", "read")}
        for number in range(arguments.rounds + 1):
            for name in random.sample(list(found), len(found)):
                for order in ("write", "read"):
                    result = found[name](order)
                    if number:  # the first round warms up
                        results[order][name].append(result)
        for order, values in results.items():
            report(values, order, arguments.size)
        if arguments.json:
            arguments.json.write_text(json.dumps(results))
        for run in found.values():
            if isinstance(run, Server):
                run.close()
    finally:
        if os.path.exists(path):
            os.unlink(path)


if __name__ == "__main__":
    main()
