"""What a run did, step by step: kept in memory for the live view, saved as JSON for plots and comparisons."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, float]


@dataclass
class History:
    """One run.

    Attributes:
        name: what the run is called in plots.
        facts: what ran: device, ranks, options, the engine's configuration.
        steps: a row an optimizer step: step, seconds, tokens, loss, lr, grad_norm, tokens_per_s,
            memory_bytes.
        held_out: a row an evaluation: step, seconds, tokens, loss.
        sample: what the model wrote at the end.
    """

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[Row] = field(default_factory=list)
    held_out: list[Row] = field(default_factory=list)
    sample: str = ""

    def recent(self, key: str, count: int = 10) -> float:
        """The mean of `key` over the last `count` steps."""
        rows = self.steps[-count:]
        return sum(row[key] for row in rows) / len(rows)

    def save(self, path: Path) -> None:
        """Writes the run as JSON, in one atomic step: a reader never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(".tmp")
        half.write_text(json.dumps(asdict(self), indent=1))
        half.replace(path)

    @classmethod
    def load(cls, path: Path) -> History:
        """Reads what `save` wrote."""
        return cls(**json.loads(path.read_text()))


def smoothed(values: list[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` before it."""
    spans = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(span) / len(span) for span in spans]
