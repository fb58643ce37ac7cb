"""What goes wrong around an engine: a refused start, unusual buffers, odd values, late parameters, failed passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import ds_engine
from ds_comm import init_distributed
from ds_engine import ConfigError
from testing import RankPool

Start = Callable[..., Any]
BF16 = {"bf16": {"enabled": True}}


def test_a_refused_start_leaves_the_model_as_it_was(start: Start) -> None:
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    kept = []
    for section in ({"type": "WarmupLRs"}, {"type": "WarmupLR", "params": {"warmup_steps": 1}}):
        with pytest.raises(ValueError, match="did you mean") as caught:
            start({**BF16, "scheduler": section}, model=model)
        kept.append(caught.value)  # as an interpreter keeps the last one
    assert model.weight.dtype is torch.float32 and torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="cycle_max_lr"):
        start(
            {**BF16, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1.0, "cycle_max_lr": "x"}}},
            model=model,
        )
    start(BF16, model=model)


class Buffers(nn.Module):
    """Buffers of kinds that backends can't send, and one whose elements are one."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("expanded", torch.full((2, 1), float(value)).expand(2, 3))
        self.register_buffer("transposed", torch.full((2, 3), float(value)).t())
        self.register_buffer("scalar", torch.tensor(float(value)))
        for dtype in (torch.int16, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.full((3,), float(value)).to(dtype))


def buffers() -> list[list[Any]]:
    """On a rank: every buffer after initialize, where each rank had another value."""
    import torch.distributed as dist

    model = Buffers(1 - dist.get_rank())
    engine, *_ = ds_engine.initialize(
        model=model, config={"train_batch_size": 2, "optimizer": {"type": "SGD"}, "steps_per_print": 0}
    )
    found = [buffer.to(torch.complex64).real.flatten().tolist() for buffer in model.buffers()]
    engine.destroy()
    return found


def test_buffers_of_any_kind_come_from_rank_0(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(buffers):
        assert len(found) == 8 and {value for values in found for value in values} == {1.0}


def test_an_expanded_buffer_alone(start: Start) -> None:
    start(model=Buffers(1))


def test_scale_wrt_gas_leaves_others_gradients_alone(start: Start) -> None:
    """Divided by hand: the engine's own gradients count the same, one outside it gets its own."""
    engine, *_ = start({"gradient_accumulation_steps": 4}, model=nn.Linear(4, 3))
    outside = nn.Parameter(torch.ones(3))
    before = engine.module.bias.detach().clone()
    for _ in range(4):
        loss = (engine(torch.ones(2, 4)) * outside).sum() / 4
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
    torch.testing.assert_close(engine.module.bias, before - 0.1 * 2.0)
    expected = (torch.ones(2, 4) @ engine.module.weight.detach().T).sum(0)
    assert outside.grad is not None and outside.grad.shape == expected.shape
    learnt = nn.Linear(4, 3)
    with torch.no_grad():
        learnt.weight.copy_(engine.module.weight + 0.1 * 2.0)
        learnt.bias.copy_(before)
    torch.testing.assert_close(outside.grad, learnt(torch.ones(2, 4)).detach().sum(0))


@pytest.mark.parametrize("precision", [{}, BF16])
@pytest.mark.parametrize("params", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_momentum_of_a_parameter_that_comes_late(
    precision: dict[str, Any], params: dict[str, Any], start: Start
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    engine, *_ = start({**precision, "optimizer": {"type": "SGD", "params": {"lr": 0.1, **params}}}, model=model)
    before = model[0].bias.detach().clone()
    for step in range(2):
        if step:
            model[0].requires_grad_(True)
        x = torch.ones(2, 4, dtype=model[0].weight.dtype)
        engine.backward(engine(x).float().sum())
        engine.step()
    assert not torch.equal(model[0].bias, before)


def test_stage_3_without_an_optimizer_is_refused(start: Start) -> None:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "steps_per_print": 0}
    with pytest.raises(ConfigError, match="pass an optimizer, or set"):
        ds_engine.initialize(model=nn.Linear(2, 2), config=config)


def test_a_callers_sampler_keeps_its_epoch(start: Start) -> None:
    dataset = TensorDataset(torch.arange(32.0).view(32, 1))
    engine, *_ = start()
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    sampler.set_epoch(5)
    expected = list(sampler)
    loader = engine.deepspeed_io(dataset, data_sampler=sampler)
    assert [int(x) for (batch,) in loader for x in batch] == expected


def test_a_time_limit_that_comes_too_late_is_said(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    init_distributed()
    with caplog.at_level(logging.WARNING, logger="ds_comm"):
        start({"comm_timeout_s": 7})
    assert "keeps its time limit" in caplog.text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lr": "1e-3"}, "lr of optimizer Adam is a number, got '1e-3': write it without quotes"),
        ({"lr": "auto"}, "lr of optimizer Adam is a number, got 'auto': fill it in"),
        ({"weight_decay": "auto"}, "weight_decay of optimizer Adam is a number, got 'auto'"),
        ({"betas": "auto"}, "betas of optimizer Adam is a list of numbers, got 'auto'"),
        ({"betas": 0.9}, "betas of optimizer Adam is a list of numbers, got 0.9: write [a, b]"),
    ],
)
def test_text_for_a_number(params: dict[str, Any], message: str, start: Start) -> None:
    with pytest.raises(ValueError, match="of optimizer") as caught:
        start({"optimizer": {"type": "Adam", "params": params}})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "on"),
    [
        ({"sequence_parallel_size": 1}, False),
        ({"sequence_parallel_size": 2}, True),
        ({"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}}, False),
        ({"activation_checkpointing": {"partition_activations": True}}, True),
        ({"tensor_parallel": {"autotp_size": 0}}, False),
        (
            {"monitor_config": {"tensorboard": {"enabled": False, "output_path": "x"}, "wandb": {"enabled": False}}},
            False,
        ),
        ({"monitor_config": {"wandb": {"enabled": True}}}, True),
    ],
)
def test_what_asks_for_nothing_may_stand(section: dict[str, Any], on: bool, start: Start) -> None:
    if not on:
        start(section)
        return
    with pytest.raises(ConfigError, match="not available in this version, and asks for something: "):
        start(section)
