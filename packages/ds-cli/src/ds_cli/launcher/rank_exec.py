"""Becomes a rank. Run as a script: `rank_exec.py LAUNCHER_PID CORES COMMAND...`; CORES is `0,1` or empty.

What must happen in the rank's process before its program starts happens here, in a process of its own
that then becomes the program (exec), and not between fork and exec of the launcher: there Python code
may deadlock as soon as any thread lives in the launcher. Standard library only, since it runs isolated
from the user's environment (`python -I -S`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ties this process to the launcher, binds it to its cores and becomes the command.

    Exits with 126 if the command cannot be run, 127 if it is not found, as shells do.
    """
    # Python ignores SIGPIPE and SIGXFSZ, and an exec passes on what is ignored.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    launcher, cores, command = int(arguments[0]), arguments[1], arguments[2:]
    # The kernel kills this process when the launcher dies, however it dies. An exec keeps that, a fork
    # does not: the rank's own children are the guard's (sessions.py).
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGKILL)  # it died before the call above
    try:
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]!r}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
