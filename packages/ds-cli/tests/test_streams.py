"""What ranks write arrives: whole, in order, on the right stream, in the logs, and live."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import time
from pathlib import Path

import pytest

from ds_cli.launcher.streams import RankStream, Sink, Tail


def test_one_rank_s_bytes_are_passed_on_exactly(launch) -> None:
    job = launch(
        """
        os.write(1, bytes(range(256)) + b"\\nno end")
        os.write(2, b"half a ")
        os.write(2, b"line")
        """,
        *("--num_gpus", "1"),
    )
    assert job.wait() == 0
    assert job.out == bytes(range(256)) + b"\nno end"
    assert job.err == b"half a line"


def test_a_hundred_thousand_lines_a_rank(launch) -> None:
    job = launch(
        "sys.stdout.write(''.join(f'rank {RANK} line {n}\\n' for n in range(100_000)) + f'end {RANK}')",
        *("--num_gpus", "2"),
    )
    assert job.wait() == 0
    lines = job.out.split(b"\n")
    assert lines.pop() == b""
    for rank in range(2):
        mine = [line for line in lines if line.startswith(b"rank %d " % rank)]
        assert mine == [b"rank %d line %d" % (rank, n) for n in range(100_000)]
    assert len(lines) == 200_002  # no line is mixed with another's, the unfinished ones included


def test_what_a_failing_rank_wrote_last_is_not_lost(launch) -> None:
    job = launch(
        """
        if RANK == 1:
            sys.stdout.write("x" * 60_000 + "\\nlast words")
            sys.stdout.flush()
            os._exit(7)
        time.sleep(600)
        """,
        *("--num_gpus", "2"),
    )
    assert job.wait() == 7
    assert job.out == b"x" * 60_000 + b"\nlast words\n"
    assert job.err.endswith(b"    last words\n")


def test_a_paused_reader_pauses_the_ranks_and_loses_nothing(launch) -> None:
    job = launch(
        """
        os.set_blocking(1, False)
        written, patience = 0, time.monotonic() + 0.5
        while time.monotonic() < patience and written < 64_000_000:
            try:
                written += os.write(1, b"x" * 4096)
                patience = time.monotonic() + 0.5
            except BlockingIOError:
                time.sleep(0.01)
        mark("pid_rank", os.getpid())
        mark("written", written)
        """,
        *("--num_gpus", "1"),
    )
    written = int(job.mark("written"))
    assert written < 8_000_000  # the launcher has stopped reading, instead of filling its memory
    # The rank ends with all buffers full, its own pipe's among them.
    job.until_dead(int(job.mark("pid_rank")))
    assert job.wait() == 0
    assert len(job.out) == written


def test_output_is_live(launch) -> None:
    job = launch(
        """
        print("first", RANK)
        await_mark("go")
        """,
        *("--num_gpus", "2"),
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    # Both lines arrive while both ranks wait.
    assert sorted([job.process.stdout.readline(), job.process.stdout.readline()]) == [
        b"first 0\n",
        b"first 1\n",
    ]
    assert job.process.poll() is None
    (job.folder / "go").write_text("")
    assert job.wait() == 0


def test_logs_are_kept_and_appended_to(launch, tmp_path: Path) -> None:
    for run in ("one", "two"):
        job = launch(
            "print(RANK, sys.argv[1]); print('warn', RANK, file=sys.stderr); sys.exit(RANK)",
            *("--num_gpus", "2", "--log_dir", "deep/logs", "--no_local_rank"),
            args=(run,),
        )
        assert job.wait() == 1
        assert b"all of it: deep/logs/rank_1.out and .err" in job.err
    logs = tmp_path / "deep" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == [
        "rank_0.err",
        "rank_0.out",
        "rank_1.err",
        "rank_1.out",
    ]
    assert (logs / "rank_1.out").read_text() == "1 one\n1 two\n"
    assert (logs / "rank_1.err").read_text() == "warn 1\nwarn 1\n"


def test_a_full_disk_does_not_end_the_ranks(launch, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.out").symlink_to("/dev/full")
    job = launch("print('hello'); time.sleep(0.3); print('world')", *("--num_gpus", "1", "--log_dir", "logs"))
    assert job.wait() == 0
    assert job.out == b"hello\nworld\n"
    assert job.err.count(b"the log of rank 0 ends here") == 1


class Terminal:
    """A terminal with a launcher in its foreground."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(cwd)
                os.execv(command[0], command)
            finally:
                os._exit(99)
        self.seen = b""

    def read_until(self, text: bytes) -> None:
        end = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 4096)

    def code(self) -> int:
        end = time.monotonic() + 60
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.fd, 4096)
                except OSError:  # all its users have gone
                    time.sleep(0.01)


@pytest.fixture
def terminal(scripts_dir: Path, tmp_path: Path):
    """`terminal(code, *options)`: `ds launch` in a terminal of its own."""
    open_terminals: list[Terminal] = []

    def start(code: str, *options: str) -> Terminal:
        (tmp_path / "script.py").write_text("import os, sys, time\nRANK = os.environ['RANK']\n" + code)
        open_terminals.append(Terminal([str(scripts_dir / "ds"), "launch", *options, "script.py"], tmp_path))
        return open_terminals[-1]

    yield start
    for each in open_terminals:
        os.close(each.fd)
        try:
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


WHO = "print('rank', RANK, [os.isatty(fd) for fd in (0, 1, 2)], flush=True)\n"


def test_rank_0_has_the_terminal(terminal) -> None:
    job = terminal(WHO + "if RANK == '0': print('said', input('question? '))", "--num_gpus", "2")
    job.read_until(b"rank 1 [False, False, False]")
    job.read_until(b"rank 0 [True, True, True]")
    job.read_until(b"question? ")
    os.write(job.fd, b"answer\n")
    job.read_until(b"said answer")
    assert job.code() == 0


def test_with_logs_rank_0_has_pipes(terminal, tmp_path: Path) -> None:
    job = terminal(WHO, "--num_gpus", "1", "--log_dir", "logs")
    job.read_until(b"rank 0 [True, False, False]")
    assert job.code() == 0
    assert (tmp_path / "logs" / "rank_0.out").read_text() == "rank 0 [True, False, False]\n"


def test_control_c_in_a_terminal_arrives_once(terminal) -> None:
    code = """
import signal
count = 0
def note(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, note)
print("ready", RANK, flush=True)
end = time.monotonic() + 600
while not count and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.5)
print(f"rank {RANK} counted {count}", flush=True)
"""
    job = terminal(code, "--num_gpus", "2", "--grace_s", "60")
    job.read_until(b"ready 0")
    job.read_until(b"ready 1")
    os.write(job.fd, b"\x03")
    job.read_until(b"rank 0 counted 1")
    job.read_until(b"rank 1 counted 1")
    assert job.code() == 130


# --- the parts, by hand


@pytest.fixture
def pipe():
    ends = list(os.pipe())
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def flush(sink: Sink) -> None:
    while sink.pending:
        sink.push()


def test_a_progress_bar_is_passed_on_at_each_return(pipe, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as file:
        sink, tail = Sink(file.fileno()), Tail()
        stream = RankStream(pipe[0], sink, tail, whole_lines=True)
        os.write(pipe[1], b"10%\r20%\r30")
        assert stream.pull()
        flush(sink)
        assert (tmp_path / "out").read_bytes() == b"10%\r20%\r"
        os.close(pipe[1])
        assert not stream.pull()
        flush(sink)
        assert (tmp_path / "out").read_bytes() == b"10%\r20%\r30\n"
        assert tail.lines() == [b"30"]


def test_a_line_without_end_is_not_held_for_ever(pipe, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as file:
        sink = Sink(file.fileno())
        stream = RankStream(pipe[0], sink, Tail(), whole_lines=True)
        for _ in range(3):
            os.write(pipe[1], b"x" * 30_000)
            assert stream.pull()
        flush(sink)
        assert (tmp_path / "out").stat().st_size == 90_000
        stream.close()


def test_our_lines_start_on_a_line(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as file:
        sink = Sink(file.fileno())
        sink.write_line(b"ours")
        sink.write(b"a rank's")
        sink.write_line(b"ours")
        flush(sink)
    assert (tmp_path / "out").read_bytes() == b"ours\na rank's\nours\n"


def test_a_sink_says_when_it_is_full_and_when_its_reader_left(pipe) -> None:
    sink = Sink(pipe[1])
    while sink.has_room:
        sink.write(b"x" * 100_000)
    sink.push()
    assert os.read(pipe[0], 1_000_000) == b"x" * select.PIPE_BUF
    assert not sink.reader_left
    os.close(pipe[0])
    sink.push()
    assert sink.reader_left
    assert not sink.pending
    assert sink.has_room
    sink.write(b"dropped")
    assert not sink.pending


def test_what_lies_in_the_pipe_of_the_dead_is_read_while_others_hold_it(pipe, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as file:
        sink = Sink(file.fileno())
        stream = RankStream(pipe[0], sink, Tail(), whole_lines=False)
        os.write(pipe[1], b"last words")
        stream.drain()  # the writing end is still open
        flush(sink)
        assert (tmp_path / "out").read_bytes() == b"last words"
