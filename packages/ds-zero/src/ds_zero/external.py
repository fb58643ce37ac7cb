"""External parameters: those that a module's forward uses though another module holds them.

A use is noticed by itself, at the price of a gather at the moment it happens; what is registered is gathered with
the module from the first forward on.

Source: DeepSpeed API reference 5.1.4, "Registering External Parameters".
"""

from __future__ import annotations

import weakref

from torch import nn

from ds_zero.errors import ZeroError

_externals: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Has `parameter` gathered for the forward and backward of `module` too. Before the engine is made.

    Raises:
        ZeroError: it is not a parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise ZeroError(f"an external parameter is a torch.nn.Parameter: got {type(parameter).__name__}; pass one")
    known = _externals.setdefault(module, [])
    if all(each is not parameter for each in known):
        known.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undoes `register_external_parameter`.

    Raises:
        ZeroError: it was not registered with the module.
    """
    known = _externals.get(module, [])
    if all(each is not parameter for each in known):
        raise ZeroError("what is unregistered was registered with the same module: this parameter was not; check both")
    _externals[module] = [each for each in known if each is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that were registered with the module."""
    return list(_externals.get(module, []))
