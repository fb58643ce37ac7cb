"""The models and losses of the corner tests: what training code does beside the straight line.

Each is a `Problem`, so that `reference` says what plain PyTorch makes of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_zero
from parity.problem import VOCABULARY, WIDTH, Batch, Problem, Small, plain_loss

MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}
# A gradient near zero divided by an eps near it would show its rounding many times over.
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.05}


class Branches(Small):
    """Three branches; the loss says which are used. `never` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("some", "never", "later")})

    def forward(self, tokens: torch.Tensor, use: tuple[str, ...] = ()) -> torch.Tensor:
        x = self.embedding(tokens)
        for name in use:
            x = x + torch.tanh(self.branches[name](x))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


class WholeBranches(Branches):
    """Gathered as a whole in stage 3, so that ranks may use different parts of it."""

    def __init__(self) -> None:
        super().__init__()
        ds_zero.set_z3_leaf_module(self, True)


def unused_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """`some` on even ranks only, `later` in steps 1 and 3 and in micro-batches 0 and 2 of odd ranks only."""
    use = ["some"] * (batch.rank % 2 == 0)
    if batch.step % 2 and (batch.rank % 2 or batch.micro in (0, 2)):
        use.append("later")
    return F.mse_loss(call(batch.tokens, tuple(use)), batch.targets)


def order_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """Odd ranks go through the branches the other way round, so gradients arrive in another order."""
    use = ("some", "later", "never")
    return F.mse_loss(call(batch.tokens, use if batch.rank % 2 else use[::-1]), batch.targets)


class FrozenFirst(Small):
    """Layer 0 and the embedding begin frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.embedding.requires_grad_(False)


def thaw_and_freeze(module: nn.Module, step: int) -> None:
    """Layer 0 thaws at step 1, the head freezes for step 2, the embedding thaws at step 3."""
    assert isinstance(module, Small)
    if step == 1:
        module.layers[0].requires_grad_(True)
    module.head.requires_grad_(step != 2)
    if step == 3:
        module.embedding.requires_grad_(True)


class Tied(nn.Module):
    """The head is the embedding, and one layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.layer(x)
        x = x + self.layer(x)
        return self.head(x.mean(1))[:, :7]


class Sparse(Small):
    """A sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)


class SparseTied(Tied):
    """A sparse embedding whose weight is the head's too: one parameter, a sparse and a dense gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.sparse = True


class Checkpointed(nn.Module):
    """Three checkpointed segments to the very end; a layer is in two of them, and the head's weight is tied.

    Args:
        reentrant: torch's older form, which runs backward inside backward.
    """

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def segment(self, x: torch.Tensor, index: int) -> torch.Tensor:
        x = x + torch.tanh(self.own[index](x))
        if index == 1:
            return x
        x = x + self.shared(x)
        return x if index == 0 else F.linear(x.mean(1), self.embedding.weight)[:, :7]

    def forward(self, tokens: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in (0, 2) if skip else (0, 1, 2):
            x = checkpoint(self.segment, x, index, use_reentrant=self.reentrant)
        return x


def skip_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """Odd ranks leave the middle segment out."""
    return F.mse_loss(call(batch.tokens, skip=batch.rank % 2 == 1), batch.targets)


class Odd(nn.Module):
    """Parameters of odd shapes and kinds: none, one, transposed, channels last; integers; buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(7, WIDTH).t())
        self.conv = nn.Conv2d(3, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.integers = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("empty_buffer", torch.zeros(0))
        assert not self.transposed.is_contiguous() and not self.conv.weight.is_contiguous()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)  # [samples, 5, WIDTH]
        picture = self.conv(x[:, :3].reshape(len(x), 3, 4, 6)).flatten(1)  # [samples, 2 * WIDTH]
        x = x.mean(1) * self.scale + picture[:, :WIDTH] + self.empty.sum()
        return x @ self.transposed + self.integers.sum()


class Tiny(nn.Module):
    """One parameter, smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, 1.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens[:, :3] / VOCABULARY * self.scale).sum(1, keepdim=True).expand(-1, 7)


class Dense(nn.Module):
    """A critic on floats, for gradient penalties."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(VOCABULARY, 16), nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def penalty_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """WGAN-GP: the critic's own gradient, to be differentiated once more, is part of the loss."""
    x = F.one_hot(batch.tokens, VOCABULARY).float().mean(1).requires_grad_()
    out = call(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch.targets) + 3.0 * ((slope.norm(dim=1) - 1) ** 2).mean()


def functional_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """The module called through torch.func, past the engine's forward."""
    out = torch.func.functional_call(module, dict(module.named_parameters()), (batch.tokens,))
    return F.mse_loss(out, batch.targets)


def weight_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """A penalty on the weights themselves, which passes the model's outputs by."""
    loss = plain_loss(call, module, batch)
    with ds_zero.GatheredParameters(module):  # outside forward, stage 3 has them here only
        return loss + 0.5 * sum(p.float().pow(2).mean() for p in module.parameters())


def some_loss(call: Any, module: nn.Module, batch: Batch) -> torch.Tensor:
    """Half the micro-batches do not go through the last layer: it is used in two of four only."""
    assert isinstance(module, Small)
    x = module.embedding(batch.tokens)
    for layer in module.layers[: 1 + batch.micro % 2]:
        x = x + layer(x)
    return F.mse_loss(module.head(x.mean(1)), batch.targets)


def decay_groups(module: nn.Module) -> list[Any]:
    """Three groups, interleaved: matrices decay, vectors don't, and the head has a rate of its own."""
    head = [p for n, p in module.named_parameters() if n.startswith("head")]
    rest = [p for n, p in module.named_parameters() if not n.startswith("head")]
    return [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.3},
        {"params": iter([p for p in rest if p.dim() <= 1]), "weight_decay": 0.0, "lr": 3e-2},
        {"params": head, "lr": 1e-3, "betas": (0.8, 0.9)},
    ]


def generator_group(module: nn.Module) -> Any:
    """A generator, as model.parameters() is."""
    return (p for p in module.parameters())


class Adapted(nn.Module):
    """A base in bf16, trained or not, with adapters in fp32.

    Args:
        base: dtype of the base, after it was rounded to bf16.
        frozen: only the adapters train.
    """

    def __init__(self, base: torch.dtype, frozen: bool) -> None:
        super().__init__()
        self.base = Small().to(torch.bfloat16).to(base).requires_grad_(not frozen)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 7, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.base(tokens).float() + self.up(self.down(self.base.embedding(tokens).mean(1).float()))


def _adam(**more: Any) -> Problem:
    return Problem(arguments=ADAM, **more)


def _sgd(**more: Any) -> Problem:
    return Problem(optimizer="SGD", arguments=MOMENTUM, **more)


PROBLEMS: dict[str, Problem] = {
    "unused": _adam(model=Branches, loss=unused_loss),
    "unused, momentum": _sgd(model=Branches, loss=unused_loss),
    "another order": _adam(model=Branches, loss=order_loss),
    "thaw and freeze": _adam(model=FrozenFirst, before_step=thaw_and_freeze),
    "thaw and freeze, momentum": _sgd(model=FrozenFirst, before_step=thaw_and_freeze),
    "thaw and freeze, Adagrad": Problem(
        model=FrozenFirst, before_step=thaw_and_freeze, optimizer="Adagrad",
        arguments={"lr": 1e-2, "initial_accumulator_value": 0.5},
    ),
    "tied, called twice": _adam(model=Tied),
    "some micro-batches": _adam(loss=some_loss),
    "sparse": _adam(model=Sparse),
    "sparse and tied": _adam(model=SparseTied),
    "checkpoint": _adam(model=partial(Checkpointed, False)),
    "checkpoint, reentrant": _adam(model=partial(Checkpointed, True)),
    "checkpoint, skipped": _adam(model=partial(Checkpointed, False), loss=skip_loss),
    "odd shapes": _adam(model=Odd),
    "one tiny parameter": _adam(model=Tiny),
    "gradient penalty": _adam(model=Dense, loss=penalty_loss),
    "functional call": _adam(loss=functional_loss),
    "weight penalty": _adam(loss=weight_loss),
    "groups": _adam(groups=decay_groups),
    "generator": _adam(groups=generator_group),
}  # fmt: skip
"""Every one of them is to be what plain PyTorch makes of it, in fp32, whatever the engine's settings."""

SKIPPED_REENTRANT = _adam(model=partial(Checkpointed, True), loss=skip_loss)
"""Ranks run another number of backwards inside backward."""
