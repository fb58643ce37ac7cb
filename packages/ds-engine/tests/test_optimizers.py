"""Every optimizer by its name, Adam's modes, fused kernels, and which states may be cut."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.optim_lamb import Lamb
from ds_engine.optim_lion import Lion
from ds_engine.optimizers import build_optimizer, elementwise
from testing.optimizers import assert_same, parameters, run

TORCH_NAMES = sorted(
    name
    for name, each in vars(torch.optim).items()
    if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
)
ELEMENTWISE = {
    *(
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adadelta",
        "Adagrad",
        "Rprop",
        "ASGD",
        "Lion",
    )
}
ADAMS = ["Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "CPUAdam"]


# By name


@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if name not in ("LBFGS", "SparseAdam")])
@pytest.mark.parametrize("case", [str, str.lower, str.upper])
def test_every_torch_optimizer_builds_and_steps(name: str, case: Any) -> None:
    params, before = parameters(), parameters()
    optimizer = build_optimizer(case(name), iter(params), {"lr": 0.01})
    # The documented Adam is AdamW's mathematics.
    assert type(optimizer) is getattr(torch.optim, "AdamW" if name == "Adam" else name)
    run(optimizer, params, 1)
    assert all(not torch.equal(after, start) for after, start in zip(params, before))


def test_sparse_adam_builds_and_steps() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    start = embedding.weight.detach().clone()
    optimizer = build_optimizer("SparseAdam", embedding.parameters(), {"lr": 0.01})
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert (embedding.weight != start).any(dim=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("name", "kind"), [("Lion", Lion), ("lamb", Lamb), ("FusedLamb", Lamb), ("fusedlamb", Lamb)])
def test_own_optimizers_by_name(name: str, kind: type) -> None:
    assert type(build_optimizer(name, parameters(), {"lr": 0.01})) is kind


def test_groups_keep_their_settings_and_are_not_written_to() -> None:
    first, second = parameters()
    groups: list[dict[str, Any]] = [{"params": iter([first]), "lr": 0.5}, {"params": second}]
    optimizer = build_optimizer("AdamW", groups, {"lr": 0.1})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert optimizer.param_groups[0]["params"][0] is first
    assert sorted(groups[0]) == ["lr", "params"]


# Adam's modes


@pytest.mark.parametrize("name", ADAMS)
def test_the_documented_adam_decouples_its_weight_decay(name: str) -> None:
    ours, theirs = parameters(), parameters()
    run(build_optimizer(name, ours, {"lr": 0.01, "weight_decay": 0.3}), ours)
    run(torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.3), theirs)
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", [name for name in ADAMS if name != "AdamW"])
@pytest.mark.parametrize("switch", ["adam_w_mode", "adamw_mode"])
def test_adam_w_mode_false_adds_the_decay_to_the_gradient(name: str, switch: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = build_optimizer(name, ours, {"lr": 0.01, "weight_decay": 0.3, switch: False})
    run(optimizer, ours)
    run(torch.optim.Adam(theirs, lr=0.01, weight_decay=0.3), theirs)
    assert type(optimizer) is torch.optim.Adam
    assert_same(ours, theirs)


def test_default_weight_decay_of_adams() -> None:
    def decay(name: str, **params: Any) -> float:
        return build_optimizer(name, parameters(), params).defaults["weight_decay"]

    assert [decay(name) for name in ADAMS] == [0.0] * 5
    assert decay("Adam", torch_adam=True) == decay("AdamW", torch_adam=True) == 0.01
    assert decay("Adam", torch_adam=True, adam_w_mode=False) == 0


def test_switches_that_torch_s_adam_has_not_are_taken_at_their_default_only() -> None:
    defaults = {"set_grad_none": True, "fp32_optimizer_states": True}
    build_optimizer("Adam", parameters(), {"bias_correction": True} | defaults)
    for switch in defaults:
        with pytest.raises(ValueError, match=f"{switch} is true for Adam in this version, got false"):
            build_optimizer("Adam", parameters(), {switch: False})
    with pytest.raises(ValueError, match="adam_w_mode is true for AdamW"):
        build_optimizer("AdamW", parameters(), {"adam_w_mode": False})


# Adam without bias correction


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction_is_torch_s_adam_after_endless_steps(decoupled: bool) -> None:
    """torch's corrections tend to 1 with the number of steps, so torch with a huge count is the reference."""
    values = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
    ours, theirs = parameters(), parameters()
    mine = build_optimizer("Adam", ours, values | {"bias_correction": False, "adam_w_mode": decoupled})
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind(theirs, foreach=False, **values)
    for step in range(5):
        for one, other in zip(ours, theirs):
            one.grad = torch.sin(torch.arange(one.numel()) + step).view_as(one).to(one.dtype)
            other.grad = one.grad.clone()
            state = reference.state[other]
            state.setdefault("exp_avg", torch.zeros_like(other))
            state.setdefault("exp_avg_sq", torch.zeros_like(other))
            state["step"] = torch.tensor(1e6)
        mine.step()
        reference.step()
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert elementwise(mine)


def test_adam_without_bias_correction_refuses_what_it_lacks() -> None:
    with pytest.raises(ValueError, match=r"without bias correction takes .*got 'amsgrad'"):
        build_optimizer("Adam", parameters(), {"bias_correction": False, "amsgrad": True})


# The fused kernels


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_kernels_are_used_where_torch_has_them(name: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = build_optimizer(name, ours, {"lr": 0.01})
    assert optimizer.defaults["fused"] is True
    run(optimizer, ours)
    run(build_optimizer(name, theirs, {"lr": 0.01, "fused": False}), theirs)
    assert_same(ours, theirs)


@pytest.mark.parametrize("asked", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_the_users_choice_of_a_kernel_stands(asked: dict[str, bool]) -> None:
    assert not build_optimizer("AdamW", parameters(), asked).defaults["fused"]
    group = {"params": parameters(), **asked}
    assert not build_optimizer("AdamW", [group], {}).param_groups[0]["fused"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fused_kernels_in_other_dtypes_step(dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    run(build_optimizer("AdamW", params, {"lr": 0.01}), params)
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize(
    "params",
    [
        [torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))],
        [torch.nn.Parameter(torch.ones(2, device="meta"))],
    ],
)
def test_what_torch_can_t_fuse_falls_back(params: list[torch.nn.Parameter]) -> None:
    optimizer = build_optimizer("AdamW", params, {"lr": 0.01})
    assert not optimizer.defaults["fused"]
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()


def test_named_parameters_are_taken() -> None:
    model = torch.nn.Linear(2, 2)
    assert build_optimizer("AdamW", model.named_parameters(), {}).defaults["fused"] is True


# Errors


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdamWW", {}, "did you mean 'AdamW'"),
        ("Lamp", {}, "did you mean 'Lamb'"),
        ("OneBitAdam", {}, "OneBitAdam is not available in this version: use Adam"),
        ("onebitlamb", {}, "OneBitLamb is not available in this version: use Lamb"),
        ("ZeroOneAdam", {}, "ZeroOneAdam is not available in this version"),
        ("LBFGS", {}, "needs a closure"),
        ("Adam", {"weight_decy": 0.1}, "did you mean 'weight_decay'"),
        ("Adam", {"adam_wmode": False}, "did you mean 'adam_w_mode'"),
        ("SGD", {"betas": [0.9, 0.99]}, "optimizer SGD takes lr, momentum"),
        ("Lion", {"eps": 1e-8}, "optimizer Lion takes lr, betas, weight_decay"),
        ("Lamb", {"max_coef": 1}, "did you mean 'max_coeff'"),
        ("Lamb", {"amsgrad": True}, "amsgrad is false for LAMB"),
        ("Lamb", {"max_coeff": 0.1, "min_coeff": 0.5}, "max_coeff is at least min_coeff"),
        ("Lamb", {"lr": -1.0}, "lr is at least 0, got -1.0"),
        ("Lion", {"betas": [0.9, 1.0]}, "betas are two numbers"),
        ("Lion", {"weight_decay": math.nan}, "weight_decay is at least 0"),
    ],
)
def test_errors_name_the_rule_and_the_mend(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(name, parameters(), params)


@pytest.mark.parametrize("kind", [Lion, Lamb])
def test_sparse_gradients_are_refused(kind: type[torch.optim.Optimizer]) -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients"):
        kind(embedding.parameters(), lr=0.1).step()


# What may be cut


@pytest.mark.parametrize("name", [name for name in TORCH_NAMES if name != "LBFGS"] + ["Lion", "Lamb"])
def test_elementwise_of_known_classes(name: str) -> None:
    assert elementwise(build_optimizer(name, parameters(), {})) is (name in ELEMENTWISE)


def test_elementwise_of_lbfgs() -> None:
    assert elementwise(torch.optim.LBFGS(parameters())) is False


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
@given(cut=st.integers(1, 11))
def test_an_elementwise_update_may_be_cut_anywhere(name: str, cut: int) -> None:
    start = torch.randn(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = torch.nn.Parameter(start.clone())
    parts = [torch.nn.Parameter(part.clone()) for part in (start[:cut], start[cut:])]
    one = build_optimizer(name, [whole], {"lr": 0.01})
    two = build_optimizer(name, parts, {"lr": 0.01})
    for step in range(3):
        grad = torch.randn(12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        whole.grad, parts[0].grad, parts[1].grad = grad, grad[:cut].clone(), grad[cut:].clone()
        one.step()
        two.step()
    torch.testing.assert_close(torch.cat([part.detach() for part in parts]), whole.detach())


def test_a_subclass_with_the_same_update_is_elementwise() -> None:
    class Renamed(torch.optim.RMSprop):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.5)

    assert elementwise(Renamed(parameters())) is True
    # torch wraps `step` in the first instance's class, which must not look like an override.
    assert elementwise(torch.optim.RMSprop(parameters())) is True
    assert elementwise(Renamed(parameters())) is True


def test_a_subclass_with_an_update_of_its_own_is_unknown() -> None:
    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert elementwise(Clipped(parameters())) is False


def test_a_client_class_is_unknown_until_it_declares_itself() -> None:
    class Client(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            return None

    class Declared(Client):
        elementwise = True

    class Denied(torch.optim.SGD):
        elementwise = False

    assert elementwise(Client(parameters())) is False
    assert elementwise(Declared(parameters())) is True
    assert elementwise(Denied(parameters())) is False
