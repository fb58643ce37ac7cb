"""Which loss scale the gradients of the running backward carry.

`engine.backward(loss)` multiplies the loss, so every gradient of that backward carries the factor, wherever it
enters: through outputs, through an attribute that the model kept, through the weights themselves. A loss may
span several engines; each corrects what it takes to its own scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Carried:
    """The factor by which the loss of the running backward was multiplied; None where no engine runs it.

    One object for the process: autograd runs hooks on threads of its own, and gives them nothing else.
    """

    def __init__(self) -> None:
        self.scale: float | None = None

    @contextmanager
    def set(self, scale: float) -> Iterator[None]:
        """While a backward of a loss times `scale` runs."""
        before, self.scale = self.scale, scale
        try:
            yield
        finally:
            self.scale = before


CARRIED = Carried()
