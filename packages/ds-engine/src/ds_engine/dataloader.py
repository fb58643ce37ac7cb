"""Loaders: a dataset's batches shared out over the data-parallel ranks, and one that never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class DistributedLoader:
    """Micro-batches of this rank's share of a dataset, shuffled anew every epoch.

    Every rank gets as many. Where the samples don't divide by the ranks, a few come on two ranks, or with
    `drop_last` are left out.

    Args:
        dataset: map-style (every rank takes its own samples), or iterable (every rank iterates all of it, so
            it must share itself out).
        batch_size: samples a micro-batch.
        rank, world: this rank among the data-parallel ones.
        collate_fn: makes a batch of samples. Default: torch's.
        drop_last: leave an incomplete last batch out. Default: false.
        shuffle: Default: true.
        seed: of the shuffling; the same on every rank. Default: 0.
        sampler: which samples this rank takes, in place of all that. Default: none.
        num_workers: processes that load. Default: 0, this one loads.
        pin_memory: page-locked batches, for an accelerator. Default: false.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        rank: int,
        world: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        sampler: Any = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        self.dataset, self.epoch = dataset, 0
        self.sampler = sampler
        self._shares: DistributedSampler[Any] | None = None  # the epoch of a caller's sampler is the caller's
        if sampler is None and not isinstance(dataset, IterableDataset):
            self.sampler = self._shares = DistributedSampler(
                dataset, num_replicas=world, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
            )
        self.loader = DataLoader(
            dataset,
            batch_size,
            sampler=self.sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._shares is not None:
            self._shares.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


class RepeatingLoader:
    """Wraps a loader so that it starts again when it ends. `next()` works on it directly.

    Args:
        loader: anything that can be iterated more than once.

    Raises:
        ValueError: (from `next`) the loader is empty.

    Source: DeepSpeed's pipeline tutorial.
    """

    def __init__(self, loader: Iterable[Any]):
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError("a loader that repeats has batches: this one is empty; check the dataset") from None
