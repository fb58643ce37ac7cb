"""CPU cores: which there are, lists of them as text, and how ranks share them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ds_cli.launcher.errors import LaunchError

_SYSTEM = Path("/sys/devices/system")


def parse_core_list(text: str) -> tuple[int, ...]:
    """Cores that a list such as `0-3,8,10-11` names, in its order.

    Raises:
        LaunchError: the list is malformed, or names a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise LaunchError(
                "a core list is numbers and rising ranges joined by commas; "
                f"{part!r} in {text!r} is neither. Write it as in 0-3,8,10-11."
            )
        cores.extend(range(int(first), int(last or first) + 1))
    if len(set(cores)) != len(cores):
        twice = next(core for core in cores if cores.count(core) > 1)
        raise LaunchError(f"a core list must name each core once; {text!r} names {twice} twice.")
    return tuple(cores)


def format_core_list(cores: Sequence[int]) -> str:
    """The shortest list that `parse_core_list` reads as `cores`: `(0, 1, 2, 8)` is `0-2,8`."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def read_numa_nodes(allowed: Collection[int], system: Path = _SYSTEM) -> tuple[tuple[int, ...], ...]:
    """One CPU of each physical core, grouped by NUMA node.

    Of the hyperthreads of a core only the first allowed one is kept: two compute threads on one core
    slow each other down.

    Args:
        allowed: the CPUs this process may run on.
        system: where the kernel describes the machine.

    Returns:
        Nodes in order, without empty ones. One node with all of `allowed` where the kernel says nothing.
    """
    taken: set[int] = set()
    physical: list[int] = []
    for cpu in sorted(allowed):
        if cpu not in taken:
            physical.append(cpu)
            taken.add(cpu)
            taken.update(_read_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list"))
    nodes = []
    folders = [p for p in system.glob("node/node*") if p.name.removeprefix("node").isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name.removeprefix("node"))):
        members = set(_read_list(folder / "cpulist"))
        if cpus := tuple(cpu for cpu in physical if cpu in members):
            nodes.append(cpus)
    if sum(map(len, nodes)) != len(physical):
        return (tuple(physical),)
    return tuple(nodes)


def _read_list(path: Path) -> tuple[int, ...]:
    try:
        text = path.read_text().strip()
        return parse_core_list(text) if text else ()
    except (OSError, LaunchError):
        return ()


def split_cores(nodes: Sequence[Sequence[int]], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Divides cores evenly among ranks; what does not divide stays idle, so that no rank is slower.

    If the ranks divide evenly among the NUMA nodes, no rank spans two nodes.

    Args:
        nodes: cores, grouped by NUMA node.
        num_ranks: number of ranks.

    Raises:
        LaunchError: fewer cores than ranks.
    """
    total = sum(map(len, nodes))
    if total < num_ranks:
        named = format_core_list([core for node in nodes for core in node])
        raise LaunchError(
            "binding cores takes at least one core a rank; "
            f"there are {num_ranks} ranks for {total} cores ({named}). Start fewer ranks or name more cores."
        )
    per_node = num_ranks // len(nodes)
    if num_ranks % len(nodes) == 0 and all(len(node) >= per_node for node in nodes):
        # The smallest share counts for all: the ranks wait for each other anyway.
        share = min(len(node) // per_node for node in nodes)
        return tuple(tuple(node[index * share : (index + 1) * share]) for node in nodes for index in range(per_node))
    flat = [core for node in nodes for core in node]
    share = total // num_ranks
    return tuple(tuple(flat[rank * share : (rank + 1) * share]) for rank in range(num_ranks))
