"""What a ShardedOptimizer takes in and what it refuses, on ranks that may differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_comm import communicator
from ds_zero import ShardedOptimizer, ZeroConfig, ZeroError
from testing import RankPool

Ranks = Callable[[int], RankPool]


def _wrap(model: nn.Module) -> ShardedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ShardedOptimizer(optimizer, model.named_parameters(), communicator(), ZeroConfig(stage=1))


def _other(kind: str, rank: int) -> nn.Module:
    if kind == "shape":  # padded to the same size
        return nn.Sequential(nn.Linear(4, 8 - rank), nn.Linear(8 - rank, 1))
    if kind == "order":
        return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("qk", "kq")[rank]})
    if kind == "count":
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + rank)])
    if kind == "frozen":
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(rank == 0)
        return model
    return nn.Linear(4, 4, dtype=(torch.float32, torch.bfloat16)[rank])


def refused(kind: str) -> str:
    """On a rank: what it says to a model that is another one there."""
    try:
        _wrap(_other(kind, communicator().rank))
    except ZeroError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("shape", ["number 0 of rank 0 is '0.weight', [8, 4]", "number 0 of rank 1 is '0.weight', [7, 4]"]),
        ("order", ["number 0 of rank 0 is 'q.weight'", "number 0 of rank 1 is 'k.weight'"]),
        ("count", ["number 4 of rank 0 is none", "number 4 of rank 1 is '2.weight'"]),
        ("frozen", ["number 0 of rank 0 is '0.weight'", "number 0 of rank 1 is '1.weight'"]),
        ("dtype", ["float32", "bfloat16"]),
    ],
)
def test_models_that_differ_by_rank_are_refused(ranks: Ranks, kind: str, places: list[str]) -> None:
    for rank, (message, place) in enumerate(zip(ranks(2).run(refused, kind), places)):
        assert place in message and f"another on rank {1 - rank}" in message, message


def _shared() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    try:
        _wrap(model)
    except ZeroError as error:
        return str(error)
    return ""


def test_parameters_that_share_memory_are_refused(ranks: Ranks) -> None:
    (message,) = ranks(1).run(_shared)
    assert "'0.weight' and '1.weight' share memory" in message


def _parts() -> bool:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, part in zip(model, torch.randn(32).view(2, 4, 4)):
        layer.weight.data = part
    optimizer = _wrap(model)
    model(torch.ones(1, 4)).sum().backward()
    applied = optimizer.step().applied
    optimizer.close()
    return applied


def test_parts_of_one_buffer_are_parameters_like_others(ranks: Ranks) -> None:
    assert ranks(2).run(_parts) == [True, True]


def alone_after_refusals() -> bool:
    """On a rank: an optimizer after several that were refused knows that it has the ranks to itself."""
    for _ in range(3):
        with pytest.raises(ValueError, match="something to train"):
            _wrap(nn.Linear(2, 2).requires_grad_(False))
    optimizer = _wrap(nn.Linear(2, 2))
    alone = optimizer.reducer.is_alone
    beside = _wrap(nn.Linear(2, 2))
    assert not optimizer.reducer.is_alone
    beside.close()
    optimizer.close()
    return alone


def test_what_was_refused_does_not_count(ranks: Ranks) -> None:
    assert ranks(2).run(alone_after_refusals) == [True, True]


def _hooks() -> list[str]:
    optimizer = _wrap(nn.Linear(2, 2))
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: called.append("before"))
    optimizer.register_state_dict_post_hook(lambda o, s: called.append("after"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: called.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()
    return called


def test_hooks_on_states_are_called(ranks: Ranks) -> None:
    assert ranks(1).run(_hooks) == [["before", "after", "before loading", "loaded"]]
