"""The corpus: the source text of Python's own standard library, which every machine that runs this has."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Tests and vendored packages would be most of the text, and they vary from one installation to the next.
# The encodings are a table of numbers each, and pydoc_data is one long string.
SKIPPED = {"dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
SKIPPED |= {"encodings", "pydoc_data"}
HELD_OUT_ONE_IN = 16

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Corpus:
    """Two texts as bytes. No file is in both.

    Attributes:
        train: uint8 [number of bytes].
        held_out: uint8 [number of bytes].
        train_files: paths relative to the corpus, in the order of the text.
        held_out_files: paths relative to the corpus, in the order of the text.
    """

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def load(root: Path | None = None, max_bytes: int = 16_000_000) -> Corpus:
    """Reads the .py files under `root` (default: the running Python's standard library), sorted by path.

    Args:
        root: the folder to read.
        max_bytes: a file that would take the total beyond this is left out.

    Raises:
        ValueError: there are too few files for both a training and a held-out text.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in paths if SKIPPED.isdisjoint(path.parts))
    train: dict[str, bytes] = {}
    held_out: dict[str, bytes] = {}
    total = 0
    for name in names:
        text = (root / name).read_bytes()
        if not text or total + len(text) > max_bytes:
            continue
        total += len(text)
        (held_out if is_held_out(name) else train)[name] = text
    if not train or not held_out:
        raise ValueError(f"{root}: {len(names)} .py files, too few to keep one in {HELD_OUT_ONE_IN} held out")
    return Corpus(_encode(train), _encode(held_out), tuple(train), tuple(held_out))


def is_held_out(name: str) -> bool:
    """Whether the file is kept from training. By its name alone: the same on every rank and machine."""
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0  # hash() would differ from process to process


def sample(text: Tensor, batch: int, context: int, step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """A micro-batch of random windows and the byte after each of their bytes: two int64 [batch, context].

    It depends on nothing but its arguments, so a run can stop and go on at any step with the same data.
    """
    # One number a (seed, step, rank); the factors are primes far above any of them.
    generator = torch.Generator().manual_seed(seed * 1_000_000_007 + step * 1_000_003 + rank)
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def held_out_batches(text: Tensor, batch: int, context: int, count: int, rank: int = 0, world_size: int = 1) -> Batches:
    """`count` fixed micro-batches for this rank: windows spread over the text, dealt out to the ranks."""
    windows = batch * count * world_size
    starts = torch.linspace(0, len(text) - context - 1, windows).long()[rank::world_size]
    for rows in starts.view(count, batch, 1):
        block = text[rows + torch.arange(context + 1)].long()
        yield block[:, :-1], block[:, 1:]


def decode(tokens: Tensor) -> str:
    """Bytes as text that is safe to print: a model that knows little writes control characters too."""
    text = bytes(tokens.tolist()).decode(errors="replace")
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _encode(files: dict[str, bytes]) -> Tensor:
    """The files one after another, as uint8 [number of bytes]."""
    return torch.frombuffer(bytearray(b"".join(files.values())), dtype=torch.uint8)
