"""What to say of a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)", or nothing where no known name is near. The case of letters doesn't count."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[found[0]]!r}?)" if found else ""
