"""Start-up times: `import torch`, `import ds_engine` and `ds --help`, each in fresh processes, interleaved.

.venv/bin/python tests/bench/start.py --repeats 7
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Sequence

from jobs import OUR_PYTHON, ROOT, machine_load
from measure import Spread
from report import make_console
from rich.table import Table

COMMANDS: dict[str, Sequence[str]] = {
    "python, nothing imported": (str(OUR_PYTHON), "-c", "pass"),
    "import torch": (str(OUR_PYTHON), "-c", "import torch"),
    "import ds_engine": (str(OUR_PYTHON), "-c", "import ds_engine"),
    "ds --help": (str(OUR_PYTHON.parent / "ds"), "--help"),
}


def time_ms(command: Sequence[str]) -> float:
    """Wall milliseconds of a fresh process. Raises CalledProcessError or OSError if it fails."""
    # As for a user: the first run leaves its bytecode to the others.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment)
    return (time.perf_counter() - start) * 1e3


def main() -> int:
    """Measures and prints the table; 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="processes of each, after one to warm the disk")
    arguments = parser.parse_args()
    console = make_console()
    times: dict[str, list[float]] = {}
    for name, command in COMMANDS.items():
        try:
            time_ms(command)
            times[name] = []
        except (OSError, subprocess.CalledProcessError) as error:
            console.print(f"{name} was left out: {error}", markup=False, highlight=False)
    load = machine_load(0.3)
    for _ in range(arguments.repeats):
        for name in times:
            times[name].append(time_ms(COMMANDS[name]))
    load = max(load, machine_load(0.3))
    table = Table(title="start-up, milliseconds of a fresh process", title_justify="left")
    table.add_column("command")
    table.add_column("median", justify="right")
    table.add_column("p10..p90", justify="right")
    for name, values in times.items():
        spread = Spread.of(values)
        table.add_row(name, f"{spread.median:.0f}", f"{spread.p10:.0f}..{spread.p90:.0f}")
    if {"import torch", "import ds_engine"} <= times.keys():
        beyond = Spread.of([b - a for a, b in zip(times["import torch"], times["import ds_engine"])])
        table.add_row("ds_engine beyond torch", f"{beyond.median:.0f}", f"{beyond.p10:.0f}..{beyond.p90:.0f}")
    console.print(table)
    console.print(f"Others used {load:.2f} processors just before or after.", highlight=False)
    return 0 if len(times) == len(COMMANDS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
