"""Which engines there are, and which can run here."""

from __future__ import annotations

import importlib

from ds_nvme.engines.base import Engine
from ds_nvme.errors import EngineError

_ENGINES = {
    "libaio": ("ds_nvme.engines.libaio", "LibaioEngine"),
    "io_uring": ("ds_nvme.engines.uring", "UringEngine"),
    "threads": ("ds_nvme.engines.threads", "ThreadsEngine"),
}
"""By name, the one that is preferred first. Threads run everywhere."""


def names() -> tuple[str, ...]:
    """Engines that users can name, the preferred one first."""
    return tuple(_ENGINES)


def candidates(name: str) -> list[type[Engine]]:
    """The engine of that name, or for "auto" all, the preferred one first.

    Raises:
        ValueError: no engine has that name.
    """
    if name != "auto" and name not in _ENGINES:
        raise ValueError(f"an engine is one of auto, {', '.join(_ENGINES)}: got {name!r}")
    return [_load(each) for each in (_ENGINES if name == "auto" else [name])]


def refusal(name: str) -> str | None:
    """Why an engine can't run here, or None where it can: it is tried."""
    try:
        _load(name)(1).close()
    except EngineError as error:
        return str(error)
    return None


def _load(name: str) -> type[Engine]:
    module, attribute = _ENGINES[name]
    loaded: type[Engine] = getattr(importlib.import_module(module), attribute)
    return loaded
