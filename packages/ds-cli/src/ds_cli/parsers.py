"""Values of options: typer's own messages do not say what was given."""

from __future__ import annotations

import typer


def whole_number(text: str) -> int:
    """An integer."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"it must be a whole number; it is {text!r}.") from None


def positive(text: str) -> int:
    """An integer from 1 up."""
    number = whole_number(text)
    if number < 1:
        raise typer.BadParameter(f"it must be 1 or more; it is {text!r}.")
    return number


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"it must be a number; it is {text!r}.") from None


def size(text: str) -> int:
    """Bytes, as 4096, 128K, 1M or 2G."""
    from ds_nvme.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None
