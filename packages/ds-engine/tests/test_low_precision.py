"""Low precision in the corners: without masters, without an optimizer, with part of the model trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_engine import EngineError

Start = Callable[..., Any]

NO_MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def one_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("given", ["a bf16 model", "a bf16 section"])
def test_every_optimizer_moves_parameters_without_masters(start: Start, name: str, given: str) -> None:
    """torch's fused SGD leaves bf16 parameters on a CPU as they are, and says nothing."""
    section = {"bf16": {"enabled": True, **NO_MASTERS}} if given == "a bf16 section" else {}
    model, twin = one_layer(), one_layer().bfloat16()
    if not section:
        model.bfloat16()
    engine, *_ = start({"optimizer": {"type": name, "params": {"lr": 0.25}}} | section, model=model)
    kind = getattr(torch.optim, name)
    reference = kind(twin.parameters(), lr=0.25, foreach=False, **({"weight_decay": 0.0} if "Adam" in name else {}))
    x = torch.linspace(-1, 1, 8).view(2, 4).bfloat16()
    for _ in range(2):
        engine.backward(engine(x).float().square().mean())
        engine.step()
        twin(x).float().square().mean().backward()
        reference.step()
        reference.zero_grad()
    assert not torch.equal(twin.weight, one_layer().bfloat16().weight)
    torch.testing.assert_close(model.weight, twin.weight, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("trained", ["nothing", "a part", "a part by a client's optimizer", "all"])
def test_the_whole_model_is_cast(start: Start, trained: str) -> None:
    model = net()
    given: dict[str, Any] = {"nothing": {}, "all": {}, "a part": {"model_parameters": model[2].parameters()}}.get(
        trained, {"optimizer": torch.optim.SGD(model[2].parameters(), lr=0.1)}
    )
    engine, *_ = start(
        {"bf16": {"enabled": True}, **({"optimizer": None} if trained == "nothing" else {})}, model=model, **given
    )
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.bfloat16}
    assert engine(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_state_dict_is_copied_never_assigned(start: Start) -> None:
    engine, *_ = start()
    state = {name: value + 1 for name, value in engine.state_dict().items()}
    with pytest.raises(EngineError, match="assign=True would replace them"):
        engine.load_state_dict(state, assign=True)
    engine.load_state_dict(state)
    assert torch.equal(engine.module.weight, state["weight"])


def test_a_step_begins_anew_after_a_backward_that_failed(start: Start) -> None:
    """Its gradients are gone, so the step takes as many micro-batches as any other."""
    engine, *_ = start({"gradient_accumulation_steps": 2})
    before = engine.module.bias.detach().clone()

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("out of memory")

    def learn(broken: bool = False) -> None:
        output = engine(torch.ones(2, 4))
        if broken:
            output.register_hook(fail)
        engine.backward(output.sum())

    learn()
    engine.step()
    with pytest.raises(MemoryError):
        learn(broken=True)
    learn()
    engine.step()
    assert torch.equal(engine.module.bias, before), "the step is not complete"
    learn()
    engine.step()
    torch.testing.assert_close(engine.module.bias, before - 0.1 * 2.0)
