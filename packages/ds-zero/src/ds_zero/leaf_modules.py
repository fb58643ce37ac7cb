"""Leaf modules of stage 3: gathered as a whole, whatever of them a forward uses.

So ranks may go different ways inside, as in a mixture of experts where a rank's tokens miss an expert.

Source: DeepSpeed API reference 5.1.4 and the tutorial on mixtures of experts: `set_z3_leaf_modules`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from ds_comm.names import did_you_mean

_leaves: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    """Makes one module a leaf, or not. Before the engine is made."""
    (_leaves.add if flag else _leaves.discard)(module)


def z3_leaf_module(module: nn.Module) -> bool:
    """It is gathered as a whole."""
    return module in _leaves


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Makes all modules of these classes leaves. Before the engine is made.

    Args:
        model: where to look.
        leaf_module_classes: classes, or their names, with or without the module's.

    Returns:
        The modules.

    Raises:
        ValueError: the model has no module of one of the classes.
    """
    found = _of(model, leaf_module_classes)
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Undoes `set_z3_leaf_modules`, and returns the modules. Errors: the same."""
    found = _of(model, leaf_module_classes)
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The model's leaves."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _of(model: nn.Module, classes: Iterable[type | str]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for wanted in classes:
        some = [module for module in model.modules() if _is(module, wanted)]
        if not some:
            name = wanted if isinstance(wanted, str) else wanted.__name__
            known = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(
                f"leaf modules are of classes that the model has: it has no {name!r}{did_you_mean(name, known)}; it "
                f"has {', '.join(known)}"
            )
        found += [module for module in some if module not in found]
    return found


def _is(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, str):
        return any(wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(module).__mro__)
    return isinstance(module, wanted)
