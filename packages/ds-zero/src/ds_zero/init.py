"""Init: a model is built shard by shard, so that no rank ever holds all of it.

Every module's own parameters are sharded when its outermost `__init__` has returned: rank 0's values count. A parameter
that is written later in the construction, by a parent that initialises its children, is gathered for that and
sharded again when the parent's `__init__` has returned, or earlier where too much would be gathered at a time.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_comm import Communicator, communicator
from ds_zero.errors import ZeroError
from ds_zero.group_storage import GroupStorage, group_of
from ds_zero.layout import Cut, ParameterInfo, plan_groups

# By module: the groups of its own parameters, until an engine lays them out anew.
_groups: weakref.WeakKeyDictionary[nn.Module, list[GroupStorage]] = weakref.WeakKeyDictionary()
_MOST_GATHERED = 50_000_000
"""Elements that stay gathered while a construction writes them."""


class Init:
    """While the block runs, modules are sharded as they are built. Collective: all ranks build the same.

    Blocks nest; the outermost one counts. What was built computes inside an engine of stage 3, or a
    `GatheredParameters` block.

    Args:
        module: an existing module to shard at once, in place. Default: none.
        data_parallel_group: process group to share out over. Default: all ranks.
        mem_efficient_linear: accepted; torch's own linear saves nothing it could do without. Default: true.
        remote_device: where shards rest; only None or "none" is available in this version. Default: None.
        pin_memory: of shards on the CPU; without effect in this version. Default: false.
        config_dict_or_path: an engine's configuration, for its precision. Default: none.
        config: the same, by its older name.
        enabled: False does nothing. Default: true.
        dtype: dtype of floating-point parameters. Default: float16 or bfloat16 where the configuration enables
            them, else as they are.
        mpu: an object with `get_data_parallel_group()`. Default: none.

    Raises:
        ZeroError: another `remote_device` is asked for.

    Source: DeepSpeed API reference 5.1.3, "Constructing Massive Models".
    """

    _active: Init | None = None
    """The outermost block that runs; classes that are defined meanwhile look here."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ):
        if remote_device not in (None, "none"):
            raise ZeroError(f"shards rest on the device in this version: remote_device={remote_device!r}; leave it out")
        if mpu is not None:
            data_parallel_group = mpu.get_data_parallel_group()
        self._enabled = enabled
        self._group = data_parallel_group
        self._dtype = dtype or _dtype_of(config_dict_or_path if config_dict_or_path is not None else config)
        self._depth = 0  # constructions under way
        self._written: list[GroupStorage] = []
        self._undo: list[Callable[[], None]] = []
        self._outermost = False
        if module is not None and enabled:
            for each in module.modules():
                self._shard(each)

    def __enter__(self) -> Init:
        if self._enabled and Init._active is None:
            Init._active, self._outermost = self, True
            for kind in _subclasses(nn.Module):
                self._wrap(kind)
            self._wrap_later_classes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outermost:
            Init._active, self._outermost = None, False
            for undo in reversed(self._undo):
                undo()
            self._undo = []
            if kind is None:
                self._settle()

    # Constructions

    def _wrap(self, kind: type[nn.Module]) -> None:
        if "__init__" not in vars(kind):
            return
        original = vars(kind)["__init__"]

        @functools.wraps(original)
        def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            active = Init._active
            if active is None or getattr(module, "_ds_building", False):  # a base class's part of a construction
                original(module, *args, **kwargs)
                return
            object.__setattr__(module, "_ds_building", True)
            active._depth += 1
            try:
                original(module, *args, **kwargs)
            finally:
                active._depth -= 1
                object.__delattr__(module, "_ds_building")
            active._settle()
            active._shard(module)

        setattr(kind, "__init__", construct)  # noqa: B010  (a type checker takes the plain form for an override)
        self._undo.append(functools.partial(setattr, kind, "__init__", original))

    def _wrap_later_classes(self) -> None:
        """Classes that are defined in the block."""
        wrap = self._wrap
        original = vars(nn.Module).get("__init_subclass__")

        def announce(cls: type[nn.Module], /, **kwargs: Any) -> None:
            super(nn.Module, cls).__init_subclass__(**kwargs)
            wrap(cls)

        target: Any = nn.Module
        target.__init_subclass__ = classmethod(announce)

        def undo() -> None:
            if original is None:
                del target.__init_subclass__
            else:
                target.__init_subclass__ = original

        self._undo.append(undo)

    # Sharding

    @property
    def _comm(self) -> Communicator:
        return communicator(self._group)

    def _shard(self, module: nn.Module) -> None:
        """Shards what is the module's own and not sharded yet."""
        own = {
            name: p
            for name, p in module.named_parameters(recurse=False)
            if group_of(p) is None and p.numel() and p.device.type != "meta"
        }
        if self._dtype is not None:
            for parameter in own.values():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self._dtype)
        comm = self._comm
        infos = [ParameterInfo(name, tuple(p.shape), p.dtype) for name, p in own.items()]
        for layout in plan_groups(infos, comm.world, 1 << 60, Cut.ANYWHERE) if infos else ():
            members = [own[slot.info.name] for slot in layout.slots]
            group = GroupStorage(layout, members, comm, sharded=True)
            group.on_touch = _touch
            _groups.setdefault(module, []).append(group)

    def _write(self, group: GroupStorage) -> None:
        """A sharded parameter is used while modules are built."""
        group.hold()
        self._written.append(group)
        while sum(each.layout.numel for each in self._written[:-1]) > _MOST_GATHERED:
            self._take_in(self._written.pop(0))

    def _settle(self) -> None:
        """What was written is sharded again; while a parent is built, only when the parent is done."""
        if self._depth == 0:
            while self._written:
                self._take_in(self._written.pop())

    def _take_in(self, group: GroupStorage) -> None:
        if group.sharded and group.parameters:
            group.adopt_gathered(source=0)
            group.drop()


def _touch(group: GroupStorage, parameter: nn.Parameter) -> None:
    if Init._active is not None:
        Init._active._write(group)
        return
    raise ZeroError(
        f"what zero.Init has built computes inside an engine: {group.name_of(parameter)!r} of a module was used "
        "before; call ds_engine.initialize() first, or use it inside "
        "`with ds_zero.GatheredParameters(module, modifier_rank=0):`"
    )


def _subclasses(kind: type[nn.Module]) -> list[type[nn.Module]]:
    found = {kind: None}
    for each in kind.__subclasses__():
        found.update(dict.fromkeys(_subclasses(each)))
    return list(found)


def _dtype_of(config: Mapping[str, Any] | str | Path | None) -> torch.dtype | None:
    if config is None:
        return None
    given = config if isinstance(config, Mapping) else json.loads(Path(config).read_text(encoding="utf-8"))
    for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        if isinstance(given.get(key), Mapping) and given[key].get("enabled"):
            return dtype
    return None
