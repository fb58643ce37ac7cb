"""The space that a search goes through: which values of a handle's options to combine."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ds_nvme.engines.choose import names, refusal
from ds_nvme.files import Path
from ds_nvme.options import Candidate
from ds_nvme.sizes import parse_size


@dataclass(frozen=True)
class Space:
    """Which values to combine. The defaults are what may matter on today's drives.

    Args:
        engine: names. Default: all that run here.
        block_size: bytes of a request.
        queue_depth: requests in flight, each thread.
        single_submit: submit one by one.
        overlap_events: refill as requests end.
        intra_op_parallelism: threads.
    """

    engine: Sequence[str] = ()
    block_size: Sequence[int] = (128 << 10, 512 << 10, 1 << 20, 4 << 20)
    queue_depth: Sequence[int] = (4, 16, 32, 128)
    single_submit: Sequence[bool] = (False,)
    overlap_events: Sequence[bool] = (True,)
    intra_op_parallelism: Sequence[int] = (1, 2, 4)

    @classmethod
    def read(cls, path: Path) -> Space:
        """A space from a JSON file: an object of lists (or single values), what it leaves out as by default.

        Keys are the options of a handle and `engine`; `thread_count` and `io_parallel` are other names of
        `intra_op_parallelism`. Sizes may be "128K" or "1M", truth values also "true" and "false".

        Raises:
            OSError: it can't be read.
            ValueError: it is no such file; the message names file, key and value.
        """
        with open(path, encoding="utf-8") as file:
            try:
                found = json.load(file)
            except ValueError as error:
                raise ValueError(f"a sweep configuration is a JSON file: {path} is not ({error})") from None
        if not isinstance(found, dict):
            raise ValueError(f"a sweep configuration is a JSON object of lists: {path} holds a {type(found).__name__}")
        values: dict[str, tuple[Any, ...]] = {}
        for key, given in found.items():
            option = _OTHER_NAMES.get(key, key)
            if option not in _PARSERS:
                near = difflib.get_close_matches(key, [*_PARSERS, *_OTHER_NAMES], 1)
                mend = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_PARSERS)}"
                raise ValueError(f"a sweep configuration holds options of a handle: {path} has {key!r}; {mend}")
            if option in values:
                raise ValueError(f"an option is given once: {path} has {option!r} twice, once as {key!r}")
            try:
                listed = given if isinstance(given, list) else [given]
                values[option] = tuple(dict.fromkeys(_PARSERS[option](each) for each in listed))
            except ValueError as error:
                raise ValueError(f"{path}: {key}: {error}") from None
            if not values[option]:
                raise ValueError(f"an option has one value or more: {path} has an empty list for {key!r}")
        return cls(**values)

    def candidates(self) -> list[Candidate]:
        """All combinations."""
        engines = self.engine or [name for name in names() if refusal(name) is None]
        return [Candidate(engine, *rest) for engine in engines for rest in itertools.product(*self._rest())]

    def _rest(self) -> list[Sequence[Any]]:
        return [getattr(self, each.name) for each in fields(self) if each.name != "engine"]


def _engine(value: Any) -> str:
    if value not in names():
        raise ValueError(f"an engine is one of {', '.join(names())}: got {value!r}")
    return str(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"a count is a whole number from 1 up: got {value!r}")
    return value


def _truth(value: Any) -> bool:
    truths = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, (bool, str)) or value not in truths:
        raise ValueError(f"a truth value is true or false: got {value!r}")
    return truths[value]


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "engine": _engine,
    "block_size": parse_size,
    "queue_depth": _count,
    "single_submit": _truth,
    "overlap_events": _truth,
    "intra_op_parallelism": _count,
}
_OTHER_NAMES = {"thread_count": "intra_op_parallelism", "io_parallel": "intra_op_parallelism"}
