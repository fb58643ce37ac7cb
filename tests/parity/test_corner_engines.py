"""Corners of several engines in one process, as adversarial training and distillation have them.

Where the original was silently wrong: a loss through two engines whose gradients carry the scale of one, and
gradients of a generator's loss that stay in the discriminator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parity.corner_engines import (
    Setting,
    adversaries,
    adversaries_reference,
    joint,
    joint_reference,
    one_rests,
    one_rests_reference,
)
from parity.problem import distance
from testing import RankPool

PAIRS = [
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("fp16 x 128", "fp16 x 1024"),
    ("fp16 x 1024", "fp32"),
    ("fp32", "fp16 x 1024"),
    ("bf16", "fp16 x 128"),
]


def tolerance(*precisions: str) -> float:
    """Against fp32 throughout: a wrong scale is a factor of 8 at least."""
    return 1e-6 if set(precisions) == {"fp32"} else 5e-2 if "bf16" in precisions else 1e-2


def backwards(*engines: str) -> list[Any]:
    """Pairs, and whose backward runs."""
    return [
        pytest.param(pair, backward, id=f"{' with '.join(pair)}, {backward}")
        for pair in PAIRS
        for backward in ("plain", *engines)
    ]


@pytest.mark.parametrize(("pair", "backward"), backwards("first", "second"))
def test_loss_through_two_engines(
    ranks: Callable[[int], RankPool], report: Callable[..., None], pair: tuple[str, str], backward: str
) -> None:
    """Both learn their own gradient, whoever runs backward and whatever each one's loss scale."""
    settings = [Setting(*pair, stage, backward) for stage in (0, 1, 2, 3)]
    gradients, weights = joint_reference("spanning", 2)
    worst = [0.0, 0.0]
    for found in ranks(2).run(joint, "spanning", settings):
        for setting, (ours, final) in zip(settings, found):
            far = [max(distance(a[n], b[n]) for n in b) for a, b in ((ours, gradients), (final, weights))]
            assert max(far) <= tolerance(*pair), f"{setting}: gradients, weights differ by {far}"
            worst = list(map(max, worst, far))
    report(f"one loss, {' with '.join(pair)}, {backward}", 2, 3, None, *worst)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("pair", "backward"), backwards("engines"))
def test_adversaries(
    ranks: Callable[[int], RankPool], report: Callable[..., None], pair: tuple[str, str], backward: str, world: int
) -> None:
    """torch's GAN tutorial: two backwards for the discriminator, then one through it for the generator."""
    settings = [Setting(*pair, stage, backward) for stage in (0, 1, 2, 3)]
    theirs = adversaries_reference(world)
    worst = 0.0
    for found in ranks(world).run(adversaries, settings):
        for setting, ours in zip(settings, found):
            far = max(distance(ours[n], w) for n, w in theirs.items())
            assert far <= tolerance(*pair), f"{setting}: weights differ by {far}"
            worst = max(worst, far)
    report(f"GAN, {' with '.join(pair)}, {backward}", world, 3, None, None, worst)


@pytest.mark.parametrize("backward", ["plain", "first", "second"])
@pytest.mark.parametrize("kind", ["in turn", "skipping"])
def test_engines_used_differently_by_rank(
    ranks: Callable[[int], RankPool], report: Callable[..., None], kind: str, backward: str
) -> None:
    """Two engines of one shape, called in another order or left out on some ranks: gradients stay their own.

    (Sharded parameters are gathered by all ranks together, so stage 3 can't have it.)
    """
    gradients, weights = joint_reference(kind, 2)
    settings = [Setting(stage=stage, backward=backward) for stage in (0, 1, 2)]
    worst = [0.0, 0.0]
    for found in ranks(2).run(joint, kind, settings):
        for setting, (ours, final) in zip(settings, found):
            far = [max(distance(a[n], b[n]) for n in b) for a, b in ((ours, gradients), (final, weights))]
            assert max(far) <= 1e-6, f"{setting}: gradients, weights differ by {far}"
            worst = list(map(max, worst, far))
    report(f"two engines {kind}, {backward}", 2, 3, None, *worst)


@pytest.mark.parametrize("backward", ["plain", "engine"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_without_a_backward(ranks: Callable[[int], RankPool], stage: int, backward: str) -> None:
    """Beside another engine, too, it counts as a gradient of zero."""
    theirs = one_rests_reference(2)
    for ours in ranks(2).run(one_rests, Setting(stage=stage, backward=backward)):
        assert max(distance(ours[n], w) for n, w in theirs.items()) <= 1e-6
