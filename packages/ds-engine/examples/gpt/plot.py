"""Loss curves as a PNG. As a command it overlays runs: python plot.py runs/*/history.json"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: training machines have no display

import matplotlib.pyplot as plt
from history import History, smoothed


def plot(runs: list[History], out: Path, against: str = "step") -> None:
    """Draws each run's training loss (smoothed, thin) and held-out loss (dots) in one colour.

    Args:
        runs: the runs to overlay.
        out: the PNG to write.
        against: what the horizontal axis measures: "step", "tokens" or "seconds".
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for number, run in enumerate(runs):
        losses = smoothed([row["loss"] for row in run.steps], window=max(1, len(run.steps) // 50))
        color = f"C{number}"
        axes.plot([row[against] for row in run.steps], losses, color=color, alpha=0.5, linewidth=1)
        axes.plot(
            [row[against] for row in run.held_out],
            [row["loss"] for row in run.held_out],
            color=color,
            marker="o",
            markersize=3,
            label=f"{run.name}: held-out {run.held_out[-1]['loss']:.3f}" if run.held_out else run.name,
        )
    axes.set(xlabel=against, ylabel="loss, nats a byte", title="thin: training; dots: held-out files")
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Overlay the loss curves of runs.")
    parser.add_argument("history", type=Path, nargs="+", help="a run's history.json")
    parser.add_argument("--out", type=Path, default=Path("runs/loss.png"))
    parser.add_argument("--against", choices=["step", "tokens", "seconds"], default="step")
    options = parser.parse_args()
    plot([History.load(path) for path in options.history], options.out, options.against)
    print(f"curves: {options.out}")


if __name__ == "__main__":
    main()
