"""Compares training steps of DDP, FSDP2, DeepSpeed and ours, interleaved on one machine.

.venv/bin/python tests/bench/run.py --dtype both --rounds 10 --json bench.json --plot bench.png
"""

from __future__ import annotations

import argparse
import json
import platform
from contextlib import ExitStack
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from jobs import Job, JobError
from measure import Patience, run_rounds, summarize
from report import make_console, plot, show

CONTENDERS = ("floor", "ddp", "fsdp2", "deepspeed-1", "deepspeed-2", "ours-0", "ours-1", "ours-2")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=8, help="bursts of each contender")
    parser.add_argument("--steps", type=int, default=4, help="measured steps in a burst, after one discarded")
    parser.add_argument("--world", type=int, default=2, help="ranks of each contender, of one thread each")
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=CONTENDERS,
        metavar="NAME",
        help="also: local, deepspeed-0, deepspeed-3, and options as in deepspeed-1:reduce_bucket_size=5e6",
    )
    parser.add_argument("--foreign", type=float, default=0.1, help="processors others may use in a burst")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--retries", type=int, default=2, help="repetitions of a disturbed burst")
    parser.add_argument("--profile", type=int, metavar="ROWS", help="print torch's profile of each contender")
    parser.add_argument("--verbose", action="store_true", help="show the log of a rank that failed to start")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart (PNG) here")
    return parser.parse_args()


def main() -> int:
    """Runs one dtype after the other; 1 if no contender could run, or one of ours failed."""
    arguments = parse_arguments()
    console = make_console()
    patience = Patience(arguments.foreign, arguments.retries, arguments.wait)
    results: dict[str, list[dict[str, Any]]] = {}
    bursts: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for dtype in ["fp32", "bf16"] if arguments.dtype == "both" else [arguments.dtype]:
        with ExitStack() as stack:
            jobs: dict[str, Job] = {}
            for name in arguments.contenders:
                try:
                    jobs[name] = stack.enter_context(Job(name, dtype, arguments.world))
                except JobError as error:
                    failures[f"{name} {dtype}"] = str(error)
                    why = str(error) if arguments.verbose else str(error).splitlines()[0]
                    console.print(f"left out ({dtype}): {why}", markup=False, highlight=False, soft_wrap=True)
            say = partial(console.print, f"{dtype}:", highlight=False, markup=False)
            records, failed = run_rounds(jobs, arguments.rounds, arguments.steps, patience, say)
            for name, why in failed.items():
                failures[f"{name} {dtype}"] = why
                say(f"{name} failed on the way: {why}")
            if not records:
                continue
            results[dtype] = summarize(records, arguments.foreign)
            bursts[dtype] = {
                name: {number: vars(burst) for number, burst in record.bursts.items()}
                for name, record in records.items()
            }
            show(console, dtype, results[dtype])
            if arguments.profile:
                for name in records:
                    say(f"{name}, rank 0, 3 steps:")
                    table = jobs[name].ask("profile", n=3, rows=arguments.profile)[0]["table"]
                    console.print(table, markup=False, highlight=False, soft_wrap=True)
    if arguments.json:
        about = {"date": datetime.now(timezone.utc).isoformat(), "machine": _describe_machine()}
        settings = {"world": arguments.world, "steps": arguments.steps, "rounds": arguments.rounds}
        document = {
            "about": about | settings,
            "summary": results,
            "bursts": bursts,
            "failures": failures,
        }
        arguments.json.write_text(json.dumps(document, indent=1))
    if arguments.plot and results:
        plot(arguments.plot, results)
    return 1 if not results or any(name.startswith("ours") for name in failures) else 0


def _describe_machine() -> str:
    """The processor's name and how many there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} × {models[0]}" if models else platform.processor()


if __name__ == "__main__":
    raise SystemExit(main())
