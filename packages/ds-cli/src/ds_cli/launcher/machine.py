"""What the launcher knows about the machine it runs on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ds_cli.launcher.accelerators import count_gpus
from ds_cli.launcher.cores import read_numa_nodes
from ds_cli.launcher.ports import port_is_free


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about one machine. A plan depends on them alone, so tests can plan for any machine."""

    hostnames: frozenset[str] = frozenset({"localhost"})
    """Names by which --include and --exclude may call it."""
    num_gpus: int = 0
    """Number of GPUs in it, whatever CUDA_VISIBLE_DEVICES says."""
    cpus: tuple[int, ...] = (0,)
    """The logical CPUs this process may run on."""
    numa_nodes: tuple[tuple[int, ...], ...] = ((0,),)
    """One allowed CPU of each physical core, grouped by NUMA node."""
    can_bind: bool = True
    """Whether the system can tie a process to cores."""
    port_is_free: Callable[[int], bool] = lambda port: True
    """Whether rank 0 can listen at a port."""

    @classmethod
    def detect(cls) -> Machine:
        """The machine this process runs on."""
        can_bind = hasattr(os, "sched_getaffinity")
        cpus = os.sched_getaffinity(0) if can_bind else range(os.cpu_count() or 1)
        name = socket.gethostname()
        return cls(
            hostnames=frozenset({"localhost", "127.0.0.1", name, name.partition(".")[0]} - {""}),
            num_gpus=count_gpus(),
            cpus=tuple(sorted(cpus)),
            numa_nodes=read_numa_nodes(cpus),
            can_bind=can_bind,
            port_is_free=port_is_free,
        )
