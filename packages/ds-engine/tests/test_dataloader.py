"""Loaders: who gets which samples, in which order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ds_engine import DistributedLoader, RepeatingLoader


class Numbers(Dataset):
    """0, 1, 2, … as tensors; says which process made them."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __init__(self, length: int):
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class WhichWorker(Numbers):
    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        return -1 if info is None else info.id


def epoch(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def loaders(length: int, world: int, batch: int = 2, **options: Any) -> list[DistributedLoader]:
    return [DistributedLoader(Numbers(length), batch, rank, world, **options) for rank in range(world)]


@given(length=st.integers(1, 40), world=st.integers(1, 5), batch=st.integers(1, 5), shuffle=st.booleans())
def test_every_sample_once_and_as_many_on_each_rank(length: int, world: int, batch: int, shuffle: bool) -> None:
    shares = [epoch(loader) for loader in loaders(length, world, batch, shuffle=shuffle)]
    sizes = [[len(each) for each in share] for share in shares]
    assert all(size == sizes[0] for size in sizes), "ranks that disagree would wait for each other"
    counts = Counter(sample for share in shares for each in share for sample in each)
    assert set(counts) == set(range(length)), "none is lost"
    assert counts.total() == -(-length // world) * world, "no more come twice than it takes to be even"
    if length % world == 0:
        assert set(counts.values()) == {1}


@given(length=st.integers(0, 40), world=st.integers(1, 5), batch=st.integers(1, 5))
def test_drop_last_leaves_out_what_is_left_over(length: int, world: int, batch: int) -> None:
    each = loaders(length, world, batch, drop_last=True)
    shares = [epoch(loader) for loader in each]
    counts = Counter(sample for share in shares for each in share for sample in each)
    assert not counts or set(counts.values()) == {1}, "none comes twice"
    assert {len(share) for share in shares} == {len(each[0])} == {length // world // batch}
    assert all(len(one) == batch for share in shares for one in share)


def test_shuffling_goes_by_seed_and_epoch() -> None:
    first, again, other = (loaders(64, 2, seed=seed)[0] for seed in (3, 3, 4))
    one, two = epoch(first), epoch(first)
    assert one != two, "every epoch is another order"
    assert [epoch(again), epoch(again)] == [one, two], "the same on every run"
    assert epoch(other) != one
    assert sorted(itertools.chain(*one)) != list(range(0, 64, 2)), "which samples a rank gets changes too"


def test_an_epoch_can_be_chosen() -> None:
    loader, resumed = loaders(64, 2)[0], loaders(64, 2)[0]
    epochs = [epoch(loader) for _ in range(3)]
    resumed.epoch = 2
    assert epoch(resumed) == epochs[2]


def test_without_shuffling_ranks_take_turns() -> None:
    assert [epoch(loader) for loader in loaders(7, 2, shuffle=False)] == [[[0, 2], [4, 6]], [[1, 3], [5, 0]]]


def test_workers_give_the_same_batches() -> None:
    plain, workers = loaders(32, 2)[1], loaders(32, 2, num_workers=2)[1]
    for _ in range(2):
        assert epoch(workers) == epoch(plain)
    made = {sample for batch in epoch(DistributedLoader(WhichWorker(8), 2, 0, 1, num_workers=2)) for sample in batch}
    assert made == {0, 1}, "workers load, and this process does not"


@pytest.mark.parametrize(("drop_last", "last"), [(False, [[4]]), (True, [])])
def test_an_iterable_dataset_shares_itself_out(drop_last: bool, last: list[list[int]]) -> None:
    shares = [epoch(DistributedLoader(Stream(5), 2, rank, 2, drop_last=drop_last)) for rank in (0, 1)]
    assert shares == [[[0, 1], [2, 3], *last]] * 2


def test_a_collate_function_makes_the_batches() -> None:
    loader = DistributedLoader(Numbers(6), 3, 1, 2, collate_fn=lambda samples: {"sum": sum(samples)}, shuffle=False)
    assert list(loader) == [{"sum": 1 + 3 + 5}]


def test_a_sampler_says_what_this_rank_takes() -> None:
    loader = DistributedLoader(Numbers(9), 2, 1, 2, sampler=[8, 8, 1])
    assert [epoch(loader), epoch(loader)] == [[[8, 8], [1]]] * 2


def test_the_epoch_of_a_callers_sampler_is_the_callers() -> None:
    class Sampler(list):
        epochs: list[int] = []

        def set_epoch(self, number: int) -> None:
            self.epochs.append(number)

    loader = DistributedLoader(Numbers(9), 2, 0, 1, sampler=Sampler([1]))
    epoch(loader), epoch(loader)
    assert Sampler.epochs == []


def test_a_repeating_loader_starts_again() -> None:
    repeating = RepeatingLoader([1, 2, 3])
    assert len(repeating) == 3
    assert [next(repeating) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert iter(repeating) is repeating


def test_a_repeating_loader_shuffles_every_round_anew() -> None:
    repeating = RepeatingLoader(loaders(64, 1, batch=64)[0])
    rounds = [next(repeating) for _ in range(3)]
    assert [sorted(each.tolist()) for each in rounds] == [list(range(64))] * 3
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(rounds))


@pytest.mark.parametrize("loader", [[], iter([1])])
def test_a_loader_that_repeats_has_batches(loader: Any) -> None:
    repeating = RepeatingLoader(loader)
    with pytest.raises(ValueError, match="this one is empty; check the dataset"):
        for _ in range(2):
            next(repeating)
