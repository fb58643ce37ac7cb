"""Corners of calling an engine: no_sync, boundaries by hand, several backwards, failures, plain backward.

Where the original was silently wrong: gradients of a second backward lost or counted twice, no_sync refused
or ignored by stage, gradients left over from a backward that failed, fp16 losses that miss the scale because
they do not pass through the engine's outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from parity.corner_calls import MICROS, WAYS, Job, equivalent, trained_all
from parity.corners import weight_loss
from parity.problem import Batch, Outcome, Small, distance, plain_loss, reference
from parity.test_matrix import DEFAULT, TINY
from testing import RankError, RankPool

ENGINE_ONLY = {"divided by hand"}
# What one rank alone does behind the engine's back may be refused, with an error and not by waiting.
BY_HAND = "by hand on one rank"
ALONE = {"loss elsewhere": True, BY_HAND: False}


@cache
def expected(way: str, world: int) -> Outcome:
    return reference(equivalent(way), world, MICROS, 0.0, "fp32")


def zeros(stage: int) -> dict[str, Any]:
    bucket = TINY if stage != 1 else DEFAULT
    return {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "overlap_comm": True}


def hold(outcome: Outcome, theirs: Outcome, tolerance: float, where: str) -> tuple[float, float]:
    """Asserts that gradients and weights agree, and the norm; how far they differ."""
    worst = []
    for kind, ours, plain in (
        ("gradients", outcome.gradients, theirs.gradients),
        ("weights", outcome.weights, theirs.weights),
    ):
        far = {n: distance(ours[n], value) for n, value in plain.items()}
        blame = max(far, key=far.__getitem__)
        assert far[blame] <= tolerance, f"{where}: {kind} differ by {far[blame]}, most in {blame}"
        worst.append(far[blame])
    assert outcome.norm == pytest.approx(theirs.norm, rel=max(1e-6, tolerance)), where
    return worst[0], worst[1]


BY_RANK = {"no_sync, uneven", "loss elsewhere"}
"""Ranks run the model a different number of times, which stage 3 refuses: all gather its parameters together."""


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("way", [way for way in WAYS if way != BY_HAND])
def test_way(ranks: Callable[[int], RankPool], report: Callable[..., None], way: str, world: int) -> None:
    """Each way at every stage, by engine.backward and by loss.backward, is what plain PyTorch makes of it."""
    stages = [0, 1, 2, 3] if world == 2 else [2, 3]
    if world > 1 and way in BY_RANK:
        stages.remove(3)
    forms = [False] if way in ENGINE_ONLY | ALONE.keys() else [False, True]
    jobs = [Job(way, zeros(stage), plain) for stage in stages for plain in forms]
    by_rank = ranks(world).run(trained_all, jobs)
    worst = (0.0, 0.0)
    for index, job in enumerate(jobs):
        where = f"{job.zero}, {'loss' if job.plain else 'engine'}.backward"
        for outcomes in by_rank:
            worst = tuple(map(max, worst, hold(outcomes[index], expected(way, world), 1e-6, where)))  # type: ignore[assignment]
    report(way, world, len(jobs), None, *worst)


# What is refused costs a new pool.
@pytest.mark.parametrize(("way", "stages"), [("loss elsewhere", (0, 1)), ("loss elsewhere", (2,)), (BY_HAND, (1,))])
def test_one_rank_alone(ranks: Callable[[int], RankPool], way: str, stages: tuple[int, ...]) -> None:
    """A plain backward that touches no parameter of the engine, or `.grad` written, on one rank only.

    Right, or every rank is refused within seconds.
    """
    try:
        by_rank = ranks(2).run(trained_all, [Job(way, zeros(s), plain=ALONE[way]) for s in stages])
    except RankError as error:
        assert error.types.keys() == {0, 1}, error
        assert set(error.types.values()) <= {"CommError", "ZeroError", "EngineError"}, error
        return
    for outcomes in by_rank:
        for stage, outcome in zip(stages, outcomes):
            hold(outcome, expected(way, 2), 1e-6, f"stage {stage}")


@dataclass
class Answer:
    """An output type that torch's pytree does not know."""

    scores: torch.Tensor


class Answering(Small):
    """Gives its output in an object, and keeps an auxiliary loss as an attribute, as mixtures of experts do."""

    def forward(self, tokens: torch.Tensor) -> Any:  # type: ignore[override]
        self.auxiliary = self.embedding(tokens).float().pow(2).mean()
        return Answer(super().forward(tokens))


def answer_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """Of the object."""
    return nn.functional.mse_loss(call(batch.tokens).scores.float(), batch.targets)


def auxiliary_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """Of the object, and the attribute: gradients enter in the middle of the model."""
    return answer_loss(call, module, batch) + 0.3 * module.auxiliary  # type: ignore[operator]


def submodule_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """Past the engine's forward: its parts called one by one."""
    return plain_loss(module, module, batch)


ENTRIES: dict[str, tuple[str, Any, Any]] = {
    "outputs": ("usual", plain_loss, None),
    "evaluation mode": ("evaluation mode", plain_loss, None),
    "weights": ("usual", weight_loss, None),
    "an object": ("usual", answer_loss, Answering),
    "an attribute": ("usual", auxiliary_loss, Answering),
    "the module itself": ("usual", submodule_loss, None),
    "after a failure": ("after a failure", plain_loss, None),
    "gradients by hand": ("gradients by hand", plain_loss, None),
}


FP16 = {"fp16": {"enabled": True, "loss_scale": 1024.0}}


@pytest.mark.parametrize("by_hand", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_fp16_scale(ranks: Callable[[int], RankPool], report: Callable[..., None], entry: str, by_hand: bool) -> None:
    """However a gradient enters an fp16 model, it is unscaled by what it was scaled by; a plain backward by nothing.

    Steps are in proportion to gradients here, so a missing factor of 1024 shows.
    """
    way, loss, model = ENTRIES[entry]
    jobs = [Job(way, zeros(stage), by_hand, loss, model, "fp16", FP16) for stage in (0, 1, 2, 3)]
    by_rank = ranks(2).run(trained_all, jobs)
    theirs = reference(equivalent(way, loss, model), 2, MICROS, 0.0, "fp16")
    far = [hold(outcome, theirs, 4e-3, entry) for outcomes in by_rank for outcome in outcomes]
    what = f"fp16 through {entry}{', plain' if by_hand else ''}"
    report(what, 2, len(jobs), None, max(g for g, _ in far), max(w for _, w in far))


def test_fp16_with_a_scale_of_one_is_any_other_backward(ranks: Callable[[int], RankPool]) -> None:
    job = Job("usual", zeros(2), True, precision="fp16", more={"fp16": {"enabled": True, "loss_scale": 1.0}})
    theirs = reference(equivalent("usual"), 2, MICROS, 0.0, "fp16")
    for (outcome,) in ranks(2).run(trained_all, [job]):
        hold(outcome, theirs, 4e-3, "scale 1")
