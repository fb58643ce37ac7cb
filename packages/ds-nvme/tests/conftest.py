"""Fixtures of ds-nvme's tests."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_nvme import engine_names
from ds_nvme.engines.choose import refusal


@pytest.fixture(params=engine_names())
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that runs here."""
    name: str = request.param
    if (reason := refusal(name)) is not None:
        pytest.skip(reason)
    return name


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder on the temporary filesystem, and one without O_DIRECT in memory."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


Pattern = Callable[..., bytearray]


@pytest.fixture(scope="session")
def pattern() -> Pattern:
    """`pattern(nbytes, seed=1)`: bytes that differ from place to place, so that a shifted or swapped block shows."""

    def make(nbytes: int, seed: int = 1) -> bytearray:
        return bytearray(random.Random(seed * 1_000_003 + nbytes).randbytes(nbytes))

    return make
