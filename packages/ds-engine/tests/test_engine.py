"""The engine's step: what counts, when parameters move, what can be asked, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_engine import ConfigError, EngineError, Event, initialize
from testing import RankPool

Start = Callable[..., Any]
Ranks = Callable[[int], RankPool]

INPUTS = torch.linspace(-1, 1, 8).view(2, 4)


def train(engine: Any, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        engine.backward(engine(INPUTS).square().mean())
        engine.step()


def values(engine: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def moved(engine: Any, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, values(engine)))


# Counting


def counters() -> list[tuple[bool, int, int, int, int]]:
    """Before every one of five micro-batches: is it the boundary, and the counters."""
    engine, *_ = initialize(
        model=nn.Linear(4, 3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "steps_per_print": 0,
        },
    )
    rows = []
    for _ in range(5):
        boundary = engine.is_gradient_accumulation_boundary()
        rows.append(
            (boundary, engine.micro_steps, engine.global_steps, engine.global_samples, engine.train_batch_size())
        )
        train(engine)
    engine.destroy()
    return rows


def test_counters_and_boundaries(ranks: Ranks) -> None:
    expected = [
        (False, 0, 0, 0, 8),
        (True, 1, 0, 0, 8),
        (False, 2, 1, 8, 8),
        (True, 3, 1, 8, 8),
        (False, 4, 2, 16, 8),
    ]
    assert ranks(2).run(counters) == [expected] * 2


def test_parameters_move_at_the_boundary_only(start: Start) -> None:
    engine, *_ = start({"gradient_accumulation_steps": 3})
    for _ in range(2):
        before = values(engine)
        train(engine, 2)
        assert not moved(engine, before)
        train(engine)
        assert moved(engine, before)


def test_the_boundary_by_hand(start: Start) -> None:
    engine, *_ = start({"gradient_accumulation_steps": 2})
    seen = []
    for is_boundary in (False, False, True, None, None, None):
        engine.set_gradient_accumulation_boundary(is_boundary)
        assert is_boundary in (None, engine.is_gradient_accumulation_boundary())
        train(engine)
        seen.append(engine.global_steps)
    assert seen == [0, 0, 1, 1, 2, 2], "None counts on from the last boundary"


def test_the_batch_size_changes_between_steps(start: Start) -> None:
    """A step after the change takes the new number of micro-batches, wherever the count stood."""
    engine, *_ = start({"gradient_accumulation_steps": 4})
    reference = copy.deepcopy(engine.module)
    train(engine, 4)
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    steps = []
    for _ in range(6):
        train(engine)
        steps.append(engine.global_steps)
    assert steps == [1, 1, 2, 2, 2, 3]
    assert engine.global_samples == 8 + 6 + 6
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        plain.zero_grad()
        reference(INPUTS).square().mean().backward()
        plain.step()
    for ours, theirs in zip(values(engine), reference.parameters()):
        torch.testing.assert_close(ours, theirs)


def test_a_step_under_way_keeps_its_size(start: Start) -> None:
    engine, *_ = start({"gradient_accumulation_steps": 4})
    train(engine, 3)
    with pytest.raises(EngineError, match="3 of 4 micro-batches are done; change the batch size after the step"):
        engine.set_train_batch_size(2)
    train(engine)
    with pytest.raises(ConfigError, match=r"3 is not a multiple of 2.*set train_batch_size=2 or 4"):
        engine.set_train_batch_size(3)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (20, 5, 4)


# What can be asked


def test_getters(start: Start) -> None:
    config = {
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5, "betas": [0.5, 0.75]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.25, "warmup_max_lr": 0.5}},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 2.0,
        "steps_per_print": 7,
        "wall_clock_breakdown": True,
        "bf16": {"enabled": True},
    }
    engine, *_ = start(config)
    assert engine.get_batch_info() == (6, 2, 3)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 2)
    assert engine.gradient_accumulation_steps() == 3
    assert engine.get_lr() == [0.25]
    assert engine.get_mom() == [(0.5, 0.75)]
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("Adam", "WarmupLR")
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (True, 2)
    assert engine.gradient_clipping() == 2.0
    assert (engine.steps_per_print(), engine.wall_clock_breakdown()) == (7, True)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)
    assert (engine.loss_scale, engine.dynamic_loss_scale()) == (1.0, False)
    assert (engine.dp_world_size, engine.world_size, engine.global_rank, engine.local_rank) == (1, 1, 0, 0)
    engine, *_ = start({"fp16": {"enabled": True, "initial_scale_power": 4}, "optimizer": {"type": "SGD"}})
    assert (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.zero_optimization()) == (False, True, False)
    assert (engine.loss_scale, engine.cur_scale, engine.dynamic_loss_scale()) == (16.0, 16.0, True)
    assert engine.get_mom() == [0]
    engine, *_ = start(optimizer=lambda parameters: torch.optim.Adagrad(parameters))
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("SGD", None)
    assert engine.get_mom() == [None]


def test_the_gradient_norm_is_the_plain_one_before_clipping(start: Start) -> None:
    engine, *_ = start({"gradient_accumulation_steps": 2, "gradient_clipping": 1e-3})
    reference = copy.deepcopy(engine.module)
    assert engine.get_global_grad_norm() is None, "no step yet"
    train(engine)
    assert engine.get_global_grad_norm() is None
    train(engine)
    reference(INPUTS).square().mean().backward()
    plain = torch.nn.utils.get_total_norm([parameter.grad for parameter in reference.parameters()])
    assert engine.get_global_grad_norm() == pytest.approx(float(plain), rel=1e-6)
    assert plain > 1e-3


def test_an_engine_is_its_model_to_the_outside(start: Start) -> None:
    class Model(nn.Linear):
        note = "mine"

    engine, *_ = start(model=Model(4, 3))
    assert engine.note == "mine"
    assert engine.weight is engine.module.weight
    assert list(engine.state_dict()) == ["weight", "bias"]
    with pytest.raises(AttributeError, match=r"neither the engine nor its model \(Model\) has 'nots'"):
        engine.nots  # noqa: B018


def test_loaded_values_are_trained_on(start: Start) -> None:
    engine, *_ = start({"bf16": {"enabled": True, "auto_cast": True}})
    wanted = {name: torch.full_like(value, 0.5) for name, value in engine.state_dict().items()}
    engine.load_state_dict(wanted)
    train(engine)
    for value in engine.state_dict().values():
        assert float((value - 0.5).abs().max()) < 0.4, "it went on from the loaded values"
    assert moved(engine, list(wanted.values()))


# Modes


def test_eval_and_train(start: Start) -> None:
    engine, *_ = start(model=nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    heard: list[Event] = []
    for event in Event:
        engine.events.subscribe(event, lambda engine, event=event: heard.append(event))
    assert engine.training and engine.module[1].training
    assert engine.eval() is engine
    assert not engine.module[1].training
    with torch.no_grad():
        assert torch.equal(engine(INPUTS), engine(INPUTS))
    assert heard == [], "an evaluation is no part of a step"
    engine.train()
    assert engine.module[1].training
    train(engine)
    assert heard == list(Event), "in the order in which they are declared"


# Calls at the wrong time


def test_a_step_without_a_backward_changes_nothing(start: Start) -> None:
    engine, *_ = start({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}}})
    before = values(engine)
    engine.step()
    assert not moved(engine, before), "no decay either: the optimizer sees no gradient"
    assert (engine.global_steps, engine.get_global_grad_norm()) == (1, 0.0)
    train(engine)
    assert moved(engine, before)


def test_a_second_backward_through_one_graph_is_torchs_error(start: Start) -> None:
    engine, *_ = start()
    loss = engine(INPUTS).square().mean()
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        engine.backward(loss)
    train(engine)


def test_two_backwards_add_up(start: Start) -> None:
    one, *_ = start()
    two, *_ = start()
    loss = one(INPUTS).square().mean()
    one.backward(loss * 3)
    loss = two(INPUTS).square().mean()
    two.backward(loss, retain_graph=True)
    two.backward(loss * 2)
    one.step(), two.step()
    for ours, theirs in zip(values(one), values(two)):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda outputs: outputs, r"one number, the loss: got a tensor of shape \(2, 3\); take its mean"),
        (lambda outputs: 1.5, "got float"),
        (lambda outputs: outputs.detach().sum(), "must depend on parameters that require gradients, and does not"),
    ],
)
def test_what_is_no_loss(loss: Callable[[torch.Tensor], Any], words: str, start: Start) -> None:
    engine, *_ = start()
    with pytest.raises(EngineError, match=words):
        engine.backward(loss(engine(INPUTS)))
    train(engine)


def test_the_loss_comes_back_as_it_was(start: Start) -> None:
    engine, *_ = start({"gradient_accumulation_steps": 4, "fp16": {"enabled": True}})
    loss = engine(INPUTS.half()).float().square().mean()
    value = loss.item()
    assert engine.backward(loss) is loss
    assert loss.item() == value, "neither divided by micro-batches nor scaled"


def test_a_step_wants_an_optimizer(start: Start) -> None:
    engine, *_ = start({"optimizer": None})
    engine.backward(engine(INPUTS).sum())
    with pytest.raises(EngineError, match=r'pass optimizer=, or add an "optimizer" section'):
        engine.step()


def test_no_sync_puts_steps_off(start: Start) -> None:
    engine, *_ = start()
    with engine.no_sync():
        engine.backward(engine(INPUTS).sum())
        with pytest.raises(EngineError, match="call it after the with block"):
            engine.step()
        with pytest.raises(EngineError, match="blocks don't nest"), engine.no_sync():
            pass
    engine.step()


def test_after_destroy(start: Start) -> None:
    engine, *_ = start()
    train(engine)
    loss = engine(INPUTS).sum()
    engine.destroy()
    engine.destroy()
    for call in (lambda: engine(INPUTS), lambda: engine.backward(loss), engine.step):
        with pytest.raises(EngineError, match=r"works until it is destroyed: .*call initialize"):
            call()
    model = engine.module
    model(INPUTS).sum().backward()
    assert model.weight.grad is not None, "the model is an ordinary one again"
    model.weight.grad = None
    again, *_ = start(model=model)
    before = values(again)
    train(again)
    assert moved(again, before)
    assert (again.global_steps, engine.global_steps) == (1, 1)


# fp16


def test_an_overflow_leaves_the_step_out(start: Start) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.25, "warmup_max_lr": 1.0, "warmup_num_steps": 9}}
    engine, *_ = start({"fp16": fp16, "scheduler": schedule})
    before, rate = values(engine), engine.get_lr()
    engine.backward(engine(INPUTS.half()).float().sum() * float("inf"))
    engine.step()
    assert not moved(engine, before)
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (1, 1, 8.0)
    assert engine.get_lr() == rate, "the schedule waits"
    for _ in range(2):
        engine.backward(engine(INPUTS.half()).float().square().mean())
        engine.step()
    assert moved(engine, before)
    assert engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (3, 1, 8.0)
    assert engine.get_lr() != rate
