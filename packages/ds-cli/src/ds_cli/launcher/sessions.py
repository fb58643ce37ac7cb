"""Sessions of processes: who is in them, how to signal them, and a guard that outlives the launcher.

Every rank leads a session of its own. A session is wider than a process group: a shell with job control
or `timeout` moves its children to new groups, but they stay in the session. Only a process that makes
a session for itself (`setsid`, a daemon) leaves, and that one has asked to outlive its rank.

Run as a script this file is the guard, hence the standard library only: it runs isolated
(`python -I -S`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection


def members(sessions: Collection[int]) -> dict[int, int]:
    """The living processes of `sessions` (ids of their leaders): process id -> process group id."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        pid = int(name)
        try:
            if os.getsid(pid) not in sessions:
                continue
            with open(f"/proc/{pid}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it ended meanwhile
        # `pid (name) state parent group session ...`, where the name may hold spaces and parentheses.
        state, _, group, session = stat.rpartition(b")")[2].split()[:4]
        # A zombie is dead: it waits for its parent, which may never look.
        if state not in (b"Z", b"X") and int(session) in sessions:
            found[pid] = int(group)
    return found


def send_signal(sessions: Collection[int], number: int) -> bool:
    """Sends a signal to all process groups of `sessions`. Returns whether there was anyone to send it to.

    By group and not by process, so that a process that forks at this moment does not escape.
    """
    groups = set(members(sessions).values())
    for group in groups:
        # Gone meanwhile, or it runs as another user: neither is in our hand.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    return bool(groups)


class Guard:
    """A small process that kills the watched sessions if the launcher dies before it can, by SIGKILL say.

    The kernel already kills the ranks then (rank_exec.py), but not what they have started.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            # It must not keep the launcher's own output open after the launcher.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def watch(self, session: int) -> None:
        """Adds a session."""
        self._tell(f"{session}\n")

    def dismiss(self) -> None:
        """Ends the guard: the sessions are empty."""
        self._tell("done\n")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # If someone killed the guard the job goes on: it is the second net, not the first.
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    """The guard: learns sessions from standard input; kills them if it ends without a last word."""
    # A scheduler that ends a job signals every process in it. The guard must see the launcher out.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin.buffer:
        if line == b"done\n":
            return
        sessions.add(int(line))
    deadline = time.monotonic() + 10
    while send_signal(sessions, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
