"""What the user asked of the launcher."""

from __future__ import annotations

from dataclasses import dataclass

from ds_cli.launcher.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The launcher's options, one field each.

    Raises:
        LaunchError: two options contradict each other, or a number is out of its range.
    """

    script: str
    """Path of a Python script; name of a module with `module`; an executable with `no_python`."""
    script_args: tuple[str, ...] = ()
    """The script's own arguments, passed untouched."""
    num_gpus: int | None = None
    """Number of ranks. None: one for each visible GPU, or 1 where there is none."""
    num_nodes: int = 1
    """Number of machines. Only 1."""
    include: str = ""
    """The GPUs to use, as `localhost:0,1`. Empty: all."""
    exclude: str = ""
    """The GPUs not to use, as `localhost:0`. Empty: none."""
    master_addr: str = "127.0.0.1"
    """Address at which the ranks meet."""
    master_port: int | None = None
    """Port at which the ranks meet, 1 to 65535. None: 29500, or a free one if that is taken."""
    module: bool = False
    """`script` is a module, run as `python -m`."""
    no_python: bool = False
    """`script` is an executable, run as it is."""
    no_local_rank: bool = False
    """Do not pass `--local_rank=N` to the script."""
    bind_cores_to_rank: bool = False
    """Give each rank CPU cores of its own."""
    bind_core_list: str = ""
    """The cores to divide among the ranks, as `0-3,8,10-11`. Empty: the machine's physical cores."""
    log_dir: str = ""
    """Directory that also receives each rank's output. Empty: none."""
    grace_s: float = 5.0
    """Seconds between asking ranks to stop and killing them."""

    def __post_init__(self) -> None:
        if self.num_nodes != 1:
            raise LaunchError(
                f"only one machine can be launched on, not yet several; --num_nodes is {self.num_nodes}. "
                "Leave it out or give 1."
            )
        if self.num_gpus is not None and self.num_gpus < 1:
            raise LaunchError(
                f"--num_gpus must be at least 1; it is {self.num_gpus}. "
                "Leave it out to use every GPU, or give the number of ranks."
            )
        if self.include and self.exclude:
            raise LaunchError(
                "--include and --exclude cannot be combined; "
                f"they are {self.include!r} and {self.exclude!r}. Keep one of them."
            )
        if self.num_gpus is not None and (self.include or self.exclude):
            chosen = f"--include {self.include}" if self.include else f"--exclude {self.exclude}"
            raise LaunchError(
                "--num_gpus cannot be combined with --include or --exclude, which already say how many ranks "
                f"there are; they are {self.num_gpus} and {chosen}. Keep one of them."
            )
        if self.module and self.no_python:
            raise LaunchError(
                "--module runs SCRIPT with Python and --no_python without; both were given. Keep one of them."
            )
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise LaunchError(
                f"--master_port must be from 1 to 65535; it is {self.master_port}. "
                "Give another, or leave it out to have a free one chosen."
            )
        if not self.grace_s >= 0:  # not `< 0`: also refuses NaN
            raise LaunchError(f"--grace_s must be 0 or more seconds; it is {self.grace_s}.")
        if not self.script:
            raise LaunchError("SCRIPT must name what to run; it is empty. Give the path of a script.")
