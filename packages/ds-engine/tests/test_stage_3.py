"""The engine in stage 3: models that zero.Init built, states, and what it says to the usual slips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ds_engine
import ds_zero
from ds_engine import ConfigError
from ds_zero import ZeroError
from testing import RankPool

Ranks = Callable[[int], RankPool]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "steps_per_print": 0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Model(nn.Module):
    """Blocks of which each is gathered by itself, a buffer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.frozen(x) * self.scale


def trained(inside: bool, precision: dict[str, Any], told: bool = True) -> dict[str, torch.Tensor]:
    """On a rank: weights after three steps of an engine; `inside` zero.Init, which knows the precision if `told`."""
    torch.manual_seed(3)
    config = {**CONFIG, **precision}
    with ds_zero.Init(enabled=inside, config_dict_or_path=config if told else None):
        model = Model()
    engine, *_ = ds_engine.initialize(model=model, config=config)
    for step in range(3):
        x = torch.full((2, 6), 0.1 * (step + 1), dtype=model.scale.dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    state = engine.state_dict()
    engine.destroy()
    return {name: value.float() for name, value in state.items()}


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_model_that_init_built(precision: dict[str, Any], ranks: Ranks) -> None:
    for found, expected in zip(ranks(2).run(trained, True, precision), ranks(2).run(trained, False, precision)):
        assert found.keys() == expected.keys() and "scale" in found
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2e-2 if precision else 1e-6, atol=2e-3)


def refused() -> list[str]:
    """On a rank: what is said to slips."""
    messages = []
    try:
        trained(True, {"bf16": {"enabled": True}}, told=False)
    except ConfigError as error:
        messages.append(str(error))
    engine, *_ = ds_engine.initialize(model=Model(), config=CONFIG)
    for slip in (lambda: engine.module.state_dict(), lambda: engine.module.blocks[0][0].weight.norm()):
        try:
            slip()
        except ZeroError as error:
            messages.append(str(error))
    engine.destroy()
    return messages


def test_slips(ranks: Ranks) -> None:
    for dtype, state, use in ranks(2).run(refused):
        assert "'frozen.weight' is torch.float32" in dtype and "config_dict_or_path=" in dtype
        assert "'blocks.0.0." in state and "'blocks.0.0." in use
        assert "inside forward and backward only" in use


def loaded() -> bool:
    """On a rank: an engine that loads another's state is the other."""
    first, *_ = ds_engine.initialize(model=Model(), config=CONFIG)
    state = {name: value * 2 for name, value in first.state_dict().items()}
    first.load_state_dict(state)
    again = first.state_dict()
    first.destroy()
    return all(torch.equal(again[name], value) for name, value in state.items())


def test_a_state_is_loaded_whole(ranks: Ranks) -> None:
    assert ranks(2).run(loaded) == [True, True]


def evaluated() -> tuple[bool, int]:
    """On a rank: evaluation between micro-batches changes nothing and leaves nothing gathered."""
    torch.manual_seed(3)
    engine, optimizer, *_ = ds_engine.initialize(model=Model(), config=CONFIG)
    x = torch.ones(2, 6)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.eval()
    with torch.no_grad():
        first = engine(x)
    with torch.inference_mode():
        second = engine(x)
    left = sum(g.flat.untyped_storage().nbytes() for g in (*optimizer.groups, *optimizer.frozen_groups))
    engine.train()
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.destroy()
    return torch.equal(first, second), left


def test_evaluation(ranks: Ranks) -> None:
    assert ranks(2).run(evaluated) == [(True, 0), (True, 0)]


def compiled(how: str) -> bool:
    """On a rank: an engine over a model, or blocks of it, that torch.compile traces, learns what another learns."""
    results = []
    for trace in (False, True):
        torch.manual_seed(3)
        model = Model()
        for module in ([model] if how == "the model" else model.blocks) if trace else ():
            module.compile(backend="aot_eager")
        engine, *_ = ds_engine.initialize(model=model, config=CONFIG)
        for step in range(2):
            engine.backward(engine(torch.full((2, 6), 0.1 * (step + 1))).square().mean())
            engine.step()
        results.append(engine.state_dict())
        engine.destroy()
    return all(torch.allclose(value, results[1][name], rtol=1e-6) for name, value in results[0].items())


@pytest.mark.parametrize("how", ["the model", "its blocks"])
def test_compiled(how: str, ranks: Ranks) -> None:
    assert ranks(2).run(compiled, how) == [True, True]
