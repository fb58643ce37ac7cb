"""The executor, by launching real processes: failures, signals, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLEEP = "time.sleep(600)\n"

# A rank and a grandchild that shrug SIGTERM and SIGINT off; the grandchild in a process group of its own,
# as under `timeout` or a shell with job control.
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
mark(f"pid_child{RANK}", child.pid)
mark(f"pid_rank{RANK}", os.getpid())
"""


def pids(job, ranks: int) -> list[int]:
    return [int(job.mark(f"pid_{what}{rank}")) for rank in range(ranks) for what in ("child", "rank")]


# --- failures


def test_all_well(launch) -> None:
    job = launch("print('out', RANK); print('err', RANK, file=sys.stderr)", "--num_gpus", "3")
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == [b"out 0", b"out 1", b"out 2"]
    assert sorted(job.err.splitlines()) == [b"err 0", b"err 1", b"err 2"]


def test_the_first_failure_stops_the_others(launch) -> None:
    job = launch(
        """
        mark(f"pid_{RANK}", os.getpid())
        for other in range(3):
            await_mark(f"pid_{other}")
        if RANK == 1:
            print("to stdout")
            raise SystemExit("something broke")
        time.sleep(600)
        """,
        *("--num_gpus", "3", "--grace_s", "600"),
    )
    assert job.wait() == 1  # long before the sleep and the grace end
    first, *report = job.err.decode().partition("something broke\n")[2].splitlines()
    assert first.startswith("ds launch: rank 1 of 3 (pid ")
    assert first.endswith("exited with code 1; stopping the others.")
    assert report[0] == "ds launch: rank 1 exited with code 1; its last lines:"
    assert sorted(report[1:]) == ["    something broke", "    to stdout"]
    job.until_dead(*(int(job.mark(f"pid_{rank}")) for rank in range(3)))


def test_the_report_has_the_last_lines_only(launch) -> None:
    job = launch(
        """
        if RANK == 1:
            for n in range(1000):
                print(f"\\x1b[31mline {n}\\x1b[0m")
            print("50%\\r100%\\r")
            print("no end", end="")
            sys.exit(9)
        time.sleep(600)
        """,
        *("--num_gpus", "2"),
    )
    assert job.wait() == 9
    report = job.err.decode().partition("its last lines:\n")[2].splitlines()
    assert report == [f"    line {n}" for n in range(982, 1000)] + ["    100%", "    no end"]


def test_a_single_rank_is_not_repeated(launch) -> None:
    job = launch("sys.exit('broke')", "--num_gpus", "1")
    assert job.wait() == 1
    assert job.err.count(b"broke") == 1
    assert b"rank 0 of 1" in job.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_by_signal(launch, number: signal.Signals) -> None:
    job = launch(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if RANK == 1:
            os.kill(os.getpid(), {int(number)})
        time.sleep(600)
        """,
        *("--num_gpus", "2"),
    )
    assert job.wait() == 128 + number
    assert "rank 1 of 2 (pid " in job.err.decode()
    assert f"was killed by {number.name}" in job.err.decode()


def test_a_failure_ends_what_ignores_sigterm(launch) -> None:
    job = launch(
        STUBBORN + "if RANK == 1:\n    await_mark('pid_rank0')\n    sys.exit(5)\n" + SLEEP,
        *("--num_gpus", "2", "--grace_s", "0.5"),
    )
    everyone = pids(job, 2)
    assert job.wait() == 5
    job.until_dead(*everyone)
    assert b"rank(s) 0 did not stop within 0.5 s; killing." in job.err


def test_ranks_may_tidy_up_when_asked_to_stop(launch) -> None:
    job = launch(
        """
        def tidy(*_):
            time.sleep(0.5)
            mark("tidied")
            sys.exit(0)
        if RANK == 0:
            signal.signal(signal.SIGTERM, tidy)
            mark("ready")
            time.sleep(600)
        await_mark("ready")
        sys.exit(4)
        """,
        *("--num_gpus", "2", "--grace_s", "60"),
    )
    assert job.wait() == 4
    assert (job.folder / "tidied").exists()


def test_a_paused_reader_does_not_pause_the_supervision(launch) -> None:
    job = launch(
        """
        mark(f"pid_rank{RANK}", os.getpid())
        if RANK == 0:
            while True:
                os.write(1, b"x" * 4095 + b"\\n")
        await_mark("fail")
        sys.exit(6)
        """,
        *("--num_gpus", "2"),
    )
    rank0 = int(job.mark("pid_rank0"))
    time.sleep(0.5)  # all buffers on the way are full: nobody reads
    (job.folder / "fail").write_text("")
    job.until_dead(rank0)
    assert job.wait() == 6


def test_the_output_s_reader_leaves(launch) -> None:
    job = launch(
        """
        mark(f"pid_rank{RANK}", os.getpid())
        while True:
            print("on and on")
            time.sleep(0.01)
        """,
        *("--num_gpus", "2"),
    )
    ranks = [int(job.mark(f"pid_rank{rank}")) for rank in range(2)]
    job.process.stdout.close()
    job.process.stdout = None
    assert job.wait() == 128 + signal.SIGPIPE
    job.until_dead(*ranks)


def test_what_ranks_leave_behind_is_stopped(launch) -> None:
    job = launch("mark('pid_child', subprocess.Popen(['sleep', '600'], preexec_fn=os.setpgrp).pid)", "--num_gpus", "1")
    assert job.wait() == 0
    job.until_dead(int(job.mark("pid_child")))
    assert b"1 process(es) that they started run on" in job.err


def test_a_daemon_does_not_hold_the_launcher(launch, alive) -> None:
    job = launch(
        "mark('pid_daemon', subprocess.Popen(['sleep', '600'], start_new_session=True).pid)\nprint('done')",
        "--num_gpus",
        "1",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert job.process.wait(60) == 0
    # It left the session, so it has asked to live on.
    assert alive(int(job.mark("pid_daemon")))


# --- signals to the launcher


@pytest.fixture
def bystander():
    """A process of the launcher's own process group, and no business of it."""
    process = subprocess.Popen(["sleep", "600"])
    assert os.getpgid(process.pid) == os.getpgrp()
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_passed_to_the_own_ranks_only(launch, bystander, number: signal.Signals, code: int) -> None:
    job = launch(
        f"""
        def note(number, frame):
            time.sleep(0.3)
            mark(f"got{{RANK}}", number)
            sys.exit(0)
        signal.signal({int(number)}, note)
        mark(f"pid_rank{{RANK}}", os.getpid())
        time.sleep(600)
        """,
        *("--num_gpus", "2", "--grace_s", "60"),
    )
    ranks = [int(job.mark(f"pid_rank{rank}")) for rank in range(2)]
    assert os.getpgid(job.process.pid) == os.getpgrp()
    job.process.send_signal(number)
    assert job.wait() == code
    assert [(job.folder / f"got{rank}").read_text() for rank in range(2)] == [str(int(number))] * 2
    job.until_dead(*ranks)
    assert bystander.poll() is None


def test_two_launchers_do_not_meddle(launch, tmp_path: Path, scripts_dir: Path) -> None:
    first = launch("mark(f'pid_{sys.argv[2]}', os.getpid())\n" + SLEEP, args=("first",))
    pid = int(first.mark("pid_first"))
    second = launch("mark(f'pid_{sys.argv[2]}', os.getpid())\n" + SLEEP, args=("second",))
    other = int(second.mark("pid_second"))
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130
    first.until_dead(pid)
    assert second.process.poll() is None
    os.kill(other, 0)
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_ignores_a_signal_is_killed_after_the_grace(launch, number: signal.Signals) -> None:
    job = launch(STUBBORN + SLEEP, *("--num_gpus", "2", "--grace_s", "0.5"))
    everyone = pids(job, 2)
    job.process.send_signal(number)
    assert job.wait() == 128 + number
    job.until_dead(*everyone)


def test_a_second_interrupt_kills_at_once(launch) -> None:
    job = launch(STUBBORN + SLEEP, *("--num_gpus", "2", "--grace_s", "600"))
    everyone = pids(job, 2)
    job.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    job.until_dead(*everyone)
    assert b"killing all ranks" in job.err


def test_one_interrupt_delivered_twice_is_one(launch) -> None:
    job = launch(
        """
        def tidy(*_):
            time.sleep(1)
            mark("tidied")
            sys.exit(0)
        signal.signal(signal.SIGINT, tidy)
        mark("ready")
        time.sleep(600)
        """,
        *("--num_gpus", "1", "--grace_s", "60"),
    )
    job.mark("ready")
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert (job.folder / "tidied").exists()


def test_under_nohup_a_hang_up_changes_nothing(launch) -> None:
    job = launch(
        "mark('ready'); await_mark('go')",
        *("--num_gpus", "1"),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    job.mark("ready")
    job.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    (job.folder / "go").write_text("")
    assert job.wait() == 0


# --- the death of the launcher


def test_a_killed_launcher_leaves_nobody(launch) -> None:
    job = launch(STUBBORN + SLEEP, "--num_gpus", "2")
    everyone = [*pids(job, 2), guard_of(job.process.pid)]
    job.process.kill()
    job.until_dead(*everyone)


def test_ranks_die_with_the_launcher_even_without_the_guard(launch) -> None:
    job = launch("mark(f'pid_rank{RANK}', os.getpid())\n" + SLEEP, "--num_gpus", "2")
    ranks = [int(job.mark(f"pid_rank{rank}")) for rank in range(2)]
    guard = guard_of(job.process.pid)
    os.kill(guard, signal.SIGKILL)
    job.until_dead(guard)
    job.process.kill()
    job.until_dead(*ranks)


def test_a_dead_guard_does_not_disturb_the_job(launch) -> None:
    job = launch("mark(f'pid_rank{RANK}', os.getpid())\nawait_mark('go')\nprint('done')", "--num_gpus", "2")
    job.mark("pid_rank1")
    guard = guard_of(job.process.pid)
    os.kill(guard, signal.SIGKILL)
    job.until_dead(guard)
    (job.folder / "go").write_text("")
    assert job.wait() == 0
    assert job.out == b"done\ndone\n"


def guard_of(launcher: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (guard,) = [pid for pid in children if b"sessions.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(guard)


# --- what a rank finds


def test_environment_arguments_and_cores(launch) -> None:
    core = min(os.sched_getaffinity(0))
    job = launch(
        """
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS OURS".split()
        print(*(os.environ[name] for name in names), *sys.argv[1:], *os.sched_getaffinity(0))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert os.getsid(0) == os.getpid()
        """,
        *("--num_gpus", "1", "--bind_core_list", str(core)),
        args=("--x", "--"),
        env={**os.environ, "OURS": "kept"},
    )
    assert job.wait() == 0, job.err
    assert job.out.decode() == f"0 0 1 1 127.0.0.1 1 kept --local_rank=0 --x -- {core}\n"


def test_rank_0_has_the_standard_input(launch) -> None:
    job = launch("print(RANK, repr(sys.stdin.read()))", *("--num_gpus", "2"), stdin=subprocess.PIPE)
    job.process.stdin.write(b"for rank 0")
    job.process.stdin.close()
    job.process.stdin = None
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == [b"0 'for rank 0'", b"1 ''"]


def ds_launch(scripts_dir: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [scripts_dir / "ds", "launch", *arguments], capture_output=True, text=True, cwd=cwd, timeout=240
    )


def test_modules(scripts_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__package__, *sys.argv[1:])")
    done = ds_launch(scripts_dir, "--num_gpus=1", "--module", "package.train", "--lr", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "package --local_rank=0 --lr 1\n")


def test_executables(scripts_dir: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$RANK $*"\n# SIGPIPE must be as in a shell:\nyes | head -1\n')
    program.chmod(0o755)
    done = ds_launch(scripts_dir, "--num_gpus=1", "--no_python", "./program", "a", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 --local_rank=0 a\ny\n", "")


def test_an_executable_that_cannot_run(scripts_dir: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = ds_launch(scripts_dir, "--num_gpus=1", "--no_python", str(program), cwd=tmp_path)
    assert done.returncode == 127
    assert "cannot run" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_that_was_asked_for(scripts_dir: Path, tmp_path: Path) -> None:
    import socket

    (tmp_path / "script.py").write_text("")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        done = ds_launch(scripts_dir, "--master_port", port, "script.py", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{port} is taken" in done.stderr


def test_nothing_runs_on_after_an_import_of_the_package() -> None:
    code = "import threading, ds_cli.launcher; assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], check=True)
