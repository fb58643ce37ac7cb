"""The run as one watches it: a live panel in a terminal, a line now and then where stdout goes to a file."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

from history import History
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"


class View:
    """Shows a run's history on rank 0. A context manager: on leaving, the terminal is as it was before.

    Args:
        history: what to show; the training loop appends to it and calls `refresh`.
        total_steps: where the run ends.
        title: the panel's title.
        console: where to write; by default stdout.
    """

    def __init__(self, history: History, total_steps: int, title: str, console: Console | None = None):
        self.history = history
        self.total_steps = total_steps
        self.title = title
        self.console = console or Console()
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> View:
        if self.live:
            self.live.start()
        else:
            self.console.print(self.title)
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def refresh(self) -> None:
        """Call after each step."""
        if self.live:
            self.live.update(self._panel(), refresh=True)
            return
        step = len(self.history.steps)
        if step == 1 or step == self.total_steps or step % max(1, self.total_steps // 20) == 0:
            print("  ".join(f"{name} {value}" for name, value in self._facts().items()), flush=True)

    def _facts(self) -> dict[str, str]:
        last = self.history.steps[-1]
        left_s = last["seconds"] / last["step"] * (self.total_steps - last["step"])
        held_out = self.history.held_out
        return {
            "step": f"{last['step']}/{self.total_steps}",
            "loss": f"{self.history.recent('loss'):.3f}",
            "held-out": f"{held_out[-1]['loss']:.3f}" if held_out else "-",
            "lr": f"{last['lr']:.2e}",
            "tokens/s": f"{self.history.recent('tokens_per_s'):,.0f}",
            "memory": f"{last['memory_bytes'] / 2**20:,.0f} MiB",
            "left": f"{left_s // 60:.0f}:{left_s % 60:02.0f}",
        }

    def _panel(self) -> Panel:
        facts = self._facts()
        table = Table.grid(padding=(0, 3))
        table.add_row(*(Text(name, style="dim") for name in facts))
        table.add_row(*(Text(value, style="bold") for value in facts.values()))
        losses = [row["loss"] for row in self.history.steps]
        width = max(10, min(80, self.console.width - 4))
        done = ProgressBar(total=self.total_steps, completed=len(losses), width=width)
        curve = Text(sparkline(losses, width), style="cyan")
        return Panel(Group(table, curve, done), title=self.title, expand=False)


def sparkline(values: list[float], width: int) -> str:
    """The values as a row of at most `width` bars, each the mean of an equal part of them."""
    columns = min(width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def open_view(history: History, total_steps: int, title: str, rank: int) -> View | nullcontext[None]:
    """The view on rank 0; on every other rank a context of None."""
    return View(history, total_steps, title) if rank == 0 else nullcontext()
