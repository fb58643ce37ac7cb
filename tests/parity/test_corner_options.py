"""Corners of the configuration: every optimizer by its name, every option that moves gradients, mixed dtypes.

Where the original was silently wrong: optimizers that must see whole parameters run on flat shards, options
that change what is summed and divided, models of several dtypes cast to one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ds_engine
import ds_zero
from ds_engine.optim_lamb import Lamb
from parity import runs
from parity.corners import ADAM, Adapted
from parity.problem import (
    STEPS,
    VOCABULARY,
    WIDTH,
    Batch,
    Outcome,
    Problem,
    batches,
    distance,
    engine_config,
    plain_loss,
    reference,
)
from parity.test_matrix import TINY, distances
from testing import RankPool


class Matrices(nn.Module):
    """Only matrices, as Muon wants them; one is smaller than the ranks are many."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(VOCABULARY, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.mix = nn.Parameter(torch.ones(1, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, VOCABULARY).float().mean(1)
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.mix.sum()


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    "SGD, plain": ("SGD", {"lr": 0.05}),
    "Adam": ("Adam", {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.02}),
    "AdamW": ("AdamW", {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.02, "amsgrad": True}),
    "Adamax": ("Adamax", {"lr": 1e-2, "eps": 1e-2}),
    "NAdam": ("NAdam", {"lr": 1e-2, "eps": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.02}),
    "RAdam": ("RAdam", {"lr": 1e-2, "eps": 1e-2}),
    "RMSprop": ("RMSprop", {"lr": 1e-3, "eps": 1e-2, "momentum": 0.9, "centered": True}),
    "Adadelta": ("Adadelta", {"lr": 0.5, "eps": 1e-3}),
    "Adagrad": ("Adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    # Rprop looks at signs alone: where a gradient is rounding around zero, nobody's answer is the right one.
    "Rprop": ("Rprop", {"lr": 1e-3}),
    "ASGD": ("ASGD", {"lr": 1e-2, "t0": 2.0}),
    "Adafactor": ("Adafactor", {"lr": 1e-2}),
    "Muon": ("Muon", {"lr": 1e-2, "weight_decay": 0.02}),
    "Lamb": ("Lamb", {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.02}),
    "Lamb, limited": ("Lamb", {"lr": 1e-2, "eps": 1e-2, "max_grad_norm": 0.01}),
}
LOOSE = {"Muon": 1e-3}  # it orthogonalises in bf16


@dataclass(frozen=True)
class Named:
    """A run with the optimizer that the configuration names."""

    problem: Problem
    name: str
    arguments: dict[str, Any]
    accumulation: int
    zero: dict[str, Any]


def by_name(jobs: list[Named]) -> list[dict[str, torch.Tensor]]:
    """On a rank: the final weights of each."""
    return [_by_name(job) for job in jobs]


def _by_name(job: Named) -> dict[str, torch.Tensor]:
    model = job.problem.make()
    arguments = {**job.arguments, **({"adam_w_mode": False} if job.name == "Adam" else {})}
    config = engine_config(job.problem, "fp32", job.accumulation, 0.0, **job.zero)
    config["optimizer"] = {"type": job.name, "params": arguments}
    engine, *_ = ds_engine.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(STEPS):
        for batch in batches(engine.world_size, job.accumulation, step)[engine.global_rank]:
            engine.backward(plain_loss(engine, model, batch))
            engine.step()
    weights = {n: ds_zero.safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    engine.destroy()
    return weights


def test_every_optimizer_is_here() -> None:
    """A class that torch adds wants a row of its own; LBFGS and SparseAdam are refused elsewhere."""
    classes = {n for n, k in vars(torch.optim).items() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)}
    assert classes - {"Optimizer", "LBFGS", "SparseAdam"} == {n for n, _ in OPTIMIZERS.values()} - {"Lamb"}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizer(
    ranks: Callable[[int], RankPool],
    report: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    world: int,
) -> None:
    """Named in the configuration, at every stage, whole or cut: what the class itself does to the weights."""
    monkeypatch.setattr(torch.optim, "Lamb", Lamb, raising=False)
    name, arguments = OPTIMIZERS[case]
    problem = Problem(model=Matrices, optimizer=name, arguments=arguments)
    zero = {"reduce_bucket_size": TINY}
    jobs = [Named(problem, name, arguments, 1 + stage, {**zero, "stage": stage}) for stage in (0, 1, 2, 3)]
    jobs.append(Named(problem, name, arguments, 1, {"stage": 2, "round_robin_gradients": True}))
    by_rank = ranks(world).run(by_name, jobs)
    worst = 0.0
    for index, job in enumerate(jobs):
        theirs = reference(problem, world, job.accumulation, 0.0, "fp32")
        for weights in by_rank:
            far = max(distance(weights[index][n], w) for n, w in theirs.weights.items())
            worst = max(worst, far)
            assert far <= LOOSE.get(case, 1e-6), f"{job.zero}, accumulation {job.accumulation}: {far}"
    report(case, world, len(jobs), None, None, worst)


USUAL = Problem(arguments=ADAM)


@dataclass(frozen=True)
class Option:
    """Settings, and the problem whose plain solution they are to leave."""

    zero: dict[str, Any]
    more: dict[str, Any]
    problem: Problem = USUAL
    precision: str = "fp32"
    tolerance: float = 1e-6


def times(factor: float, call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """The usual loss, larger."""
    return plain_loss(call, module, batch) * factor


def in_autocast(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """The forward pass in torch.autocast; the engine does it by itself."""
    with torch.autocast("cpu", torch.bfloat16, enabled=call is module):
        out = call(batch.tokens)
    return nn.functional.mse_loss(out.float(), batch.targets)


BF16 = {"bf16": {"enabled": True}}
OPTIONS: dict[str, Option] = {
    "round_robin_gradients": Option({"round_robin_gradients": True}, {}),
    "contiguous_gradients off": Option({"contiguous_gradients": False}, {}),
    "reduce_scatter off": Option({"reduce_scatter": False}, {}),
    "allgather_partitions off": Option({"allgather_partitions": False, "round_robin_gradients": True}, {}),
    "communication fp32": Option({}, {"communication_data_type": "fp32", **BF16}, precision="bf16", tolerance=3e-2),
    "communication bf16": Option({}, {"communication_data_type": "bf16"}, tolerance=3e-2),
    "communication fp16": Option({"reduce_scatter": False}, {"communication_data_type": "fp16"}, tolerance=4e-3),
    "prescale_gradients": Option({}, {"prescale_gradients": True}),
    "prescale, predivide": Option({}, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
    "predivide": Option({"reduce_scatter": False}, {"gradient_predivide_factor": 3.0}),
    "accumulate in fp32": Option(
        {}, {"data_types": {"grad_accum_dtype": "fp32"}, **BF16}, precision="bf16", tolerance=1e-2
    ),
    "accumulate in bf16": Option({}, {"data_types": {"grad_accum_dtype": "bf16"}}, tolerance=3e-2),
    "torch_autocast": Option(
        {}, {"torch_autocast": {"enabled": True}}, Problem(loss=in_autocast, arguments=ADAM), tolerance=2e-2
    ),
    "torch_autocast fp16": Option(  # without its loss scale most gradients of so small a loss are zero in float16
        {},
        {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale": 2.0**20}},
        Problem(loss=partial(times, 1e-6), arguments=ADAM),
        tolerance=2e-3,
    ),
    "no masters": Option(
        {},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        precision="bf16",
        tolerance=5e-2,
    ),
}  # fmt: skip


def _clipped(ours: Outcome, theirs: Outcome, tolerance: float, where: str) -> tuple[float, float, float]:
    found = distances(ours, theirs)
    assert max(found) <= tolerance, f"{where}: losses, gradients, weights differ by {found}"
    assert ours.norm == pytest.approx(theirs.norm, rel=max(1e-6, tolerance)), where
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(ranks: Callable[[int], RankPool], report: Callable[..., None], name: str, world: int) -> None:
    """Options that only move gradients otherwise leave them, and the clipping, as they are."""
    option = OPTIONS[name]
    stages = (0, 1, 2, 3) if world == 2 else (2, 3)
    cells = [
        (option.problem, option.precision, 4, 0.05, {"stage": s, "overlap_comm": True, **option.zero}, option.more)
        for s in stages
    ]
    by_rank = ranks(world).run(runs.many, cells)
    theirs = reference(option.problem, world, 4, 0.05, option.precision)
    worst = (0.0, 0.0, 0.0)
    for stage, ours in zip(stages, by_rank[0]):
        worst = tuple(map(max, worst, _clipped(ours, theirs, option.tolerance, f"stage {stage}")))  # type: ignore[assignment]
    report(name, world, len(cells), *worst)


@pytest.mark.parametrize("prescale", [False, True])
def test_sum_over_ranks(ranks: Callable[[int], RankPool], prescale: bool) -> None:
    """gradient_allreduce_op sum: the gradients of an average, times the ranks."""
    more = {"gradient_allreduce_op": "sum", "prescale_gradients": prescale}
    problem = Problem(arguments=ADAM)
    cells = [(problem, "fp32", 4, 0.0, {"stage": stage}, more) for stage in (0, 1, 2, 3)]
    theirs = reference(replace(problem, loss=partial(times, 2.0)), 2, 4, 0.0, "fp32")
    for ours in ranks(2).run(runs.many, cells)[0]:
        _clipped(replace(ours, losses=theirs.losses), theirs, 1e-6, "sum")


ADAPTED: dict[str, tuple[bool, float]] = {
    # Ours and the reference see the same frozen base; one that trains is held to the same model in fp32.
    "a frozen bf16 base": (True, 1e-6),
    "a bf16 base that trains": (False, 4e-2),
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ADAPTED)
def test_mixed_dtypes(ranks: Callable[[int], RankPool], report: Callable[..., None], name: str, world: int) -> None:
    """Under bf16.enabled fp32 adapters stay fp32, and a bf16 base has fp32 masters if it trains."""
    frozen, tolerance = ADAPTED[name]
    dtype = torch.bfloat16
    problem = Problem(model=partial(Adapted, dtype, frozen), arguments=ADAM)
    cells = [(problem, "fp32", 4, 0.0, {"stage": s, "reduce_bucket_size": TINY}, BF16) for s in (0, 1, 2, 3)]
    solved = reference(
        Problem(model=partial(Adapted, dtype if frozen else torch.float32, frozen), arguments=ADAM),
        world, 4, 0.0, "fp32",
    )  # fmt: skip
    theirs = replace(solved, weights={n: w.float() for n, w in solved.weights.items()})
    worst = (0.0, 0.0, 0.0)
    for ours in ranks(world).run(runs.many, cells)[0]:
        worst = tuple(map(max, worst, _clipped(ours, theirs, tolerance, name)))  # type: ignore[assignment]
    report(name, world, len(cells), *worst)
