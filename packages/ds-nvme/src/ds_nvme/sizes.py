"""Sizes as people write them: 512, 128K, 1M, 1.5 GiB."""

from __future__ import annotations

import re

_UNITS = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes. K, M, G and T are powers of 1024, with or without B or iB after them.

    Args:
        text: such as 4096, "4096", "128K", "1M", "1.5GiB".

    Raises:
        ValueError: it is no size, or not a whole number of bytes from 1 up.
    """
    match = _SIZE.fullmatch(str(text)) if not isinstance(text, bool) else None
    nbytes = float(match[1]) * 1024 ** _UNITS.index(match[2].upper()) if match else 0.0
    if nbytes < 1 or nbytes != int(nbytes):
        raise ValueError(f"a size is a whole number of bytes from 1 up: got {text!r}; write 4096, 128K, 1M or 2G")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """The shortest exact form that `parse_size` reads: 131072 is 128K, 1000 is 1000."""
    power = 0
    while power < len(_UNITS) - 1 and nbytes and nbytes % 1024 == 0:
        nbytes //= 1024
        power += 1
    return f"{nbytes}{_UNITS[power]}"
