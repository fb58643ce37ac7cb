"""A search's measurements as a table and as a picture. Needs the extra `ds-nvme[tune]`: pandas and matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ds_nvme.files import Path
from ds_nvme.sizes import format_size
from ds_nvme.trial import Trial, Tuned

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_GB = 1e9


def missing() -> str | None:
    """Which libraries are missing and how to get them, or None. Loads none of them."""
    absent = [name for name in ("pandas", "matplotlib") if find_spec(name) is None]
    if not absent:
        return None
    return f"table and picture of a sweep need {' and '.join(absent)}: pip install 'ds-nvme[tune]'"


def table(tuned: Tuned) -> pandas.DataFrame:
    """A row for each candidate that was measured, the best first.

    Columns: the options; `read_gb_s` and `write_gb_s`, estimated from all its measurements and freed of the drive's own
    ups and downs, in 10^9 bytes a second, and `score_gb_s`, their harmonic mean; `spread`, largest less smallest as a
    part of the median over its latest `loops` measurements; `round`, how far it came.
    """
    import pandas

    return pandas.DataFrame(
        [
            {
                **asdict(trial.candidate),
                "read_gb_s": trial.typical_read / _GB or math.nan,
                "write_gb_s": trial.typical_write / _GB or math.nan,
                "score_gb_s": trial.score / _GB,
                "spread": trial.spread,
                "loops": trial.loops,
                "round": trial.round,
            }
            for trial in tuned.trials
        ]
    )


def draw(tuned: Tuned, path: Path, title: str = "") -> None:
    """Write a heat map as PNG: block size against queue depth, a panel for each engine and number of threads.

    A cell is the best of what differs in other options only. White was not measured; a frame marks the best.

    Args:
        tuned: what was found.
        path: the file; its folder exists.
        title: above the panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: it would keep state and look for a screen
    from PIL import Image

    trials = tuned.trials
    engines = sorted({t.candidate.engine for t in trials})
    threads = sorted({t.candidate.intra_op_parallelism for t in trials})
    blocks = sorted({t.candidate.block_size for t in trials})
    depths = sorted({t.candidate.queue_depth for t in trials})
    wide, high = 0.55 * len(depths) + 0.35, 0.36 * len(blocks) + 0.4
    size = (max(wide * len(threads) + 1.9, 4.5), high * len(engines) + 1.0)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(engines), len(threads), squeeze=False, sharex=True, sharey=True)
    top = max(trial.score for trial in trials) / _GB
    image: Any = None
    for row, engine in enumerate(engines):
        for column, count in enumerate(threads):
            here = [t for t in trials if (t.candidate.engine, t.candidate.intra_op_parallelism) == (engine, count)]
            image = _panel(axes[row][column], here, blocks, depths, top, tuned.best)
            axes[row][column].set_title(f"{engine}, {count} thread{'s' if count > 1 else ''}", fontsize=8)
    figure.supxlabel("queue depth", fontsize=9)
    figure.supylabel("block size", fontsize=9)
    bar = figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.8)
    bar.set_label("GB/s", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    if title:
        figure.suptitle(title, fontsize=9)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    # A palette instead of true colour: a third of the size, so that it can go into a README.
    Image.open(drawn).convert("RGB").quantize(256, kmeans=3).save(path, format="png", optimize=True)


def _panel(
    axes: Axes, trials: Sequence[Trial], blocks: Sequence[int], depths: Sequence[int], top: float, best: Trial
) -> Any:
    cells = [[math.nan] * len(depths) for _ in blocks]
    for trial in trials:
        y, x = blocks.index(trial.candidate.block_size), depths.index(trial.candidate.queue_depth)
        if not cells[y][x] >= trial.score / _GB:
            cells[y][x] = trial.score / _GB
        if trial is best:
            axes.add_patch(_frame(x, y))
    image = axes.imshow(cells, cmap="viridis", vmin=0.0, vmax=top, aspect="auto", origin="lower")
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "black" if value > 0.6 * top else "white"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(depths)), [str(each) for each in depths], fontsize=7)
    axes.set_yticks(range(len(blocks)), [format_size(each) for each in blocks], fontsize=7)
    return image


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2.5, zorder=3)
