"""Several engines in one process: what a rank runs, and plain PyTorch's solution for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ds_engine
import ds_zero
from parity.corners import ADAM

STEPS = 3
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16 x 128": {"fp16": {"enabled": True, "loss_scale": 128.0}},
    "fp16 x 1024": {"fp16": {"enabled": True, "loss_scale": 1024.0}},
}
Networks = tuple[Any, Any]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """Two engines: their precisions, the ZeRO stage, and who runs backward of a loss that spans both."""

    first: str = "fp32"
    second: str = "fp32"
    stage: int = 0
    backward: str = "plain"
    """`plain`, or the engine that is asked: `first` or `second`."""


def networks() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator, the same at every call."""
    torch.manual_seed(11)
    generator = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    return generator, nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1))


def twins() -> tuple[nn.Module, nn.Module]:
    """Two networks of one shape, so that a mix-up of their gradients would fit."""
    torch.manual_seed(12)
    return nn.Linear(6, 6), nn.Linear(6, 6)


def samples(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise [4, 8] and real samples [4, 6]."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=draw), torch.randn(4, 6, generator=draw) + 1


def through(network: Any, x: torch.Tensor) -> torch.Tensor:
    """The network, in the dtype of its parameters."""
    return network(x.to(next(iter(network.parameters())).dtype))


def spanning(networks: Networks, rank: int, step: int) -> torch.Tensor:
    """One loss through both, of which both learn."""
    noise, _ = samples(rank, step)
    generator, discriminator = networks
    return F.softplus(-through(discriminator, through(generator, noise)).float()).mean() * 3


def in_turn(networks: Networks, rank: int, step: int) -> torch.Tensor:
    """Two networks side by side; odd ranks call them the other way round."""
    _, real = samples(rank, step)
    order = (0, 1) if rank % 2 == 0 else (1, 0)
    parts = {index: through(networks[index], real).square().mean() * (index + 1) for index in order}
    return parts[order[0]] + parts[order[1]]


def skipping(networks: Networks, rank: int, step: int) -> torch.Tensor:
    """Two networks side by side; odd ranks leave out one of them, in turn."""
    _, real = samples(rank, step)
    used = (0, 1) if rank % 2 == 0 else (step % 2,)
    return torch.stack([through(networks[index], real).square().mean() * (index + 1) for index in used]).sum()


LOSSES: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], Callable[..., torch.Tensor]]] = {
    "spanning": (networks, spanning),
    "in turn": (twins, in_turn),
    "skipping": (twins, skipping),
}


def _values(read: Callable[[nn.Parameter], torch.Tensor | None], models: tuple[nn.Module, nn.Module]) -> Values:
    found = {f"{index}.{name}": read(p) for index, m in enumerate(models) for name, p in m.named_parameters()}
    return {name: value.clone() for name, value in found.items() if value is not None}


def _engines(models: tuple[nn.Module, nn.Module], setting: Setting) -> tuple[Any, Any]:
    made = []
    for model, precision in zip(models, (setting.first, setting.second)):
        zero = {"stage": setting.stage, "reduce_bucket_size": 80, "overlap_comm": True}
        zero["stage3_param_persistence_threshold"] = 0
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 0, "zero_optimization": zero}
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        made.append(
            ds_engine.initialize(model=model, optimizer=optimizer, config={**config, **PRECISIONS[precision]})[0]
        )
    return made[0], made[1]


def joint(kind: str, settings: list[Setting]) -> list[tuple[Values, Values]]:
    """On a rank: gradients of the last step and final weights, both engines stepping, for each setting."""
    return [_joint(kind, setting) for setting in settings]


def _joint(kind: str, setting: Setting) -> tuple[Values, Values]:
    make, loss_of = LOSSES[kind]
    models = make()
    engines = _engines(models, setting)
    gradients: Values = {}
    for step in range(STEPS):
        loss = loss_of(engines, engines[0].global_rank, step)
        if setting.backward == "plain":
            loss.backward()
        else:
            engines[("first", "second").index(setting.backward)].backward(loss)
        gradients = _values(ds_zero.safe_get_full_grad, models)
        for engine in engines:
            engine.step()
            assert engine.was_step_applied()
    weights = _values(ds_zero.safe_get_full_fp32_param, models)
    for engine in engines:
        engine.destroy()
    return gradients, weights


def one_rests(setting: Setting) -> Values:
    """On a rank: weights of an engine beside an idle one, whose last step rank 1 takes without a backward."""
    models = twins()
    engine, idle = _engines(models, setting)
    for step in range(STEPS):
        if step < STEPS - 1 or engine.global_rank == 0:
            loss = through(engine, samples(engine.global_rank, step)[1]).square().mean()
            loss.backward() if setting.backward == "plain" else engine.backward(loss)
        engine.step()
    weights = {name: ds_zero.safe_get_full_fp32_param(p) for name, p in models[0].named_parameters()}
    engine.destroy()
    idle.destroy()
    return weights


def one_rests_reference(world: int) -> Values:
    """Plain PyTorch: what rank 1 left out counts as zero."""
    model = twins()[0]
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world if step < STEPS - 1 else 1):
            (through(model, samples(rank, step)[1]).square().mean() / world).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def joint_reference(kind: str, world: int) -> tuple[Values, Values]:
    """Plain PyTorch: the same loss, averaged over ranks."""
    make, loss_of = LOSSES[kind]
    models = make()
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], **ADAM)
    gradients: Values = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(models, rank, step) / world).backward()
        gradients = _values(lambda p: p.grad, models)
        optimizer.step()
    return gradients, _values(lambda p: p.detach(), models)


def adversaries(settings: list[Setting]) -> list[Values]:
    """On a rank: the loop of torch's GAN tutorial, with an engine for each network; final weights."""
    return [_adversaries(setting) for setting in settings]


def _adversaries(setting: Setting) -> Values:
    models = networks()
    generator, discriminator = _engines(models, setting)
    for step in range(STEPS):
        noise, real = samples(generator.global_rank, step)
        discriminator.zero_grad()
        fake = through(generator, noise)
        for out, sign in ((real, -1), (fake.detach(), 1)):
            loss = F.softplus(sign * through(discriminator, out).float()).mean()
            loss.backward() if setting.backward == "plain" else discriminator.backward(loss)
        discriminator.step()
        generator.zero_grad()
        loss = F.softplus(-through(discriminator, fake).float()).mean()
        loss.backward() if setting.backward == "plain" else generator.backward(loss)
        generator.step()
    weights = _values(ds_zero.safe_get_full_fp32_param, models)
    generator.destroy()
    discriminator.destroy()
    return weights


def adversaries_reference(world: int) -> Values:
    """Plain PyTorch: the tutorial's loop, gradients averaged over what the ranks would see."""
    models = networks()
    generator, discriminator = models
    optimizers = [torch.optim.AdamW(model.parameters(), **ADAM) for model in models]
    for step in range(STEPS):
        seen = [samples(rank, step) for rank in range(world)]
        discriminator.zero_grad()
        fakes = [generator(noise) for noise, _ in seen]
        for (_, real), fake in zip(seen, fakes):
            for out, sign in ((real, -1), (fake.detach(), 1)):
                (F.softplus(sign * discriminator(out)).mean() / world).backward()
        optimizers[1].step()
        generator.zero_grad()
        for fake in fakes:
            (F.softplus(-discriminator(fake)).mean() / world).backward()
        optimizers[0].step()
    return _values(lambda p: p.detach(), models)
