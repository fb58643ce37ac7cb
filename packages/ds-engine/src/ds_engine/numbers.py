"""Numbers in a configuration. pydantic would read `true` as 1, which is a slip and not a number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AllowInfNan, BeforeValidator


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"a number is wanted, got {str(value).lower()}; write the number")
    return value


Whole = Annotated[int, BeforeValidator(_not_bool)]
"""A whole number, which may be written 1e3."""

Real = Annotated[float, BeforeValidator(_not_bool), AllowInfNan(False)]
"""A finite number."""
