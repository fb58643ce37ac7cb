"""The problem of the parity tests: a small model, its data, and what plain PyTorch makes of them.

The reference is one process: every rank's and every micro-batch's gradient, summed in fp32, averaged,
clipped by torch, applied by torch's own optimizer to fp32 masters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH, VOCABULARY, STEPS, SAMPLES = 24, 40, 4, 3


class Small(nn.Module):
    """Embedding, two residual layers with LayerNorm, and a head: 3.9 thousand parameters of many shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 19), nn.GELU(), nn.Linear(19, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


def nothing(module: nn.Module, step: int) -> None:
    """Before a step: leave the model as it is."""


def one_group(module: nn.Module) -> list[Any]:
    """All parameters in one optimizer group."""
    return list(module.parameters())


Loss = Callable[[Any, nn.Module, "Batch"], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: tokens [SAMPLES, 5], targets [SAMPLES, 7]; who sees it, and when."""

    tokens: torch.Tensor
    targets: torch.Tensor
    rank: int
    step: int
    micro: int


def plain_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """The usual one. `call` is the engine (or the model), `module` the model itself."""
    return F.mse_loss(call(batch.tokens).float(), batch.targets)


@dataclass(frozen=True)
class Problem:
    """A model, a loss and an optimizer, small enough to solve hundreds of times.

    Args:
        model: makes the model, the same at every call.
        loss: of one micro-batch.
        optimizer: name in torch.optim, and its arguments.
        before_step: what is done to the model before a step, as unfreezing.
    """

    model: Callable[[], nn.Module] = Small
    loss: Loss = plain_loss
    optimizer: str = "AdamW"
    arguments: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01})
    before_step: Callable[[nn.Module, int], None] = nothing
    groups: Callable[[nn.Module], list[Any]] = one_group

    def make(self) -> nn.Module:
        """The model, with the same values every time."""
        torch.manual_seed(7)
        return self.model()


def batches(world: int, accumulation: int, step: int) -> list[list[Batch]]:
    """By rank and micro-batch; the same for every run."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (world, accumulation, SAMPLES, 5), generator=generator)
    targets = torch.randn(world, accumulation, SAMPLES, 7, generator=generator)
    return [[Batch(tokens[r, m], targets[r, m], r, step, m) for m in range(accumulation)] for r in range(world)]


@dataclass
class Outcome:
    """What a run leaves: mean loss a step, the last step's averaged gradients before clipping, final weights."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]
    norm: float


def reference(problem: Problem, world: int, accumulation: int, clip: float, precision: str) -> Outcome:
    """Plain PyTorch in one process."""
    dtype = DTYPES[precision]
    master = problem.make()
    model = copy.deepcopy(master)
    if precision != "fp32":
        model = model.to(dtype)
    optimizer = getattr(torch.optim, problem.optimizer)(problem.groups(master), **problem.arguments)
    losses, gradients, norm = [], {}, 0.0
    for step in range(STEPS):
        problem.before_step(model, step)
        problem.before_step(master, step)
        with torch.no_grad():
            for low, high in zip(model.parameters(), master.parameters()):
                low.copy_(high)
        sums: dict[str, torch.Tensor] = {}
        total = 0.0
        for rank in batches(world, accumulation, step):
            for batch in rank:
                model.zero_grad()
                loss = problem.loss(model, model, batch)
                total += float(loss.detach()) / (world * accumulation)
                loss.backward()
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                        sums[name] = sums.get(name, 0.0) + grad.float()  # type: ignore[assignment]
        for name, parameter in master.named_parameters():
            parameter.grad = sums[name] / (world * accumulation) if name in sums else None
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in master.named_parameters()}
        used = [p for p in master.parameters() if p.grad is not None]
        norm = float(nn.utils.clip_grad_norm_(used, clip if clip else float("inf")))
        optimizer.step()
        losses.append(total)
    weights = {n: p.detach().clone() for n, p in master.named_parameters()}
    return Outcome(losses, gradients, weights, norm)


def engine_config(problem: Problem, precision: str, accumulation: int, clip: float, **zero: Any) -> dict[str, Any]:
    """The configuration that makes an engine do the same."""
    if zero.get("stage") == 3:  # by default nothing so small is sharded
        zero = {"stage3_param_persistence_threshold": 0, **zero}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "steps_per_print": 0,
        "zero_optimization": zero,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 10
    return config


def distance(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float:
    """Largest difference over largest value; 0 where both are None, infinite where one is."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
