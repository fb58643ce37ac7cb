"""Uses that plain PyTorch allows and an engine may refuse, as functions that ranks run.

Each returns how far the result is from plain PyTorch's; or raises, which is as good if it says why.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ds_engine
from parity.corner_states import start

LR = 0.1


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def _go(engine: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        forward(_inputs()).square().sum().backward()
        engine.step()


def _inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4)


def _far(model: nn.Module, plain: nn.Module) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(model.parameters(), plain.parameters()))


def _plain(model: nn.Module, steps: int = 1, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    optimizer = optimizer or _sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(_inputs()).square().sum().backward()
        optimizer.step()
    return model


def second_engine(stage: int) -> float:
    """An engine on a model that another engine still holds, as when a notebook's cell is run again."""
    model = _model()
    first = start(model, _sgd(model), stage)
    second = start(model, _sgd(model), stage)
    try:
        _go(second, second)
        return _far(model, _plain(_model()))
    finally:
        second.destroy()
        first.destroy()


def replaced_engine(stage: int) -> float:
    """The same, with the first engine dropped but not destroyed."""
    model = _model()
    gc.disable()  # when the first engine goes is chance otherwise
    try:
        engine = start(model, _sgd(model), stage)
        engine = start(model, _sgd(model), stage)
        _go(engine, engine)
        far = _far(model, _plain(_model()))
        engine.destroy()
        return far
    finally:
        gc.enable()


def dropped_engine(stage: int) -> float:
    """An engine on a model whose first engine is gone, though nobody destroyed it."""
    model = _model()
    engine = start(model, _sgd(model), stage)
    del engine
    second = start(model, _sgd(model), stage)
    _go(second, second)
    far = _far(model, _plain(_model()))
    second.destroy()
    return far


def thawed_after_backward(stage: int) -> float:
    """Layer 0 thaws between backward and step: it has no gradient in this step, and one in the next."""
    model, plain = _model(), _model()
    for each in (model, plain):
        each[0].requires_grad_(False)
    engine = start(model, _sgd(model), stage)
    for micro in range(engine.gradient_accumulation_steps()):
        engine(_inputs()).square().sum().backward()
        if micro == engine.gradient_accumulation_steps() - 1:
            model[0].requires_grad_(True)
        engine.step()
    _go(engine, engine)
    optimizer = _sgd(plain)
    _plain(plain, 1, optimizer)
    plain[0].requires_grad_(True)
    far = _far(model, _plain(plain, 1, optimizer))
    engine.destroy()
    return far


def shared_layer(stage: int) -> float:
    """A layer that two engines train, as actor and critic with one trunk."""
    trunk = _model()[0]
    networks = [nn.Sequential(trunk, nn.Linear(6, 3)) for _ in range(2)]
    before = [p.detach().clone() for p in trunk.parameters()]
    first, second = (start(network, _sgd(network), stage) for network in networks)
    moved = 1.0
    for engine in (first, second):
        _go(engine, engine)
        moved = min(moved, *(float((p - b).abs().max()) for p, b in zip(trunk.parameters(), before)))
        before = [p.detach().clone() for p in trunk.parameters()]
    first.destroy()
    second.destroy()
    return 0.0 if moved > 0 else 1.0


def added_group(stage: int) -> float:
    """A parameter group added to the engine's optimizer, as gradual unfreezing does."""
    model, plain = _model(), _model()
    engine = start(model, torch.optim.SGD(model[1].parameters(), lr=LR), stage)
    rank = engine.global_rank
    engine.optimizer.add_param_group({"params": list(model[0].parameters())})
    # Every rank sees other samples, so that a gradient nobody averaged shows.
    _go(engine, lambda x: engine(x * (rank + 1)))
    optimizer = _sgd(plain)
    for each in range(engine.world_size):
        (plain(_inputs() * (each + 1)).square().sum() / engine.world_size).backward()
    optimizer.step()
    far = _far(model, plain)
    engine.destroy()
    return far


def loaded_optimizer_state(stage: int) -> float:
    """load_state_dict of the engine's optimizer."""
    model, plain = _model(), _model()
    engine = start(model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), stage)
    _go(engine, engine)
    state = engine.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.7
    engine.optimizer.load_state_dict(state)
    _go(engine, engine)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    _plain(plain, 1, optimizer)
    optimizer.param_groups[0]["lr"] = 0.7
    far = _far(model, _plain(plain, 1, optimizer))
    engine.destroy()
    return far


def replaced_data(stage: int) -> float:
    """`parameter.data` given other storage, as torch.nn.utils.vector_to_parameters does."""
    model, plain = _model(), _model()
    engine = start(model, _sgd(model), stage)
    for each in (model, plain):
        values = nn.utils.parameters_to_vector(each.parameters()).detach() * 0.5
        nn.utils.vector_to_parameters(values, each.parameters())
    _go(engine, engine)
    far = _far(model, _plain(plain))
    engine.destroy()
    return far


def converted_model(stage: int) -> float:
    """`model.double()` under the engine's feet."""
    model = _model()
    engine = start(model, _sgd(model), stage)
    model.double()
    try:
        _go(engine, lambda x: engine(x.double()))
        return _far(model, _plain(_model().double()))
    finally:
        engine.destroy()


def clamped_below_masters(stage: int) -> float:
    """Weights clamped in place between steps, as Wasserstein GANs do, in bf16 beside fp32 masters."""
    model = _model()
    engine = start(model, torch.optim.SGD(model.parameters(), lr=0.0), stage, bf16={"enabled": True})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)
    _go(engine, lambda x: engine(x.bfloat16()).float())
    far = max(float(p.detach().abs().max()) for p in model.parameters()) - 0.0101
    engine.destroy()
    return max(far, 0.0)


class Spectrum(nn.Module):
    """A complex weight between real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.turn = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.turn).abs() + self.bias.float()


def complex_parameter(stage: int) -> float:
    """A complex parameter in fp32."""
    model = Spectrum()
    engine = start(model, _sgd(model), stage)
    _go(engine, engine)
    far = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), _plain(Spectrum()).parameters()))
    engine.destroy()
    return far


def complex_parameter_in_bf16(stage: int) -> float:
    """The same under bf16: a cast would drop the imaginary part."""
    model = Spectrum()
    engine = start(model, _sgd(model), stage, bf16={"enabled": True})
    kept = model.turn.is_complex()
    _go(engine, engine)
    engine.destroy()
    return 0.0 if kept else 1.0


def sparse_adam(stage: int) -> float:
    """SparseAdam by name: it wants sparse gradients, and ours are reduced dense."""
    model = nn.Embedding(5, 3, sparse=True)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SparseAdam", "params": {}}}
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine, *_ = ds_engine.initialize(model=model, config=config)
    plain = nn.Embedding(5, 3, sparse=True)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SparseAdam(plain.parameters())
    tokens = torch.tensor([1, 2])
    F.mse_loss(plain(tokens), torch.zeros(2, 3)).backward()
    optimizer.step()
    F.mse_loss(engine(tokens), torch.zeros(2, 3)).backward()
    engine.step()
    far = _far(model, plain)
    engine.destroy()
    return far


def lbfgs(stage: int) -> float:
    """A client's LBFGS, whose step wants a closure."""
    model = _model()
    engine = start(model, torch.optim.LBFGS(model.parameters()), stage)
    _go(engine, engine)
    return 1.0


USES: dict[str, Callable[[int], float]] = {
    use.__name__: use
    for use in (
        second_engine, replaced_engine, dropped_engine, shared_layer, added_group, thawed_after_backward,
        loaded_optimizer_state, replaced_data, converted_model, clamped_below_masters, complex_parameter,
        complex_parameter_in_bf16, sparse_adam, lbfgs,
    )
}  # fmt: skip


def outcome(use: str, stage: int) -> tuple[float, str]:
    """On a rank: the distance, or the type and text of what was raised."""
    try:
        return USES[use](stage), ""
    except Exception as error:
        return float("inf"), f"{type(error).__name__}: {error}"


def _three() -> nn.Sequential:
    return _model().append(nn.Linear(3, 3))


def unused(stage: int) -> tuple[str, float]:
    """ignore_unused_parameters=false, a layer that rank 1 does not use and one that nobody uses: the error; then
    training goes on with all of them."""
    model = _three()
    zero = {"stage": stage, "ignore_unused_parameters": False, "overlap_comm": True}
    engine = start(model, _sgd(model), 0, zero_optimization=zero)
    message = ""
    for _ in range(engine.gradient_accumulation_steps()):
        hidden = model[0](_inputs())
        engine.backward((hidden if engine.global_rank == 1 else model[1](hidden)).sum())
        try:
            engine.step()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
    num_micros = engine.gradient_accumulation_steps()
    for micro in range(num_micros):
        engine.set_gradient_accumulation_boundary(micro == num_micros - 1)
        engine.backward(engine(_inputs()).square().sum())
        engine.step()
    far = _far(model, _plain(_three()))
    engine.destroy()
    return message, far
