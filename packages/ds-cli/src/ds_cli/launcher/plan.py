"""The launch plan: what each rank runs, with what environment, on which cores. Making it starts nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ds_cli.launcher.accelerators import visible_devices
from ds_cli.launcher.cores import format_core_list, parse_core_list, split_cores
from ds_cli.launcher.errors import LaunchError
from ds_cli.launcher.machine import Machine
from ds_cli.launcher.options import LaunchOptions
from ds_cli.launcher.ports import choose_port
from ds_cli.launcher.resources import choose_slots


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One process to start."""

    rank: int
    """Number of the rank, from 0."""
    command: tuple[str, ...]
    """Program and arguments."""
    env: Mapping[str, str]
    """Variables to set over the launcher's own environment. Read-only."""
    cores: tuple[int, ...] | None
    """CPUs to bind the process to; None: not bound."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A job on one machine, ready to be started by `Supervisor`."""

    ranks: tuple[RankPlan, ...]
    """One entry a rank, by rank."""
    master_addr: str
    """Where the ranks meet."""
    master_port: int
    """Where the ranks meet."""
    log_dir: str | None
    """Directory that also receives the ranks' output; None: no such copy."""
    grace_s: float
    """Seconds between asking ranks to stop and killing them."""

    @classmethod
    def build(cls, options: LaunchOptions, machine: Machine, environ: Mapping[str, str]) -> LaunchPlan:
        """Plans the job that `options` ask for.

        Args:
            options: what the user asked.
            machine: where it will run.
            environ: the launcher's environment. CUDA_VISIBLE_DEVICES limits the GPUs, and an
                OMP_NUM_THREADS or PYTHONUNBUFFERED that is there is kept.

        Raises:
            LaunchError: the job cannot be launched as asked.
        """
        program = _program(options)
        binds = options.bind_cores_to_rank or bool(options.bind_core_list)
        devices = visible_devices(machine.num_gpus, environ.get("CUDA_VISIBLE_DEVICES"))
        # Documented: --bind_cores_to_rank alone starts a CPU rank for each NUMA node.
        num_default = len(machine.numa_nodes) if binds and not options.bind_core_list else 1
        slots = choose_slots(options, machine.hostnames, len(devices), num_default)
        cores = _cores(options, machine, len(slots)) if binds else None
        port = choose_port(options.master_port, machine.port_is_free)

        ranks = []
        for rank in range(len(slots)):
            env = _rendezvous(rank, len(slots), options.master_addr, port)
            if devices:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot] for slot in slots)
            if cores is not None:
                # Over the user's own: more threads than bound cores would fight for them.
                env["OMP_NUM_THREADS"] = str(len(cores[rank]))
            elif "OMP_NUM_THREADS" not in environ:
                env["OMP_NUM_THREADS"] = str(max(1, len(machine.cpus) // len(slots)))
            if "PYTHONUNBUFFERED" not in environ:
                # Into a pipe Python writes by blocks: hours late, and lost if the rank is killed.
                env["PYTHONUNBUFFERED"] = "1"
            # Before the script's own arguments: these may hold a `--`, after which nothing is an option.
            local_rank = () if options.no_local_rank else (f"--local_rank={rank}",)
            ranks.append(
                RankPlan(
                    rank=rank,
                    command=(*program, *local_rank, *options.script_args),
                    env=MappingProxyType(env),
                    cores=None if cores is None else cores[rank],
                )
            )
        return cls(
            ranks=tuple(ranks),
            master_addr=options.master_addr,
            master_port=port,
            log_dir=options.log_dir or None,
            grace_s=options.grace_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain lists, dicts, strings and numbers."""
        return {
            "world_size": len(self.ranks),
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "log_dir": self.log_dir,
            "grace_s": self.grace_s,
            "ranks": [
                {
                    "rank": each.rank,
                    "command": list(each.command),
                    "env": dict(each.env),
                    "cores": None if each.cores is None else list(each.cores),
                }
                for each in self.ranks
            ],
        }

    def to_json(self) -> str:
        """The plan as indented JSON, in ASCII."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self) -> str:
        """The plan for a reader: each rank's environment and a command that a shell would take."""
        lines = [f"{len(self.ranks)} rank(s), meeting at {self.master_addr}:{self.master_port}"]
        if self.log_dir:
            lines.append(f"output also in {self.log_dir}")
        for each in self.ranks:
            where = "" if each.cores is None else f" on cores {format_core_list(each.cores)}"
            lines.append(f"rank {each.rank}{where}")
            lines.extend(f"  {name}={shlex.quote(value)}" for name, value in each.env.items())
            lines.append(f"  {shlex.join(each.command)}")
        # Arguments that are not UTF-8 arrive as surrogates, which no terminal can print.
        return "\n".join(lines).encode("utf-8", "backslashreplace").decode("utf-8")


def _program(options: LaunchOptions) -> tuple[str, ...]:
    """What to run, before any argument. Checks that it is there."""
    if options.no_python:
        if shutil.which(options.script) is None:
            raise LaunchError(
                f"--no_python needs an executable file or a command on PATH; {options.script!r} is neither. "
                "Check the name, or make the file executable (chmod +x)."
            )
        return (options.script,)
    if options.module:
        return (sys.executable, "-m", options.script)
    if not os.path.exists(options.script):
        raise LaunchError(
            f"SCRIPT must be a file that exists; {options.script!r} is none in {os.getcwd()}. "
            "Check the path; for a module use --module, for another program --no_python. "
            "The launcher's own options go before SCRIPT."
        )
    return (sys.executable, options.script)


def _rendezvous(rank: int, world_size: int, master_addr: str, master_port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        # The names that DeepSpeed users' scripts read: ranks within the machine, and machines.
        "LOCAL_SIZE": str(world_size),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
    }


def _cores(options: LaunchOptions, machine: Machine, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    if not machine.can_bind:
        raise LaunchError("--bind_cores_to_rank needs a system that can bind processes (Linux). Leave it out.")
    if not options.bind_core_list:
        return split_cores(machine.numa_nodes, num_ranks)
    cores = parse_core_list(options.bind_core_list)
    if missing := [core for core in cores if core not in machine.cpus]:
        raise LaunchError(
            f"--bind_core_list can name the CPUs this process may use ({format_core_list(machine.cpus)}); "
            f"{options.bind_core_list!r} also names {format_core_list(missing)}. Name others."
        )
    return split_cores((cores,), num_ranks)
