"""What the coordinator shows: tables on the terminal (plain in a pipe) and a bar chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def make_console() -> Console:
    """A console that doesn't fold tables in a pipe, where rich would assume 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def show(console: Console, dtype: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a dtype's table and a line on what its marks mean."""
    first = rows[0]
    table = Table(title=f"{dtype}, {first['num_parameters'] / 1e6:.1f}M parameters", title_justify="left")
    table.add_column("contender")
    for heading in ("step ms", "p10..p90", "× DDP", "× DeepSpeed", "peak MB", "beyond imports MB"):
        table.add_column(heading, justify="right")
    table.add_column(f"loss at step {first['loss_step']}", justify="right")
    for row in rows:
        step = row["step_ms"]
        table.add_row(
            row["contender"],
            f"{step['median']:.0f}{'*' if row['judged_by_disturbed'] else ''}",
            f"{step['p10']:.0f}..{step['p90']:.0f}",
            _ratio(row["to_ddp"]),
            _ratio(row["to_deepspeed"]),
            f"{row['peak_mb']:.0f}",
            f"{row['beyond_imports_mb']:.0f}",
            f"{row['loss']:.4f}",
        )
    console.print(table)
    if any(row["judged_by_disturbed"] for row in rows):
        console.print("* other processes were busy during these steps and too few quiet rounds were left")
    phases = Table(title=f"{dtype}: where a step's milliseconds go", title_justify="left")
    phases.add_column("contender")
    names = list(dict.fromkeys(name for row in rows for name in row["phases_ms"]))
    for name in names:
        phases.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['phases_ms'][name]:.0f}" if name in row["phases_ms"] else "" for name in names]
        phases.add_row(row["contender"], *cells)
    console.print(phases)


def plot(path: Path, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A bar chart: step time (with p10..p90) and memory beyond the imports, a row of panels a dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(results), 2, figsize=(11, 3.2 * len(results)), squeeze=False)
    for (dtype, rows), (left, right) in zip(results.items(), panels):
        names = [row["contender"] for row in rows]
        colors = ["tab:orange" if name.startswith("ours") else "tab:gray" for name in names]
        steps = [row["step_ms"] for row in rows]
        below = [step["median"] - step["p10"] for step in steps]
        above = [step["p90"] - step["median"] for step in steps]
        medians = [step["median"] for step in steps]
        left.barh(names, medians, xerr=(below, above), color=colors, ecolor="black", capsize=2)
        left.set_title(f"{dtype}: milliseconds a step (p10..p90)")
        right.barh(names, [row["beyond_imports_mb"] for row in rows], color=colors)
        right.set_title(f"{dtype}: peak MB a rank beyond imports")
        for panel in (left, right):
            panel.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _ratio(ratio: Mapping[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f} ({ratio['p10']:.2f}..{ratio['p90']:.2f})"
