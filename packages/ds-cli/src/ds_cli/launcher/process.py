"""One rank as a running process: started from its plan, looked at, and reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import BinaryIO

from ds_cli.launcher import rank_exec
from ds_cli.launcher.errors import LaunchError
from ds_cli.launcher.plan import LaunchPlan, RankPlan
from ds_cli.launcher.streams import RankStream, Sink, Tail

RankLogs = tuple[BinaryIO, BinaryIO]
"""Files that receive a rank's standard output and standard error."""


def log_files(plan: LaunchPlan) -> dict[int, RankLogs]:
    """Opens `rank_N.out` and `rank_N.err` in the plan's log directory, by rank; none if it has none.

    They are appended to: a second run must not erase why the first one failed.

    Raises:
        LaunchError: the directory cannot be made or written.
    """
    if plan.log_dir is None:
        return {}
    logs: dict[int, RankLogs] = {}
    with ExitStack() as opened:
        try:
            os.makedirs(plan.log_dir, exist_ok=True)
            for each in plan.ranks:
                out, err = (
                    opened.enter_context(open(os.path.join(plan.log_dir, f"rank_{each.rank}.{end}"), "ab", buffering=0))
                    for end in ("out", "err")
                )
                logs[each.rank] = (out, err)
        except OSError as error:
            raise LaunchError(
                f"--log_dir must be a directory that can be written; {plan.log_dir!r} is none "
                f"({error.strerror}). Give another."
            ) from error
        opened.pop_all()
    return logs


class RankProcess:
    """A started rank. It leads its own session, whose id is its process id.

    Rank 0 reads the launcher's standard input, the others read nothing. Where the launcher's output is a
    terminal and no log is kept, rank 0 has that terminal itself and not a pipe: progress bars, live views
    and the debugger work as without a launcher, and there is no copy of what it wrote.

    Args:
        plan: what to start.
        out, err: where its output goes on to.
        logs: files that receive it too.
        whole_lines: pass lines on whole (see `RankStream`).

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, plan: RankPlan, out: Sink, err: Sink, logs: RankLogs | None, whole_lines: bool) -> None:
        self.rank = plan.rank
        self.tail = Tail()
        self.exit_code: int | None = None
        """As a shell has it: 128+n if signal n ended it. None while it runs."""
        self._by_signal = False
        self.on_terminal = False
        """Whether some of its output went straight to the terminal."""
        self.streams: list[RankStream] = []
        ends: list[int | None] = []
        ours: list[int] = []
        try:
            for sink in (out, err):
                if plan.rank == 0 and logs is None and os.isatty(sink.fd):
                    ends.append(None)
                    self.on_terminal = True
                    continue
                read_end, write_end = os.pipe()
                ours.append(read_end)
                ends.append(write_end)
            self._process = subprocess.Popen(
                _wrapped(plan),
                stdin=None if plan.rank == 0 else subprocess.DEVNULL,
                stdout=ends[0],
                stderr=ends[1],
                env={**os.environ, **plan.env},
                # Its own session: the terminal's Ctrl-C reaches the launcher alone, which passes it on, and
                # all that the rank starts can be found.
                start_new_session=True,
            )
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for end in ends:
                if end is not None:
                    os.close(end)
        self.session = self._process.pid
        sinks = [sink for sink, end in zip((out, err), ends) if end is not None]
        for index, (fd, sink) in enumerate(zip(ours, sinks)):
            log = None if logs is None else logs[index]
            self.streams.append(RankStream(fd, sink, self.tail, log, whole_lines))

    def look(self) -> bool:
        """Whether it has ended since the last look; `exit_code` is set then.

        It is left a zombie: that keeps its number, and so its session's, from being given to a stranger
        whom we would signal later.
        """
        if self.exit_code is not None:
            return False
        ended = os.waitid(os.P_PID, self.session, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        self.exit_code = ended.si_status + (0 if ended.si_code == os.CLD_EXITED else 128)
        self._by_signal = ended.si_code != os.CLD_EXITED
        return True

    def how_it_ended(self) -> str:
        """`exited with code 3`, or `was killed by SIGKILL` and what that usually means."""
        assert self.exit_code is not None
        if not self._by_signal:
            return f"exited with code {self.exit_code}"
        number = self.exit_code - 128
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        hint = " (often the kernel, out of memory: see dmesg)" if number == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"

    def reap(self) -> None:
        """Lets the ended process go. Its number may be another's from now on."""
        # Without an end only where the kernel holds a killed process.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)


def _wrapped(plan: RankPlan) -> list[str]:
    cores = "" if plan.cores is None else ",".join(map(str, plan.cores))
    # -I -S: nothing of the user's environment, such as a PYTHONSTARTUP, runs twice.
    return [sys.executable, "-I", "-S", rank_exec.__file__, str(os.getpid()), cores, *plan.command]
