"""The port at which the ranks meet."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from ds_cli.launcher.errors import LaunchError

DEFAULT_PORT = 29500
"""The documented default of --master_port."""


def port_is_free(port: int) -> bool:
    """Whether this machine can listen at `port` on all its addresses, as rank 0 will."""
    families = [(socket.AF_INET, "0.0.0.0")]
    if socket.has_ipv6:
        families.append((socket.AF_INET6, "::"))
    for family, address in families:
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        with probe:
            # A port whose last connections are still winding down (TIME_WAIT) is free for a listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if family == socket.AF_INET6 and not _is_taken(error):
                    continue  # IPv6 compiled in but switched off
                return False
    return True


def _is_taken(error: OSError) -> bool:
    import errno

    return error.errno in (errno.EADDRINUSE, errno.EACCES)


def free_port() -> int:
    """A port the kernel says is free now. Another process may take it before rank 0 does."""
    for _ in range(64):
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.bind(("0.0.0.0", 0))
            port = int(probe.getsockname()[1])
        if port_is_free(port):
            return port
    raise LaunchError("the ranks need a free port to meet at, and none was found. Give one with --master_port.")


def choose_port(asked: int | None, is_free: Callable[[int], bool] = port_is_free) -> int:
    """The port at which the ranks meet.

    Args:
        asked: the user's choice, or None for 29500 if it is free and any free port otherwise.
        is_free: tells whether a port can be listened at.

    Raises:
        LaunchError: the port that the user chose is taken.
    """
    if asked is None:
        return DEFAULT_PORT if is_free(DEFAULT_PORT) else free_port()
    if not is_free(asked):
        raise LaunchError(
            f"--master_port must be a port nothing listens at; {asked} is taken or not permitted. "
            "Give another, or leave it out to have a free one chosen."
        )
    return asked
