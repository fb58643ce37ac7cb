"""Sharded parameters as their users meet them: what may be asked while they are away, how to get at them, Init."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ds_zero
from ds_comm import communicator
from ds_zero import GatheredParameters, Init, ShardedOptimizer, ZeroConfig, ZeroError
from ds_zero.covered import is_sharded
from ds_zero.group_storage import group_of
from testing import RankPool

Ranks = Callable[[int], RankPool]


class Net(nn.Module):
    """Blocks, of which each is a unit, and a layer that uses another's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + (x @ self.blocks[0][0].weight).sum()


def _net() -> Net:
    torch.manual_seed(4)
    return Net()


def _sharded(model: nn.Module, **more: Any) -> ShardedOptimizer:
    config = ZeroConfig(stage=3, stage3_param_persistence_threshold=0, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ShardedOptimizer(
        optimizer, model.named_parameters(), communicator(), config, cut=ds_zero.Cut.ANYWHERE, module=model
    )


def _step(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()


def manners() -> dict[str, Any]:
    """On a rank: what a parameter says of itself while it is sharded."""
    model = _net()
    whole = sum(p.numel() for p in model.parameters())
    optimizer = _sharded(model)
    weight = model.blocks[1][0].weight
    found = {
        "covered": is_sharded(weight),
        "shape": tuple(weight.shape),
        "numel": sum(p.numel() for p in model.parameters()) == whole,
        "kind": isinstance(weight, nn.Parameter),
        "leaf": weight.is_leaf and weight.requires_grad and weight.grad is None,
        "repr": repr(weight),
        "zeros": float(torch.zeros_like(weight).sum()),
        "bytes": sum(g.flat.untyped_storage().nbytes() for g in optimizer.groups),
        "model": "Linear" in repr(model),
    }
    uses = (
        lambda: weight.sum(),
        lambda: weight.data,
        lambda: weight.numpy(),
        lambda: copy.deepcopy(weight),
        lambda: weight[0],
        lambda: torch.cat([weight]),
        lambda: model.state_dict(),
        lambda: weight.tolist(),
        lambda: weight.data_ptr(),
        lambda: next(iter(weight)),
        lambda: bool((weight == 0).all()),
    )
    messages = []
    for use in uses:
        try:
            use()  # type: ignore[no-untyped-call]
            messages.append("")
        except ZeroError as error:
            messages.append(str(error))
    found["refused"] = messages
    optimizer.close()
    found["after"] = (is_sharded(weight), weight.sum().isfinite().item())
    return found


def test_what_may_be_asked_of_a_sharded_parameter(ranks: Ranks) -> None:
    for found in ranks(2).run(manners):
        assert found["covered"] and found["kind"] and found["leaf"] and found["numel"] and found["model"]
        assert found["shape"] == (6, 6) and found["zeros"] == 0.0 and found["bytes"] == 0
        assert found["repr"].startswith("Parameter(sharded, shape=(6, 6)")
        for message in found["refused"]:
            assert "'blocks." in message or "'head." in message, found["refused"]
            assert "GatheredParameters" in message
        assert found["after"] == (False, True)


def uses_another(steps: int, stage: int) -> dict[str, torch.Tensor]:
    """On a rank: weights after some steps of a model in which a layer uses another's weight."""
    model = _net()
    if stage == 3:
        optimizer = _sharded(model)
        for _ in range(steps):
            _step(model, optimizer)
        optimizer.close()
    else:
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            plain.zero_grad()
            model(torch.ones(2, 6)).square().sum().backward()
            plain.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_parameter_used_in_another_modules_forward(ranks: Ranks) -> None:
    for found, expected in zip(ranks(2).run(uses_another, 3, 3), ranks(2).run(uses_another, 3, 0)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def gathered() -> dict[str, Any]:
    """On a rank: what GatheredParameters does to values."""
    rank = communicator().rank
    model = _net()
    optimizer = _sharded(model)
    weight, other = model.blocks[0][0].weight, model.blocks[2][0].weight
    found: dict[str, Any] = {}
    with GatheredParameters(weight):
        before = weight.detach().clone()
        weight.data.fill_(7.0)  # forgotten
    with GatheredParameters([weight, other], modifier_rank=1):
        found["forgotten"] = torch.equal(weight.detach(), before)
        with GatheredParameters(weight), torch.no_grad():  # nested
            assert weight.sum().isfinite()
        if rank == 1:
            nn.init.constant_(weight, 3.0)
            other.data = torch.full_like(other, 4.0)
    with GatheredParameters(model):
        with torch.no_grad():
            found["taken"] = (weight.unique().tolist(), other.unique().tolist())
        found["copied"] = type(copy.deepcopy(model).blocks[0][0].weight).__name__
    found["away"] = is_sharded(weight) and is_sharded(other)
    with GatheredParameters(weight, enabled=False):
        found["disabled"] = is_sharded(weight)
    try:
        GatheredParameters(weight, modifier_rank=2)
    except ValueError as error:
        found["refused"] = str(error)
    _step(model, optimizer)
    optimizer.close()
    return found


def test_gathered_parameters(ranks: Ranks) -> None:
    for found in ranks(2).run(gathered):
        assert found["forgotten"] and found["away"] and found["disabled"]
        assert found["taken"] == ([3.0], [4.0]) and found["copied"] == "Parameter"
        assert "modifier_rank is a rank or None: got 2; give 0..1, or None" in found["refused"]


class Parent(nn.Module):
    """Initialises its children itself, ties two of them, and adds a parameter late."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.net = Net()
        self.head = nn.Linear(6, 12, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.embed.weight
        self.late = nn.Parameter(torch.full((6,), 0.5))

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.3)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.late
        return self.head(x + self.net(x).sum())


def built(inside: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """On a rank: weights of a model built in Init, or not, after two steps; and what was held meanwhile."""
    torch.manual_seed(20 + communicator().rank * inside)  # rank 0's values count
    seen: dict[str, Any] = {}
    with Init(enabled=inside):
        model = Parent()

        class Defined(nn.Linear):
            """A class of the block."""

        defined = Defined(5, 5)
    seen["covered"] = [is_sharded(p) for p in (*model.parameters(), *defined.parameters())]
    seen["after"] = is_sharded(nn.Linear(5, 5).weight)
    seen["names"] = len(dict(model.named_parameters()))
    try:
        defined(torch.ones(1, 5))
    except ZeroError as error:
        seen["early"] = str(error)
    optimizer = _sharded(model)
    for _ in range(2):
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
    optimizer.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, seen


def test_a_model_is_built_shard_by_shard(ranks: Ranks) -> None:
    for (found, seen), (expected, plain) in zip(ranks(2).run(built, True), ranks(2).run(built, False)):
        assert all(seen["covered"]) and not any(plain["covered"]) and not seen["after"]
        assert seen["names"] == plain["names"]
        assert "zero.Init" in seen["early"] and "ds_engine.initialize()" in seen["early"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def _bytes(parameters: list[nn.Parameter], what: str) -> int:
    groups = {id(group): group for p in parameters if (group := group_of(p)) is not None}
    return sum(getattr(group, what).untyped_storage().nbytes() for group in groups.values())


def construction() -> tuple[int, int, int]:
    """On a rank: most bytes that earlier layers held whole while a stack was built, and what is left of all."""
    earlier: list[nn.Parameter] = []
    most = 0

    class Wide(nn.Linear):
        def __init__(self) -> None:
            nonlocal most
            super().__init__(64, 64, bias=False)
            most = max(most, _bytes(earlier, "flat"))
            earlier.append(self.weight)

    with Init(dtype=torch.bfloat16):
        stack = nn.ModuleList(Wide() for _ in range(8))
    assert all(p.dtype is torch.bfloat16 for p in stack.parameters())
    return most, _bytes(list(stack.parameters()), "flat"), _bytes(list(stack.parameters()), "shard")


def test_while_it_is_built_a_model_is_never_whole(ranks: Ranks) -> None:
    for most, flat, shards in ranks(2).run(construction):
        assert (most, flat, shards) == (0, 0, 8 * 64 * 64 * 2 // 2)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_init_refuses_other_places(device: str) -> None:
    with pytest.raises(ZeroError, match=f"remote_device='{device}'; leave it out"):
        Init(remote_device=device)


def test_stage_3_needs_the_module(ranks: Ranks) -> None:
    assert all("module is None; pass module=" in message for message in ranks(2).run(_without_module))


def _without_module() -> str:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        ShardedOptimizer(optimizer, model.named_parameters(), communicator(), ZeroConfig(stage=3))
    except ValueError as error:
        return str(error)
    return ""


def dropped() -> list[str]:
    """On a rank: what a model says whose optimizer was dropped, and not closed."""
    model = _net()
    optimizer = _sharded(model)
    _step(model, optimizer)
    del optimizer
    gc.collect()
    messages = []
    for use in (lambda: model.head.weight.sum(), lambda: model(torch.ones(2, 6))):
        try:
            use()
        except ZeroError as error:
            messages.append(str(error))
    return messages


def test_values_that_went_with_their_optimizer_are_not_read(ranks: Ranks) -> None:
    for messages in ranks(2).run(dropped):
        assert len(messages) == 2 and all("is gone; keep it" in message for message in messages)
