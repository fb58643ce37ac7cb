"""What holds on every rank when one has nothing to give, and what a step leaves of older graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_comm import communicator
from ds_zero import Cut, ShardedOptimizer, ZeroConfig, ZeroError, safe_get_full_optimizer_state
from testing import RankPool


def sharded(model: nn.Module, cut: Cut) -> ShardedOptimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return ShardedOptimizer(optimizer, model.named_parameters(), communicator(), ZeroConfig(stage=2), cut=cut)


def missing_state(cut: Cut) -> list[str]:
    """On a rank: what asking for states says before the first step, by a wrong name, and by the right one."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = sharded(model, cut)
    said = []
    for key in ("exp_avg", "exp_average", "exp_avg"):
        try:
            found = safe_get_full_optimizer_state(model.weight, key)
            said.append(f"{tuple(found.shape)}" if found is not None else "none")
        except ZeroError as error:
            said.append(str(error))
        if len(said) == 2:
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    optimizer.close()
    return said


@pytest.mark.parametrize("cut", [Cut.BETWEEN, Cut.ANYWHERE])
def test_a_state_that_the_owner_lacks_is_an_error_on_every_rank(ranks: Callable[[int], RankPool], cut: Cut) -> None:
    for early, misspelt, right in ranks(2).run(missing_state, cut):
        assert "first step()" in early
        assert "'weight'" in misspelt
        assert right == "(8, 8)"


def old_graphs() -> list[str]:
    """On a rank: a backward through weights from before a step, and through ones that the step did not touch."""
    torch.manual_seed(0)
    used, other = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([used, other])
    optimizer = sharded(model, Cut.ANYWHERE)
    x = torch.ones(1, 4, requires_grad=True)
    first, second, elsewhere = used(x).sum(), used(x * 2).sum(), other(x).sum()
    first.backward()
    optimizer.step()
    said = []
    for loss in (second, elsewhere):
        try:
            loss.backward()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        optimizer.zero_grad()
    optimizer.close()
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_backward_through_values_from_before_a_step_is_refused_as_in_torch(
    ranks: Callable[[int], RankPool], world: int
) -> None:
    for stale, fresh in ranks(world).run(old_graphs):
        assert "modified by an inplace operation" in stale
        assert fresh == ""
