"""Which slots a job uses: the grammar of --include and --exclude, and the choice.

A slot is a place for one rank: the n-th visible GPU, or just a number on a machine without GPUs.
"""

from __future__ import annotations

from collections.abc import Collection

from ds_cli.launcher.errors import LaunchError
from ds_cli.launcher.options import LaunchOptions


def parse_slots(option: str, text: str, hostnames: Collection[str]) -> tuple[int, ...] | None:
    """Slots that `HOST:SLOT[,SLOT...]` names, in its order; None if it names a host and no slots.

    Args:
        option: the option's name, for messages.
        text: its value. The grammar is `HOST[:SLOT[,SLOT...]]`; several hosts are joined by `@`.
        hostnames: names by which this machine is known.

    Raises:
        LaunchError: another host, or several; a slot that is no number, or is named twice.
    """
    hosts = text.split("@")
    if len(hosts) > 1:
        raise LaunchError(
            f"{option} can name one machine only, not yet several; it is {text!r}. "
            f"Keep the part of this machine, as in {option} localhost:0,1."
        )
    host, colon, listing = hosts[0].partition(":")
    if host not in hostnames:
        raise LaunchError(
            f"{option} can name this machine only ({', '.join(sorted(hostnames))}), not yet another; "
            f"it is {text!r}. Write {option} localhost{colon}{listing}."
        )
    if not colon:
        return None
    slots: list[int] = []
    for part in listing.split(","):
        if not part.strip().isdecimal():
            raise LaunchError(
                f"slots in {option} are numbers joined by commas; {part!r} in {text!r} is none. "
                f"Write it as in {option} localhost:0,1."
            )
        slot = int(part)
        if slot in slots:
            raise LaunchError(f"{option} must name each slot once; it is {text!r}. Remove the second {slot}.")
        slots.append(slot)
    return tuple(slots)


def choose_slots(
    options: LaunchOptions, hostnames: Collection[str], num_visible: int, num_default: int
) -> tuple[int, ...]:
    """The slot of each rank.

    Args:
        options: `num_gpus`, `include` and `exclude` are read.
        hostnames: names by which this machine is known.
        num_visible: number of visible GPUs.
        num_default: number of ranks on a machine without GPUs, when no number is asked for.

    Raises:
        LaunchError: a slot that does not exist, more GPUs than there are, or nothing left.
    """
    num_slots = num_visible or num_default
    if options.num_gpus is not None:
        if num_visible and options.num_gpus > num_visible:
            raise LaunchError(
                f"--num_gpus cannot exceed the {num_visible} visible GPUs of this machine; "
                f"it is {options.num_gpus}. Ask for fewer, or widen CUDA_VISIBLE_DEVICES."
            )
        return tuple(range(options.num_gpus))
    if options.include:
        included = parse_slots("--include", options.include, hostnames)
        if included is None:
            return tuple(range(num_slots))
        # Without GPUs a slot is only a number: naming two asks for two CPU ranks.
        if num_visible:
            _must_exist("--include", options.include, included, num_visible)
        return included
    if options.exclude:
        excluded = parse_slots("--exclude", options.exclude, hostnames)
        if excluded is None:
            excluded = tuple(range(num_slots))
        _must_exist("--exclude", options.exclude, excluded, num_slots)
        left = tuple(slot for slot in range(num_slots) if slot not in excluded)
        if not left:
            raise LaunchError(
                f"--exclude must leave a slot to run on; {options.exclude!r} excludes all {num_slots}. Exclude fewer."
            )
        return left
    return tuple(range(num_slots))


def _must_exist(option: str, text: str, slots: Collection[int], num_slots: int) -> None:
    for slot in slots:
        if slot >= num_slots:
            raise LaunchError(
                f"slots in {option} count from 0 to {num_slots - 1} on this machine (within "
                f"CUDA_VISIBLE_DEVICES if that is set); {text!r} names {slot}. Name slots that exist."
            )
