"""From the name in a configuration to an optimizer, and what the engine has to know of one."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

from ds_comm.names import did_you_mean
from ds_engine.optim_adam import UncorrectedAdam
from ds_engine.optim_lamb import Lamb
from ds_engine.optim_lion import Lion

OptimizerType = type[torch.optim.Optimizer]

# Names are compared in lower case.
_ADAM = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "CPUAdam")
_LIONS = ("Lion", "FusedLion", "DeepSpeedCPULion", "CPULion")
_OWN: dict[str, OptimizerType] = {**dict.fromkeys(_LIONS, Lion), "Lamb": Lamb, "FusedLamb": Lamb}
_ONE_BIT = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")

_ADAM_SWITCHES = {
    "torch_adam": False,
    "adam_w_mode": True,
    "adamw_mode": True,
    "bias_correction": True,
    "set_grad_none": True,
    "fp32_optimizer_states": True,
}
"""What DeepSpeed's Adams take beside torch's parameters, with the documented defaults."""

_ELEMENTWISE: tuple[OptimizerType, ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Rprop,
    torch.optim.ASGD,
    Lion,
    UncorrectedAdam,
)


def build_optimizer(
    name: str,
    parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    params: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer `name` for `parameters`.

    Names, in any case of letters:

    - Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, CPUAdam: `torch.optim.AdamW`, with DeepSpeed's default of no
      weight decay. All but AdamW take `adam_w_mode: false` (`adamw_mode` is the same), which means
      `torch.optim.Adam`: the decay is added to the gradient. With `torch_adam: true` the default weight decay
      is torch's, as in DeepSpeed. With `bias_correction: false` it is ds_engine's own `UncorrectedAdam`.
      `set_grad_none` and `fp32_optimizer_states` are taken with their defaults, which are what torch does.
    - Lion, FusedLion, DeepSpeedCPULion, CPULion, and Lamb or FusedLamb: `ds_engine`'s own.
    - any class of `torch.optim`, with torch's parameters and defaults.

    Where torch has a fused kernel for the optimizer and the parameters' devices and dtypes, it is used,
    unless `params` has `fused`, `foreach` or `differentiable`. Fused kernels take no sparse gradients: with
    those, give `fused: false`.

    Args:
        name: the optimizer's name.
        parameters: parameters, or dicts that define parameter groups.
        params: the optimizer's other arguments by name.
        dtype: what the parameters will have when they are updated. Default: what they have.

    Raises:
        ValueError: there is no such optimizer or it can't be used here, or a parameter is unknown or out of
            its range. The message names the nearest known name.
    """
    kind, known = _find(name)
    groups = [_group(each) for each in parameters]
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        kind, params = _adam(known, params)
    _check_names(known, _accepted(kind), params)
    _check_numbers(known, kind, params)
    build: Callable[..., torch.optim.Optimizer] = kind
    return build(groups, **params, **({"fused": True} if _may_fuse(kind, groups, params, dtype) else {}))


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of an element depends on that element's own history only.

    The state of such an optimizer may be cut at any element and each part updated alone, as ZeRO does.

    True for the elementwise classes of torch.optim and for Lion; False for Adafactor, Muon, Lamb, LBFGS,
    SparseAdam and for any class that is not known, among them a subclass of a known one with an update of its
    own. A client class settles it by the attribute `elementwise = True` (or False).
    """
    declared = getattr(optimizer, "elementwise", None)
    if isinstance(declared, bool):
        return declared
    kind = type(optimizer)
    base = next((each for each in kind.__mro__ if each in _ELEMENTWISE), None)
    return base is not None and all(
        _same(kind, base, method) for method in ("step", "_init_group", "_prepare", "_update")
    )


def _group(member: torch.Tensor | dict[str, Any]) -> torch.Tensor | dict[str, Any]:
    """A parameter, or a copy of a group (torch writes its defaults into the one it is given)."""
    if not isinstance(member, dict):
        return member
    params = member["params"]
    return {**member, "params": params if isinstance(params, torch.Tensor) else list(params)}


def _same(kind: OptimizerType, base: OptimizerType, method: str) -> bool:
    """Whether `kind` has `base`'s `method`; torch wraps `step` anew in each class it makes an instance of."""
    ours, theirs = getattr(kind, method, None), getattr(base, method, None)
    return ours is theirs or (
        ours is not None and theirs is not None and inspect.unwrap(ours) is inspect.unwrap(theirs)
    )


def _find(name: str) -> tuple[OptimizerType, str]:
    """The class for `name` and the name as it is known; for Adam by any name, `torch.optim.AdamW`."""
    torchs = {
        each.__name__: each
        for each in vars(torch.optim).values()
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    kinds: dict[str, OptimizerType] = {**torchs, **_OWN, **dict.fromkeys(_ADAM, torch.optim.AdamW)}
    known = {each.lower(): each for each in itertools.chain(kinds, _ONE_BIT)}.get(str(name).lower())
    if known is None:
        raise ValueError(
            f"optimizer type is one of {', '.join([*_ADAM, *_OWN])} or a class of torch.optim, got {name!r}"
            f"{did_you_mean(name, [*kinds, *_ONE_BIT])}; correct the name"
        )
    if known in _ONE_BIT:
        plain = "Lamb" if known == "OneBitLamb" else "Adam"
        raise ValueError(f"optimizer {known} is not available in this version: use {plain}")
    if known == "LBFGS":
        raise ValueError(
            "optimizer LBFGS can't be built from a configuration: its step needs a closure that computes the "
            "loss again, which the engine has not; use it in a loop of your own, or another optimizer"
        )
    return kinds[known], known


def _adam(name: str, params: Mapping[str, Any]) -> tuple[OptimizerType, dict[str, Any]]:
    """The class that a documented Adam means, and the parameters for it."""
    switches = {key: params.get(key, default) for key, default in _ADAM_SWITCHES.items()}
    rest = {key: value for key, value in params.items() if key not in _ADAM_SWITCHES}
    decoupled = switches["adam_w_mode"] and switches["adamw_mode"]
    _check_names(name, [*_accepted(torch.optim.AdamW), *_ADAM_SWITCHES], params)
    if name == "AdamW" and not decoupled:
        raise ValueError("adam_w_mode is true for AdamW, got false: leave it out, or use Adam")
    for key in ("set_grad_none", "fp32_optimizer_states"):
        if not switches[key]:
            raise ValueError(f"{key} is true for {name} in this version, got false: leave it out")
    if not switches["torch_adam"]:
        rest.setdefault("weight_decay", 0.0)
    if not switches["bias_correction"]:
        _check_names(f"{name} without bias correction", _accepted(UncorrectedAdam), rest)
        return UncorrectedAdam, rest | {"adam_w_mode": decoupled}
    return torch.optim.AdamW if decoupled else torch.optim.Adam, rest


def _accepted(kind: OptimizerType) -> list[str]:
    """The names of the parameters an optimizer takes beside the model's."""
    return [key for key in inspect.signature(kind.__init__).parameters if key not in ("self", "params")]


def _check_names(name: str, accepted: list[str], params: Mapping[str, Any]) -> None:
    for key in params:
        if key not in accepted:
            raise ValueError(
                f"optimizer {name} takes {', '.join(accepted)}, got {key!r}{did_you_mean(key, accepted)}; "
                "correct or remove it"
            )


def _check_numbers(name: str, kind: OptimizerType, params: Mapping[str, Any]) -> None:
    """Text where a number belongs, as JSON from shell scripts and templates has it."""
    for key, default in inspect.signature(kind.__init__).parameters.items():
        value = params.get(key)
        is_list = isinstance(default.default, tuple)
        text = isinstance(value, str) and isinstance(default.default, int | float | tuple)
        if text or (is_list and isinstance(value, int | float)):
            mend = "write it without quotes" if text else "write [a, b]"
            mend = "fill it in (Hugging Face's integration does)" if value == "auto" else mend
            wanted = "a list of numbers" if is_list else "a number"
            raise ValueError(f"{key} of optimizer {name} is {wanted}, got {value!r}: {mend}")


def _may_fuse(
    kind: OptimizerType,
    groups: list[torch.Tensor | dict[str, Any]],
    params: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> bool:
    """Whether to take torch's fused kernel: it fits every parameter and the user asked for nothing else."""
    asked = {"fused", "foreach", "differentiable"}
    if "fused" not in _accepted(kind) or asked & params.keys():
        return False
    if kind is torch.optim.SGD and any(g.get("momentum") for g in (params, *groups) if isinstance(g, Mapping)):
        return False  # torch 2.13's kernel fails where one parameter has momentum already and another has not
    members: list[Any] = []
    for group in groups:
        if not isinstance(group, dict):
            members.append(group)
        elif asked & group.keys():
            return False
        else:
            members += [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
    tensors = [each[1] if isinstance(each, tuple) else each for each in members]  # torch takes (name, tensor) too
    kinds = {(each.device.type, dtype or each.dtype) for each in tensors}
    return all(_has_fused(kind, device, kept) for device, kept in kinds)  # type: ignore[arg-type]


@cache
def _has_fused(kind: OptimizerType, device: str, dtype: torch.dtype) -> bool:
    """Whether torch has a fused kernel for a device and dtype; it shows at the first step, so make one.

    Where it has none it raises, or (SGD, low precision on a CPU, torch 2.13) leaves parameters as they are.
    """
    if device == "meta":
        return False
    param = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    param.grad = torch.ones_like(param)
    build: Callable[..., torch.optim.Optimizer] = kind
    try:
        build([param], lr=1.0, fused=True).step()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(param.detach().abs() > 0)
