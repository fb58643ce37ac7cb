"""The fetch plan of sharded parameters: which parts of a model are gathered together. Data only.

A *unit* is a module whose parameters are gathered before its forward and its backward and released after each.
Units follow the module tree: the largest modules that keep to the limit, and every block of a repeated stack by
itself, so that while one block computes the others take no memory. A leaf module is always one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from ds_zero.external import external_parameters
from ds_zero.leaf_modules import z3_leaf_module


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        index: number of the unit.
        module: name of the module that gathers them; "" is the model.
        parameters: names of those it owns, each of one unit only.
        shared: names of those that it uses and another unit owns: tied weights, and registered external ones.
        numel: elements of those it owns.
        persistent: they are small, and stay gathered.
    """

    index: int
    module: str
    parameters: tuple[str, ...]
    shared: tuple[str, ...]
    numel: int
    persistent: bool

    def __str__(self) -> str:
        kept = ", stays gathered" if self.persistent else ""
        tied = f", with {', '.join(self.shared)}" if self.shared else ""
        count = f"{len(self.parameters)} parameter{'' if len(self.parameters) == 1 else 's'}"
        return f"unit {self.index}: {self.module or '(model)'}: {count}, {self.numel:,} elements{kept}{tied}"


@dataclass(frozen=True)
class FetchPlan:
    """All units of a model, the model's own first."""

    units: tuple[Unit, ...]

    def unit_of(self) -> dict[str, int]:
        """The unit that owns a parameter, by the parameter's name."""
        return {name: unit.index for unit in self.units for name in unit.parameters}

    def __str__(self) -> str:
        return "\n".join(map(str, self.units))


def plan_units(
    model: nn.Module, max_numel: int, persistence_threshold: int = 0, max_persistent: int | None = None
) -> FetchPlan:
    """Cuts a model into units. Looks at shapes only, so meta tensors will do.

    Args:
        model: any module.
        max_numel: most elements of a unit; a single module's own parameters may be more.
        persistence_threshold: units of at most so many elements stay gathered. Default: none.
        max_persistent: most elements that stay gathered, in all. Default: no limit.

    Raises:
        ValueError: a unit may hold nothing.

    Source: DeepSpeed API reference 5.1.1: `stage3_prefetch_bucket_size`, `stage3_param_persistence_threshold`,
    `stage3_model_persistence_threshold`.
    """
    if max_numel < 1:
        raise ValueError(f"a unit holds 1 element at least: got a limit of {max_numel}; raise the limit")
    # Tied parameters have one name here, the first.
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    taken: set[str] = set()
    units: list[Unit] = []
    persistent = 0
    outside: list[list[str]] = []  # by unit: what was registered as external

    def add(module: str, names: list[str], among: list[nn.Module]) -> None:
        nonlocal persistent
        outside.append(
            list(dict.fromkeys(first[id(p)] for m in among for p in external_parameters(m) if id(p) in first))
        )
        own = tuple(name for name in names if name not in taken)
        shared = tuple(name for name in names if name in taken)
        numel = sum(sizes[name] for name in own)
        keep = 0 < numel <= persistence_threshold and (max_persistent is None or persistent + numel <= max_persistent)
        persistent += numel if keep else 0
        taken.update(own)
        units.append(Unit(len(units), module, own, shared, numel, keep))

    def visit(name: str, module: nn.Module) -> None:
        used = _used(module, first)
        numel = sum(sizes[each] for each in used if each not in taken)
        whole = z3_leaf_module(module) or (numel <= max_numel and not _repeats(module))
        if used and _runs(module) and whole:
            add(name, used, list(module.modules()))
            return
        if own := _used_directly(module, first) if _runs(module) else []:
            add(name, own, list(_directly(module)))
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    if not units or units[0].module:  # the model is always a unit: it is where a step begins and ends
        units.insert(0, Unit(0, "", (), (), 0, False))
        outside.insert(0, [])
    return FetchPlan(
        tuple(
            replace(
                unit,
                index=index,
                shared=tuple(dict.fromkeys([*unit.shared, *(name for name in names if name not in unit.parameters)])),
            )
            for index, (unit, names) in enumerate(zip(units, outside))
        )
    )


def _runs(module: nn.Module) -> bool:
    """It has a forward of its own; a list or dictionary of modules or parameters has none."""
    return type(module).forward is not nn.Module.forward


def _used(module: nn.Module, first: dict[int, str]) -> list[str]:
    return list(dict.fromkeys(first[id(p)] for p in module.parameters()))


def _used_directly(module: nn.Module, first: dict[int, str]) -> list[str]:
    """Its own parameters, and those of lists of parameters in it, which nothing gathers for itself."""
    return list(dict.fromkeys(first[id(p)] for each in _directly(module) for p in each.parameters(recurse=False)))


def _directly(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not _runs(child):
            yield from _directly(child)


def _repeats(module: nn.Module) -> bool:
    """Somewhere in it stands a stack of blocks: two children of one class that are made of modules themselves."""
    for each in module.modules():
        if isinstance(each, nn.ModuleList | nn.Sequential):
            kinds = [type(child) for child in each if next(child.children(), None) is not None]
            if len(kinds) > len(set(kinds)):
                return True
    return False
