"""The command line, and the engine's configuration with the command line's values in it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's standard library.")
    parser.add_argument("--local_rank", type=int, default=-1, help="handed in by the launcher")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("config.json"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for the history and the curves")
    parser.add_argument("--zero", type=int, choices=range(4), default=2, help="the ZeRO stage")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps; the schedule fits them")
    parser.add_argument("--evaluate-every", type=int, default=15, help="steps between held-out evaluations")
    parser.add_argument("--held-out-batches", type=int, default=4, help="micro-batches a rank evaluates")
    parser.add_argument("--seed", type=int, default=0)
    size = parser.add_argument_group("model and data")
    size.add_argument("--width", type=int, default=256)
    size.add_argument("--layers", type=int, default=4)
    size.add_argument("--heads", type=int, default=4)
    size.add_argument("--context", type=int, default=256, help="bytes a sequence")
    size.add_argument("--max-bytes", type=int, default=16_000_000, help="size of the corpus at most")
    size.add_argument("--batch", type=int, help="micro-batch size of a rank; by default the configuration's")
    sample = parser.add_argument_group("the sample at the end")
    sample.add_argument("--prompt", default="def ")
    sample.add_argument("--sample-bytes", type=int, default=300)
    sample.add_argument("--temperature", type=float, default=0.7)
    return parser.parse_args()


def read_config(options: argparse.Namespace) -> dict[str, Any]:
    """The engine's configuration, with what the command line says in place of what the file says."""
    config = json.loads(options.config.read_text())
    config.setdefault("zero_optimization", {})["stage"] = options.zero
    schedule = config["scheduler"]["params"]
    share = schedule["warmup_num_steps"] / schedule["total_num_steps"]  # a longer run warms up longer
    schedule.update(total_num_steps=options.steps, warmup_num_steps=max(1, round(share * options.steps)))
    if options.batch:
        config["train_micro_batch_size_per_gpu"] = options.batch
    return config
