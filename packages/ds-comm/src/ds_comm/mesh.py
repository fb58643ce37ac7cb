"""ParallelDims: how a world of ranks is cut into named axes, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallel axes. Neighbouring ranks differ first in `tp`, last in `pp`.

    Args:
        world: number of ranks.
        dp: data-parallel ranks; -1 takes what the other axes leave. Default: -1.
        tp: tensor-parallel ranks. Default: 1.
        sp: sequence-parallel ranks. Default: 1.
        pp: pipeline stages. Default: 1.
        ep: ranks that share out the experts; a part of `dp`, which it must divide. Default: 1.

    Raises:
        ValueError: the sizes do not multiply to the world, or one is not positive.

    Example:
        >>> ParallelDims(world=8, tp=2).dp
        4
    """

    world: int
    dp: int = -1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in ("world", "tp", "sp", "pp", "ep"):
            if getattr(self, axis) < 1:
                raise ValueError(f"an axis has at least one rank: {axis}={getattr(self, axis)}; give 1 or more")
        others = self.tp * self.sp * self.pp
        if self.dp == -1 and self.world % others == 0:
            object.__setattr__(self, "dp", self.world // others)
        if self.dp < 1 or self.dp * others != self.world:
            raise ValueError(
                f"the axes multiply to the world: pp={self.pp} x dp={self.dp} x sp={self.sp} x tp={self.tp} "
                f"is not {self.world}; start {max(self.dp, 1) * others} ranks, or change an axis "
                "(dp=-1 takes what the others leave)"
            )
        if self.dp % self.ep:
            raise ValueError(
                f"ep divides dp, whose ranks share out the experts: dp={self.dp}, ep={self.ep}; "
                f"give one of {[d for d in range(1, self.dp + 1) if self.dp % d == 0]}"
            )

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh: axis `dp`, and of `pp`, `ep` (a part of `dp`), `sp`, `tp` those of several ranks. Collective.

        Args:
            device_type: "cuda", "cpu", …

        Raises:
            ValueError: the process group has another number of ranks than `world`.
        """
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_world_size() != self.world:
            raise ValueError(
                f"a mesh covers the whole world: it is made for {self.world} ranks, "
                f"{dist.get_world_size()} are running; give world={dist.get_world_size()}"
            )
        sizes = {"pp": self.pp, "edp": self.dp // self.ep, "ep": self.ep, "sp": self.sp, "tp": self.tp}
        if self.ep == 1:
            sizes = {"pp": self.pp, "dp": self.dp, "sp": self.sp, "tp": self.tp}
        # An axis of one rank needs no process group; a world of `dp` alone is the default group itself.
        axes = tuple(axis for axis, size in sizes.items() if size > 1 or axis in ("dp", "edp"))
        mesh = init_device_mesh(device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)
        if self.ep > 1:
            mesh["edp", "ep"]._flatten("dp")
        return mesh
