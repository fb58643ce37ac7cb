"""Covered parameters: while a parameter is sharded, its values are elsewhere, and touching them must not go unseen.

A sharded parameter keeps its shape, dtype and device, but its storage is empty: a kernel that read it would read
nowhere. So while it is sharded the object is of a class that asks first: what needs no values is answered, anything
else is handed to the parameter's group, which gathers it (inside forward or backward) or says how to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ds_zero.errors import ZeroError

Touch = Callable[[nn.Parameter], None]

# What to call when a covered parameter's values are wanted: a weak method of its group.
_touches: WeakIdKeyDictionary = WeakIdKeyDictionary()

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "grad", "requires_grad", "is_leaf", "grad_fn", "ndim", "itemsize", "nbytes",
    "names", "name", "output_nr", "_version", "retains_grad", "is_sparse", "is_sparse_csr", "is_cuda", "is_cpu",
    "is_xpu", "is_mps", "is_meta", "is_nested", "is_quantized", "is_mkldnn", "_backward_hooks",
    "_post_accumulate_grad_hooks", "_cdata", "_base",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "get_device", "is_inference", "new_empty", "new_zeros", "new_ones",
    "new_full", "__hash__", "__len__", "__dir__", "is_shared", "is_pinned", "has_names", "is_same_size",
)  # fmt: skip
_FUNCTIONS = (
    "is_floating_point", "is_complex", "numel", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like",
)  # fmt: skip


@functools.cache
def _harmless() -> frozenset[Any]:
    """What needs no values."""
    kind: Any = torch.Tensor
    found: list[Any] = [getattr(kind, name).__get__ for name in _ATTRIBUTES if hasattr(kind, name)]
    found += [kind.grad.__set__, kind.grad.__delete__, kind.requires_grad.__set__]
    found += [getattr(kind, name) for name in _METHODS if hasattr(kind, name)]
    found += [getattr(torch, name) for name in _FUNCTIONS]
    found += [torch.autograd.grad, torch.autograd.backward]  # which gradients are wanted, not of which values
    return frozenset(found)


@functools.cache
def _covered(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """`kind`, covered."""

    def ask(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _harmless():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        covered = [each for each in tree_leaves((args, kwargs)) if is_sharded(each)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and func not in _no_graph()):
            for each in covered:
                touch(each)
        if not any(map(is_sharded, covered)):
            return func(*args, **kwargs)
        for each in covered:
            _check_present(each)
        with torch._C.DisableTorchFunctionSubclass():  # lent, and watched
            return func(*args, **kwargs)

    def copy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(id(self), kind(self.detach().clone(), self.requires_grad))

    def show(self: nn.Parameter, **_: Any) -> str:
        return f"Parameter(sharded, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    return type(
        f"Sharded{kind.__name__}",
        (kind,),
        {
            "__torch_function__": classmethod(ask),
            "__repr__": show,
            "__deepcopy__": copy,
            "_uncovered": kind,
            "__module__": __name__,
        },
    )


@functools.cache
def _no_graph() -> frozenset[Any]:
    """What needs values, and leaves no trace of them in autograd's graph."""
    kind: Any = torch.Tensor
    fills = [each for name, each in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")]
    return frozenset([kind.data.__get__, kind.data.__set__, kind.detach, kind.tolist, kind.item, *fills])


def touch(parameter: nn.Parameter) -> None:
    """Tells whoever covered a parameter that its values are wanted: with grad mode on, for a graph."""
    if (tell := _touches[parameter]()) is not None:
        tell(parameter)


def _check_present(parameter: nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        lost = parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0
    if lost:
        raise ZeroError(
            f"a sharded parameter's values are with the optimizer that shards it: the one of this, of shape "
            f"{tuple(parameter.shape)}, is gone; keep it (or its engine), and close it when you are done"
        )


def is_sharded(value: Any) -> bool:
    """It is a parameter whose values are sharded now."""
    return isinstance(value, nn.Parameter) and "_uncovered" in vars(type(value))


def cover(parameter: nn.Parameter, touch: Touch) -> None:
    """From here on `touch` (a bound method, kept weakly) is called before the parameter's values are used."""
    _touches[parameter] = weakref.WeakMethod(touch)
    if not is_sharded(parameter):
        parameter.__class__ = _covered(type(parameter))


def uncover(parameter: nn.Parameter) -> None:
    """It has its values again."""
    if is_sharded(parameter):
        parameter.__class__ = type(parameter)._uncovered  # type: ignore[attr-defined]
