"""Executes a launch plan: starts the ranks, passes their output on, and lets none outlive the job.

One thread, one loop. Signals and the ends of ranks wake it through a pipe; the rest is the state
machine in `_advance`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from enum import Enum, auto
from types import FrameType
from typing import Any

from ds_cli.launcher.errors import LaunchError
from ds_cli.launcher.plan import LaunchPlan
from ds_cli.launcher.process import RankLogs, RankProcess, log_files
from ds_cli.launcher.sessions import Guard, members, send_signal
from ds_cli.launcher.streams import RankStream, Sink

_LINGER_S = 1.0
"""How long what a rank started may outlive all ranks: helpers that see their rank end and tidy up."""
_GIVE_UP_S = 5.0
"""How long a killed process may take to vanish. Longer only if it hangs in the kernel."""
_SAME_KEY_S = 0.3
"""Two SIGINTs closer than this are one Ctrl-C that came twice: from the terminal and from a wrapper
(`uv run`, `timeout`, `npm`) that forwards it."""
_TICK_S = 1.0
_SCAN_S = 0.05

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class _Stage(Enum):
    RUNNING = auto()  # no reason to stop
    LINGERING = auto()  # all ranks ended well; something they started is left
    STOPPING = auto()  # asked to stop
    KILLING = auto()  # killed
    OVER = auto()


class Supervisor:
    """Runs one plan once. Needs Linux and the main thread (signals, and the kernel's parent-death signal).

    Args:
        plan: what to run.
        name: what messages begin with.
    """

    def __init__(self, plan: LaunchPlan, name: str = "ds launch") -> None:
        self._plan = plan
        self._name = name
        self._out, self._err = Sink(1), Sink(2)
        self._ranks: list[RankProcess] = []
        self._streams: list[RankStream] = []
        self._guard: Guard | None = None
        self._stage = _Stage.RUNNING
        self._deadline = 0.0
        self._exit_code: int | None = None  # set by the first reason to stop
        self._failed: RankProcess | None = None
        self._signals: list[int] = []
        self._last_interrupt = float("-inf")
        self._warned: set[str] = set()
        self._wake = self._wake_end = self._fd_before = -1

    def run(self) -> int:
        """Runs the job to its end.

        Returns:
            0 if every rank returned 0; otherwise the code of the first rank that failed, 128+n if signal n
            ended it; 130, 143 or 129 after SIGINT, SIGTERM or SIGHUP; 141 if the reader of standard output
            left; 1 if a rank could not be started. No process of the job is alive then.

        Raises:
            LaunchError: the log directory cannot be written, or the system is not Linux.
        """
        if sys.platform != "linux":
            raise LaunchError(
                f"ranks can be supervised on Linux only; this system is {sys.platform!r}. "
                "--dry_run shows the plan on any system."
            )
        logs = log_files(self._plan)
        before = self._take_over_signals()
        try:
            self._start(logs)
            while self._stage is not _Stage.OVER:
                self._pump(self._timeout_s())
                self._look_at_outputs()
                self._look_at_ranks()
                self._obey_signals()
                self._advance()
            for stream in self._streams:
                stream.drain()
            self._streams.clear()
            self._report()
            self._flush()
        finally:
            # After an error of our own too: nothing may be left.
            if self._stage is not _Stage.OVER:
                send_signal(self._sessions(), signal.SIGKILL)
            for rank in self._ranks:
                rank.reap()
            if self._guard is not None:
                self._guard.dismiss()
            self._give_back_signals(before)
        return self._exit_code or 0

    # --- starting

    def _start(self, logs: dict[int, RankLogs]) -> None:
        try:
            self._guard = Guard()
            for plan in self._plan.ranks:
                rank = RankProcess(
                    plan, self._out, self._err, logs.get(plan.rank), whole_lines=len(self._plan.ranks) > 1
                )
                self._ranks.append(rank)
                self._streams.extend(rank.streams)
                self._guard.watch(rank.session)
        except OSError as error:
            self._say(f"rank {len(self._ranks)} could not be started: {error}. Stopping the others.")
            self._stop(1, signal.SIGTERM)

    def _sessions(self) -> set[int]:
        return {rank.session for rank in self._ranks}

    # --- the loop

    def _timeout_s(self) -> float:
        if self._stage is _Stage.RUNNING:
            return _TICK_S
        if any(rank.exit_code is None for rank in self._ranks) and self._stage is _Stage.STOPPING:
            return min(_TICK_S, max(0.0, self._deadline - time.monotonic()))
        return _SCAN_S  # processes that are not our children end without a signal to us

    def _pump(self, timeout_s: float) -> None:
        """Waits until something happens, and moves bytes."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        streams = {stream.fd: stream for stream in self._streams if stream.sink.has_room}
        for fd in streams:
            poll.register(fd, select.POLLIN)
        sinks = {sink.fd: sink for sink in (self._out, self._err) if sink.pending}
        for fd in sinks:
            poll.register(fd, select.POLLOUT)
        for fd, _ in poll.poll(timeout_s * 1000):
            if fd in streams:
                if not streams[fd].pull():
                    self._streams.remove(streams[fd])
            elif fd in sinks:
                sinks[fd].push()
            else:
                os.read(fd, 4096)

    def _look_at_outputs(self) -> None:
        if self._out.reader_left:
            if self._exit_code is None:
                self._say("whoever read the output has gone; stopping all ranks.")
                self._stop(128 + signal.SIGPIPE, signal.SIGTERM)
        elif self._out.error is not None:
            self._warn(f"standard output cannot be written any more ({self._out.error}); the ranks run on.")
        for rank in self._ranks:
            for stream in rank.streams:
                if stream.log_error is not None:
                    self._warn(f"the log of rank {rank.rank} ends here ({stream.log_error}); the ranks run on.")

    def _look_at_ranks(self) -> None:
        for rank in self._ranks:
            if not rank.look() or rank.exit_code == 0 or self._exit_code is not None:
                continue
            assert rank.exit_code is not None
            self._failed = rank
            others = "; stopping the others." if len(self._ranks) > 1 else "."
            self._say(f"rank {rank.rank} of {len(self._ranks)} (pid {rank.session}) {rank.how_it_ended()}{others}")
            self._stop(rank.exit_code, signal.SIGTERM)

    def _obey_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            now = time.monotonic()
            again = now - self._last_interrupt < _SAME_KEY_S
            if number == signal.SIGINT and not again:
                self._last_interrupt = now
            if self._exit_code is None:
                self._say(f"{signal.Signals(number).name} received; stopping all ranks.")
                self._stop(128 + number, number)
            elif number != signal.SIGINT:
                send_signal(self._sessions(), number)
            elif not again and self._stage is not _Stage.KILLING:
                self._say("killing all ranks.")
                self._kill()

    def _stop(self, exit_code: int, number: int) -> None:
        self._exit_code = exit_code
        self._ask(number)

    def _ask(self, number: int) -> None:
        self._stage = _Stage.STOPPING
        self._deadline = time.monotonic() + self._plan.grace_s
        send_signal(self._sessions(), number)

    def _kill(self) -> None:
        self._stage = _Stage.KILLING
        self._deadline = time.monotonic() + _GIVE_UP_S
        send_signal(self._sessions(), signal.SIGKILL)

    def _advance(self) -> None:
        alive = [rank.rank for rank in self._ranks if rank.exit_code is None]
        late = time.monotonic() >= self._deadline
        if not alive and not members(self._sessions()):
            self._stage = _Stage.OVER
        elif self._stage is _Stage.RUNNING:
            if not alive:
                self._stage = _Stage.LINGERING
                self._deadline = time.monotonic() + _LINGER_S
        elif self._stage is _Stage.LINGERING and late:
            left = len(members(self._sessions()))
            self._say(f"all ranks ended, but {left} process(es) that they started run on; stopping these.")
            self._ask(signal.SIGTERM)
        elif self._stage is _Stage.STOPPING and late:
            who = f"rank(s) {', '.join(map(str, alive))}" if alive else "what the ranks started"
            self._say(f"{who} did not stop within {self._plan.grace_s:g} s; killing.")
            self._kill()
        elif self._stage is _Stage.KILLING:
            if late:
                pids = ", ".join(map(str, members(self._sessions())))
                self._say(f"these processes cannot be killed, the kernel holds them: {pids}.")
                self._stage = _Stage.OVER
            else:
                send_signal(self._sessions(), signal.SIGKILL)  # what was forked meanwhile

    # --- the end

    def _report(self) -> None:
        """Shows the end of the failed rank's output, last, so that it does not drown in the others'."""
        rank = self._failed
        # A single rank's last lines stand right above.
        if rank is None or len(self._ranks) == 1:
            return
        lines = rank.tail.lines()
        what = "its last lines:" if lines else "its output is above." if rank.on_terminal else "it printed nothing."
        self._say(f"rank {rank.rank} {rank.how_it_ended()}; {what}")
        for line in lines:
            self._err.write_line(b"    " + line)
        if self._plan.log_dir:
            self._say(f"all of it: {os.path.join(self._plan.log_dir, f'rank_{rank.rank}')}.out and .err")

    def _flush(self) -> None:
        """Writes what is queued. A signal ends it: the reader may have stopped for good."""
        while (self._out.pending or self._err.pending) and not self._signals:
            self._pump(_TICK_S)

    def _say(self, text: str) -> None:
        self._err.write_line(f"{self._name}: {text}".encode("utf-8", "backslashreplace"))

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._say(text)

    # --- signals

    def _take_over_signals(self) -> dict[int, Any]:
        self._wake, self._wake_end = os.pipe()
        for fd in (self._wake, self._wake_end):
            os.set_blocking(fd, False)
        before: dict[int, Any] = {}
        for number in _HANDLED:
            # Under nohup a hang-up is ignored, and stays so.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            before[number] = signal.signal(number, self._on_signal)
        self._fd_before = signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        return before

    def _give_back_signals(self, before: dict[int, Any]) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(self._wake)
        os.close(self._wake_end)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)
