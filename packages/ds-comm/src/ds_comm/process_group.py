"""Bringing the process group up, and asking it who we are."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_comm.errors import CommError

logger = logging.getLogger("ds_comm")

DEFAULT_TIMEOUT = timedelta(minutes=30)

# How MPI launchers tell a process who it is.
_MPI = {
    "OMPI_COMM_WORLD_RANK": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI_RANK": ("PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class Rendezvous:
    """Where a rank meets the others: what `init_distributed` decided, before it acts."""

    backend: str
    init_method: str
    rank: int
    world_size: int
    local_rank: int
    timeout: timedelta


def device_type() -> str:
    """The device that ranks compute on: the accelerator where there is one, else "cpu". Touches no device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def default_backend(device: str | None = None) -> str:
    """The backend for a device; with an accelerator, gloo beside it for CPU tensors ("cpu:gloo,cuda:nccl")."""
    device = device or device_type()
    if device == "cpu":
        return "gloo"
    return f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def resolve(
    dist_backend: str | None = None,
    distributed_port: int = 29500,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    config_timeout_s: float | None = None,
    auto_mpi_discovery: bool = True,
    env: Mapping[str, str] | None = None,
) -> Rendezvous:
    """Decides who this process is and where it meets the others, without starting anything.

    An argument wins over the configuration, the configuration over the environment. With nothing in
    either, the process is a world of its own.

    Raises:
        ValueError: the environment or the arguments name only a part of what is needed, or what can't be.
    """
    env = os.environ if env is None else env
    if auto_mpi_discovery and "RANK" not in env:
        env = {**env, **_from_mpi(env)}
    if world_size == 0:
        raise ValueError("a world has at least one rank: world_size=0; give their number, or -1 to read WORLD_SIZE")
    rank = rank if rank >= 0 else _integer(env, "RANK", -1, least=0)
    world_size = world_size if world_size > 0 else _integer(env, "WORLD_SIZE", -1, least=1)
    if (rank < 0) != (world_size < 0):
        raise ValueError(
            "a rank and the number of ranks go together: "
            f"RANK is {rank if rank >= 0 else 'missing'}, WORLD_SIZE is {world_size if world_size > 0 else 'missing'}; "
            "start through `ds launch`, or set both"
        )
    if rank < 0:
        if init_method is not None and not init_method.startswith("env://"):
            raise ValueError(
                f"init_method {init_method!r} needs to know who is who: pass rank= and world_size=, "
                "or set RANK and WORLD_SIZE"
            )
        rank, world_size, init_method = 0, 1, "local"
    if rank >= world_size:
        raise ValueError(f"ranks count from 0: RANK is {rank} in a world of {world_size}; give 0..{world_size - 1}")
    if init_method in (None, "env://"):
        address, port = env.get("MASTER_ADDR"), _integer(env, "MASTER_PORT", distributed_port, least=0)
        if address is None and world_size > 1:
            raise ValueError(
                "ranks meet at MASTER_ADDR, which is not set; start through `ds launch`, "
                "or set it to the address of rank 0's machine"
            )
        init_method = f"tcp://{_host(address)}:{port}" if address else "local"
    return Rendezvous(
        backend=dist_backend or default_backend(),
        init_method=str(init_method),
        rank=rank,
        world_size=world_size,
        local_rank=_local_rank(env) or 0,
        timeout=timeout or _timeout(config_timeout_s, env),
    )


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Mapping[str, Any] | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Starts the default process group unless it runs already, and takes this rank's device.

    The device is the accelerator whose index is the local rank; where nothing says the local rank, the current one
    stays. Next to a group that runs already (`torch.distributed.init_process_group` under torchrun, say) an index
    other than 0 is the caller's choice and stays too. Index 0 is what every process begins with: left there, all
    ranks of a machine would share one device. A group that was bound to a device (`device_id=`) settles it.

    Args:
        dist_backend: torch's name for a backend. Default: by device (nccl for CUDA, gloo for CPU, …).
        auto_mpi_discovery: take rank and world from an MPI launcher's environment. Default: true.
        distributed_port: port of rank 0 where MASTER_PORT is not set. Default: 29500.
        verbose: log on rank 0 what was started. Default: true.
        timeout: limit for a collective. Default: `config["comm_timeout_s"]`, else the environment's
            DEEPSPEED_TIMEOUT in minutes, else 30 minutes.
        init_method: "env://", "tcp://host:port" or "file:///path". Default: from the environment; a process
            with nothing there is a world of one and opens no port.
        dist_init_required: True fails where the group runs already; False fails where it doesn't;
            None starts it if needed. Default: None.
        config: configuration; `comm_timeout_s` (seconds) is read here.
        rank, world_size: who this process is. Default: RANK and WORLD_SIZE.

    Raises:
        ValueError: half of an identity is given (see `resolve`).
        CommError: `dist_init_required` does not hold, or the ranks did not meet in time.

    Source: DeepSpeed API reference 1.1.3, "Distributed Initialization".
    """
    if dist.is_initialized():
        if dist_init_required:
            raise CommError(
                "dist_init_required=True asks to start the process group, and it runs already; "
                "drop the earlier init_process_group, or pass None"
            )
        _take_device(running=True)
        if timeout is not None or (config or {}).get("comm_timeout_s") is not None:
            logger.warning("the process group runs already and keeps its time limit: the one given here has no effect")
        return
    if dist_init_required is False:
        raise CommError(
            "dist_init_required=False expects a running process group, and there is none; "
            "call torch.distributed.init_process_group first, or pass None"
        )
    meet = resolve(
        dist_backend,
        distributed_port,
        timeout,
        init_method,
        rank,
        world_size,
        (config or {}).get("comm_timeout_s"),
        auto_mpi_discovery,
    )
    _take_device(running=False)
    try:
        if meet.init_method == "local":
            dist.init_process_group(
                meet.backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=meet.timeout
            )
        else:
            dist.init_process_group(
                meet.backend,
                init_method=meet.init_method,
                rank=meet.rank,
                world_size=meet.world_size,
                timeout=meet.timeout,
            )
    except dist.DistError as error:
        raise CommError(
            f"rank {meet.rank} of {meet.world_size} could not meet the others at {meet.init_method}: {error}; "
            "check that every rank was started and the address is reachable"
        ) from error
    if verbose and meet.rank == 0:
        logger.info("process group: %d ranks, backend %s", meet.world_size, meet.backend)


def is_initialized() -> bool:
    """The default process group runs."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in `group` (default: the world); 0 where no group runs."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in `group` (default: the world); 1 where no group runs."""
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """This process's number on its machine: LOCAL_RANK, else what an MPI launcher says, else 0."""
    return _local_rank(os.environ) or 0


def _local_rank(env: Mapping[str, str]) -> int | None:
    """The number on its machine that the environment gives this process, if it does."""
    for key in ("LOCAL_RANK", *(local_key for _, local_key, _ in _MPI.values())):
        if key in env:
            return _integer(env, key, 0, least=0)
    return None


def _take_device(running: bool) -> None:
    """Makes this rank's accelerator the current one. `running`: the group was there before. See `init_distributed`."""
    if device_type() == "cpu" or (running and torch.accelerator.current_device_index() != 0):
        return
    bound = getattr(dist.group.WORLD, "bound_device_id", None) if running else None
    if bound is not None:
        torch.accelerator.set_device_index(bound)
    elif (local_rank := _local_rank(os.environ)) is not None:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())


def _integer(env: Mapping[str, str], key: str, default: int, least: int) -> int:
    text = env.get(key)
    if text is None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(
            f"{key} is a whole number of at least {least}, and the environment has {text!r}; set it right or unset it"
        )
    return number


def _host(address: str) -> str:
    """`address` as it stands in a URL: one of IP version 6 in brackets, which keep its colons from the port's."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _timeout(config_s: float | None, env: Mapping[str, str]) -> timedelta:
    if config_s is not None:
        return timedelta(seconds=config_s)
    minutes = _integer(env, "DEEPSPEED_TIMEOUT", 0, least=0)
    return timedelta(minutes=minutes) if minutes > 0 else DEFAULT_TIMEOUT


def _from_mpi(env: Mapping[str, str]) -> dict[str, str]:
    for rank_key, (size_key, _, local_size_key) in _MPI.items():
        if rank_key in env and size_key in env:
            found = {"RANK": env[rank_key], "WORLD_SIZE": env[size_key]}
            if "MASTER_ADDR" not in env and env.get(local_size_key) == env[size_key]:
                found["MASTER_ADDR"] = "127.0.0.1"  # every rank is on this machine
            return found
    return {}
