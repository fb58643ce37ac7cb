"""LAMB and Lion: against plain loops in float64, their states, and what they are called with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ds_engine.optim_lamb import Lamb
from ds_engine.optim_lion import Lion
from testing.optimizers import assert_same, parameters, run, set_grads


def lion_reference(
    start: torch.Tensor, grads: list[torch.Tensor], lr: float, betas: tuple[float, float], decay: float
) -> torch.Tensor:
    weights, momentum = start.double().flatten().tolist(), [0.0] * start.numel()
    for grad in grads:
        for at, g in enumerate(grad.double().flatten().tolist()):
            direction = betas[0] * momentum[at] + (1 - betas[0]) * g
            sign = (direction > 0) - (direction < 0)
            weights[at] -= lr * (sign + decay * weights[at])
            momentum[at] = betas[1] * momentum[at] + (1 - betas[1]) * g
    return torch.tensor(weights, dtype=start.dtype).view_as(start)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.8)])
def test_lion(decay: float, betas: tuple[float, float]) -> None:
    params = parameters(dtype=torch.float64)
    starts = [param.detach().clone() for param in params]
    optimizer = Lion(params, lr=0.02, betas=betas, weight_decay=decay)
    history: list[list[torch.Tensor]] = [[] for _ in params]
    for step in range(6):
        set_grads(params, step)
        for grads, param in zip(history, params):
            grads.append(param.grad)
        optimizer.step()
    assert_same(params, [lion_reference(*each, 0.02, betas, decay) for each in zip(starts, history)])


def test_lion_maximizes() -> None:
    up, down = parameters(), parameters()
    set_grads(up, 0)
    for param, other in zip(up, down):
        other.grad = -param.grad
    Lion(up, maximize=True).step()
    Lion(down).step()
    assert_same(up, down)


def lamb_reference(
    starts: list[torch.Tensor], history: list[list[torch.Tensor]], **settings: Any
) -> list[torch.Tensor]:
    lr, (beta1, beta2), eps = settings["lr"], settings["betas"], settings["eps"]
    weights = [start.double().flatten().tolist() for start in starts]
    means = [[0.0] * len(each) for each in weights]
    squares = [[0.0] * len(each) for each in weights]
    for step in range(len(history[0])):
        grads = [each[step].double().flatten().tolist() for each in history]
        total = math.sqrt(sum(g * g for each in grads for g in each))
        limit = settings["max_grad_norm"]
        scale = min(1.0, limit / total) if limit else 1.0
        correct1 = 1 - beta1 ** (step + 1) if settings["bias_correction"] else 1.0
        correct2 = 1 - beta2 ** (step + 1) if settings["bias_correction"] else 1.0
        for w, m, v, grad in zip(weights, means, squares, grads):
            update = []
            for at, g in enumerate(grad):
                m[at] = beta1 * m[at] + (1 - beta1) * g * scale
                v[at] = beta2 * v[at] + (1 - beta2) * (g * scale) ** 2
                mean, square = m[at] / correct1, v[at] / correct2
                below = math.sqrt(square + eps) if settings["eps_inside_sqrt"] else math.sqrt(square) + eps
                update.append(mean / below + settings["weight_decay"] * w[at])
            norm_w, norm_u = math.hypot(*w), math.hypot(*update)
            ratio = 1.0
            if norm_w > 0 and norm_u > 0:
                ratio = min(settings["max_coeff"], max(settings["min_coeff"], norm_w / norm_u))
            w[:] = [each - lr * ratio * u for each, u in zip(w, update)]
    return [torch.tensor(w, dtype=start.dtype).view_as(start) for w, start in zip(weights, starts)]


LAMB = {
    "lr": 0.05,
    "betas": (0.8, 0.9),
    "eps": 1e-3,
    "weight_decay": 0.1,
    "bias_correction": True,
    "eps_inside_sqrt": False,
    "max_grad_norm": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"bias_correction": False},
        {"eps_inside_sqrt": True},
        {"weight_decay": 0.0},
        {"max_grad_norm": 0.5},
        {"max_grad_norm": 1000.0},
        {"max_coeff": 0.6},
        {"min_coeff": 2.0},
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_lamb(change: dict[str, Any], zero: bool) -> None:
    params = parameters(dtype=torch.float64)
    if zero:
        with torch.no_grad():
            params[0].zero_()
    starts = [param.detach().clone() for param in params]
    settings: dict[str, Any] = {**LAMB, **change}
    optimizer = Lamb(params, **settings)
    history: list[list[torch.Tensor]] = [[] for _ in params]
    for step in range(5):
        set_grads(params, step)
        if zero and step == 0:
            params[1].grad = torch.zeros_like(params[1])
        for grads, param in zip(history, params):
            grads.append(param.grad)
        optimizer.step()
    assert_same(params, lamb_reference(starts, history, **settings))


@pytest.mark.parametrize("kind", [Lion, Lamb])
def test_state_round_trip_continues_the_run(kind: type[torch.optim.Optimizer]) -> None:
    whole, part = parameters(), parameters()
    first, second = kind(whole, lr=0.01), kind(part, lr=0.01)
    run(first, whole, 3)
    run(second, part, 3)
    resumed = kind(part, lr=0.5)
    resumed.load_state_dict(second.state_dict())
    run(first, whole, 4)
    run(resumed, part, 4)
    assert_same(part, whole)


@pytest.mark.parametrize("kind", [Lion, Lamb])
def test_closures_and_missing_gradients(kind: type[torch.optim.Optimizer]) -> None:
    params = parameters()
    start = params[1].detach().clone()
    optimizer = kind(params, lr=0.01)

    def closure() -> float:
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss.item()

    expected = (params[0] ** 2).sum().item()
    assert optimizer.step(closure) == expected
    assert torch.equal(params[1], start)
    assert params[1] not in optimizer.state


@pytest.mark.parametrize("kind", [Lion, Lamb])
def test_bfloat16_parameters_learn(kind: type[torch.optim.Optimizer]) -> None:
    param = torch.nn.Parameter(torch.full((8,), 4.0, dtype=torch.bfloat16))
    optimizer = kind([param], lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        (param**2).sum().backward()
        optimizer.step()
    assert param.abs().max() < 2.0
    assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16
