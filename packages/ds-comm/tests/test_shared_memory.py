"""The shared-memory transport: ranks that die, disagree or come late; what it leaves behind; order; groups."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ds_comm
from ds_comm import CommError, Communicator, Route
from ds_comm.shared_memory import SharedMemoryTransport, even_splits, splits_are_even
from testing import RankPool

Launch = Callable[..., list[Any]]
Ranks = Callable[[int], RankPool]


def start(rank: int, world: int, folder: str, timeout_s: float = 240.0) -> Communicator:
    """A rank's communicator over a fresh group, connected.

    `launch` gives ranks half of this limit: who learns of another's end only by it has not learned in time.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    comm = Communicator(dist.group.WORLD)
    comm.all_reduce(torch.ones(8))
    return comm


def call(comm: Communicator, kind: str, numel: int = 12, async_op: bool = False) -> None:
    """One collective, waited for."""
    if kind == "all_gather":
        work = comm.all_gather_into_tensor(torch.empty(numel * comm.world), torch.ones(numel), async_op)
    elif kind == "reduce_scatter":
        work = comm.reduce_scatter_tensor(torch.empty(numel), torch.ones(numel * comm.world), async_op=async_op)
    else:
        work = comm.all_reduce(torch.ones(numel), async_op=async_op)
    if work is not None:
        work.wait()


def failure(action: Callable[[], None]) -> str:
    """What `action` raised."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wait_for(file: Path) -> None:
    """Returns when another process has made the file. Who waits in vain ends after a minute."""
    for _ in range(6000):
        if file.exists():
            return
        time.sleep(0.01)


def lose_a_rank(rank: int, world: int, folder: str, dead: int, kind: str, async_op: bool, late: int) -> list[str]:
    comm = start(rank, world, folder)
    if rank == dead:
        time.sleep(0.3)  # the others are in the collective by now
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == late:
        time.sleep(0.8)  # comes when all others have given up already
    first = failure(lambda: call(comm, kind, async_op=async_op))
    return [first, failure(lambda: call(comm, kind))]


@pytest.mark.parametrize(
    ("world", "dead", "kind", "async_op", "late"),
    [
        (2, 0, "all_reduce", False, -1),
        (2, 1, "all_gather", True, 0),
        (3, 0, "reduce_scatter", False, -1),
        (3, 1, "all_reduce", True, 2),
        (3, 2, "all_gather", False, 1),
        (4, 3, "all_reduce", False, -1),
    ],
)
def test_a_rank_that_dies_is_named_at_once(
    launch: Launch, tmp_path: Path, world: int, dead: int, kind: str, async_op: bool, late: int
) -> None:
    ended = launch(world, lose_a_rank, world, str(tmp_path), dead, kind, async_op, late)
    assert ended[dead].exitcode == -signal.SIGKILL
    for rank, each in enumerate(ended):
        if rank == dead:
            continue
        assert each.value is not None, each
        message, again = each.value
        assert message.startswith(f"CommError: rank {dead} ended while rank "), f"rank {rank}: {message}"
        assert again.startswith("CommError: this group can't be used any more"), again
        assert f"rank {dead}" in again and "start the job again" in again


def lose_a_rank_with_a_child(rank: int, world: int, folder: str) -> str:
    comm = start(rank, world, folder)
    noticed = Path(folder, "noticed")
    if rank == 1:
        child = os.fork()
        if child == 0:  # as a worker of a DataLoader: forked, and alive after its parent
            os.closerange(0, 3)
            wait_for(noticed)
            os._exit(0)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    message = failure(lambda: call(comm, "all_reduce"))
    noticed.touch()
    return message


def test_a_dead_rank_is_noticed_though_a_forked_child_lives_on(launch: Launch, tmp_path: Path) -> None:
    try:
        ended = launch(2, lose_a_rank_with_a_child, 2, str(tmp_path))
    finally:
        (tmp_path / "noticed").touch()  # lets the child go where nobody did
    assert ended[0].value is not None, ended
    assert ended[0].value.startswith("CommError: rank 1 ended while rank 0 was in ")


def call_in_a_child(rank: int, folder: str) -> list[Any]:
    """A forked child calls the group it was born with, and its parent goes on."""
    comm = start(rank, 2, folder)
    found: list[Any] = []
    if rank == 1:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            now = failure(lambda: call(comm, "all_reduce"))
            later = failure(lambda: call(comm, "all_reduce", async_op=True))
            os.write(send, f"{now}|{later}".encode())
            os._exit(0)
        os.close(send)
        found = os.read(receive, 4096).decode().split("|")
        os.waitpid(child, 0)
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    return [*found, tensor.tolist()]


def test_a_forked_child_has_no_part_in_the_group(launch: Launch, tmp_path: Path) -> None:
    parent, with_child = launch(2, call_in_a_child, str(tmp_path))
    assert parent.value == [[2.0] * 3], parent
    now, later, total = with_child.value
    assert now == later and "it is rank 1's, from which this process was forked" in now, (now, later)
    assert total == [2.0] * 3


def give_up_second_hand(rank: int, folder: str) -> str:
    """Rank 2 never comes; rank 0's limit ends first, and rank 1 learns from it."""
    comm = start(rank, 3, folder)
    assert comm.transport is not None
    if rank == 0:
        comm.transport._links._timeout_ms, comm.transport._links._timeout_s = 500, 0.5
    if rank == 2:
        time.sleep(2.0)
    return failure(lambda: call(comm, "all_gather"))


def test_who_gives_up_says_why(launch: Launch, tmp_path: Path) -> None:
    first, second, third = launch(3, give_up_second_hand, str(tmp_path))
    assert first.value == "CommError: rank 2 did not come within 0.5 s"
    for each in (second, third):
        assert each.value is not None, each
        assert each.value.startswith("CommError: rank 2 did not come within 0.5 s (heard from rank ")


def disagree(rank: int, world: int, folder: str, delay_s: float) -> str:
    comm = start(rank, world, folder)
    if rank == 1:
        time.sleep(delay_s)
    last = rank == world - 1
    return failure(lambda: call(comm, "all_gather", 5) if last else call(comm, "reduce_scatter", 7))


@pytest.mark.parametrize(("world", "delay_s"), [(2, 0.0), (2, 0.3), (3, 0.0), (3, 0.3)])
def test_ranks_in_different_collectives_are_told_which(
    launch: Launch, tmp_path: Path, world: int, delay_s: float
) -> None:
    ended = launch(world, disagree, world, str(tmp_path), delay_s)
    odd = world - 1
    for rank, each in enumerate(ended):
        assert each.value is not None, each
        message = each.value
        assert message.startswith("CommError: "), message
        # One rank or another is the messenger, but what differs stands in every rank's message.
        assert f"rank {odd}" in message, f"rank {rank}: {message}"
        assert f"all_gather of {5 * world} float32" in message, f"rank {rank}: {message}"
        assert f"reduce_scatter of {7 * world} float32" in message, f"rank {rank}: {message}"


def differ_in(rank: int, folder: str, what: str) -> str:
    comm = start(rank, 2, folder)
    numel = 10 + 2 * rank if what == "size" else 10
    dtype = torch.float64 if what == "dtype" and rank else torch.float32
    return failure(lambda: comm.all_reduce(torch.ones(numel, dtype=dtype)))


@pytest.mark.parametrize(("what", "words"), [("size", "12 float32"), ("dtype", "10 float64")])
def test_ranks_with_different_tensors_are_told_which(launch: Launch, tmp_path: Path, what: str, words: str) -> None:
    for each in launch(2, differ_in, str(tmp_path), what):
        message = each.value
        assert message is not None and message.startswith("CommError: "), each
        assert words in message and "10 float32" in message and "rank 0" in message and "rank 1" in message


def differ_in_the_call(rank: int, folder: str) -> str:
    """The first half of an all-reduce is a reduce-scatter, and yet another call."""
    comm = start(rank, 2, folder)
    return failure(lambda: call(comm, "all_reduce", 12) if rank else call(comm, "reduce_scatter", 6))


def test_an_all_reduce_is_not_a_reduce_scatter(launch: Launch, tmp_path: Path) -> None:
    for each in launch(2, differ_in_the_call, str(tmp_path)):
        message = each.value
        assert message is not None, each
        assert "all_reduce of 12 float32" in message and "reduce_scatter of 12 float32" in message, message


def close_while_the_other_waits(rank: int, folder: str) -> str:
    comm = start(rank, 2, folder)
    noticed = Path(folder, "noticed")
    if rank == 0:
        time.sleep(0.3)
        comm.close()
        wait_for(noticed)  # lives on: the other does not wait for its end
        return ""
    message = failure(lambda: call(comm, "all_reduce"))
    noticed.touch()
    return message


def test_who_closes_says_so(launch: Launch, tmp_path: Path) -> None:
    _, other = launch(2, close_while_the_other_waits, str(tmp_path))
    assert other.value == "CommError: rank 0 closed the group (heard from rank 0)", other


def come_late(rank: int, folder: str) -> str:
    comm = start(rank, 2, folder, timeout_s=2.0)
    gave_up = Path(folder, "gave up")
    if rank == 1:
        wait_for(gave_up)
    message = failure(lambda: call(comm, "all_reduce"))
    gave_up.touch()
    return message


def test_a_late_rank_is_named_after_the_groups_limit(launch: Launch, tmp_path: Path) -> None:
    first, second = launch(2, come_late, str(tmp_path))
    assert first.value == "CommError: rank 1 did not come within 2 s", first
    assert second.value == "CommError: rank 1 did not come within 2 s (heard from rank 0)", second


# In the pool, whose ranks live on


def held() -> tuple[int, int, int]:
    """Open files, threads of ours, and mapped segments of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:ds-comm")
    threads = sum(thread.name == "ds-comm" for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), threads, maps


def open_and_close(times: int) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]:
    with contextlib.closing(Communicator(dist.group.WORLD)) as comm:
        call(comm, "all_reduce")  # whatever torch keeps from a first time
    del comm
    before = held()
    for _ in range(times):
        comm = Communicator(dist.group.WORLD)
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            call(comm, kind)
            call(comm, kind, async_op=True)
        during = held()
        comm.close()
        comm.close()  # twice is once
    del comm
    return before, during, held()


def test_nothing_is_left_after_close(ranks: Ranks) -> None:
    for before, during, after in ranks(2).run(open_and_close, 5):
        held = [now - then for now, then in zip(during, before)]
        # A socket to the peer, two files of memory; a thread; two segments: the test must see them.
        assert held == [3, 1, 2]
        assert after == before


def drop_groups(times: int) -> tuple[tuple[int, int, int], tuple[int, int, int], bool]:
    """Groups that come and go, as tests and notebooks make them; nobody calls close."""
    refs = []
    before = held()
    for _ in range(times):
        group = dist.new_group([0, 1])
        assert group is not None
        ds_comm.all_reduce(torch.ones(4), group=group)
        ds_comm.all_reduce(torch.ones(4), group=group, async_op=True).wait()  # type: ignore[union-attr]
        refs.append(weakref.ref(ds_comm.communicator(group)))
        dist.destroy_process_group(group)
        del group
    gc.collect()
    return before, held(), all(ref() is None for ref in refs)


def test_a_communicator_goes_with_its_group(ranks: Ranks) -> None:
    for before, after, gone in ranks(2).run(drop_groups, 3):
        assert gone, "the communicator holds its group, and the table holds the communicator"
        assert after[1:] == before[1:]


def start_again(rank: int, folder: str) -> list[Any]:
    """The world twice, in one process: the second has a communicator of its own."""
    found: list[Any] = []
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=2)
        comm = ds_comm.communicator()
        assert comm is ds_comm.communicator()
        tensor = torch.ones(2)
        ds_comm.all_reduce(tensor)
        found.append(tensor.tolist())
        dist.barrier()
        dist.destroy_process_group()
        found.append(failure(lambda comm=comm: comm.barrier()))  # type: ignore[misc]
        found.append(ds_comm.communicator().world)
        comm.close()
    return found


def test_a_new_world_gets_a_new_communicator(launch: Launch, tmp_path: Path) -> None:
    for each in launch(2, start_again, str(tmp_path)):
        assert each.value is not None, each
        for reduced, refused, world in (each.value[:3], each.value[3:]):
            assert reduced == [2.0] * 2 and world == 1
            assert (
                refused.startswith("CommError: a communicator goes with its process group") and "of 2 ranks" in refused
            )


def close_while_a_job_waits() -> int:
    """Rank 0 starts a collective that rank 1 never joins, and closes. How many threads are left."""
    comm = Communicator(dist.group.WORLD)
    call(comm, "all_reduce")
    threads = held()[1]
    if comm.rank == 0:
        comm.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.1)
    dist.barrier()
    if comm.rank == 0:
        comm.close()
    dist.barrier()  # rank 1 is open until rank 0 has closed: who waited for the other would wait here for ever
    comm.close()
    time.sleep(0.1)
    left = held()[1] - threads
    dist.barrier()
    return left


def test_close_ends_a_job_that_waits_for_a_peer(ranks: Ranks) -> None:
    assert ranks(2).run(close_while_a_job_waits) == [0, 0]


def use_after_close() -> tuple[str, str]:
    transport = SharedMemoryTransport.open(dist.group.WORLD, 10.0)
    assert transport is not None
    transport.close()
    try:
        transport.all_reduce(torch.ones(4))
        raised = "nothing"
    except CommError as error:
        raised = str(error)
    comm = Communicator(dist.group.WORLD)
    call(comm, "all_reduce")
    comm.close()
    tensor = torch.ones(4)
    comm.all_reduce(tensor)  # goes on, by torch's own way
    return raised, comm.route("all_reduce", tensor).value + str(tensor.tolist())


def test_after_close(ranks: Ranks) -> None:
    for raised, after in ranks(2).run(use_after_close):
        assert raised == "this group can't be used any more: the group was closed; start the job again"
        assert after == Route.NATIVE.value + "[2.0, 2.0, 2.0, 2.0]"


def many_jobs(count: int, numel: int) -> list[bool]:
    """Asynchronous calls that build on one another, with calls that return at once in between."""
    threads = held()[1]
    comm = Communicator(dist.group.WORLD)
    tensor = torch.full((numel,), float(comm.rank + 1))
    gathered = torch.empty(numel * comm.world)
    works, snapshots = [], []
    for step in range(count):
        works.append(comm.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True))
        works.append(comm.all_gather_into_tensor(gathered, tensor, async_op=True))
        if step % 3 == 2:  # not waited for: a plain call comes after what was submitted
            total = torch.ones(1)
            comm.all_reduce(total)
            snapshots.append(bool((gathered == 1.5).all() and total.item() == comm.world))
    for work in reversed(works):
        work.wait()  # type: ignore[union-attr]
    one_thread = held()[1] == threads + 1
    comm.close()
    return [*snapshots, bool((gathered == 1.5).all()), one_thread]


@pytest.mark.parametrize("numel", [1, 3000, 700_000])
def test_jobs_keep_their_order(ranks: Ranks, numel: int) -> None:
    for found in ranks(2).run(many_jobs, 12 if numel < 10_000 else 3, numel):
        assert all(found), found


def fail_a_job() -> list[str]:
    comm = Communicator(dist.group.WORLD)
    call(comm, "all_reduce")
    work = comm.all_reduce(torch.ones(4 + 4 * comm.rank), async_op=True)
    later = comm.all_reduce(torch.ones(4), async_op=True)
    found = []
    for each in (work, work, later):
        try:
            each.wait()  # type: ignore[union-attr]
            found.append("nothing")
        except CommError as error:
            found.append(str(error))
    comm.close()
    return found


def test_wait_raises_what_the_job_raised(ranks: Ranks) -> None:
    for first, again, later in ranks(2).run(fail_a_job):
        assert first.startswith("ranks make the same collectives in the same order")
        assert again == first
        assert later.startswith("this group can't be used any more: ranks make the same collectives")


def drop_after_a_failure() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """A communicator whose job has failed is let go; nobody calls close."""
    before = held()
    comm = Communicator(dist.group.WORLD)
    work = comm.all_reduce(torch.ones(4 + 4 * comm.rank), async_op=True)
    assert failure(work.wait).startswith("CommError: ranks make the same")  # type: ignore[union-attr]
    del comm, work
    return before, held()


def test_a_failure_holds_nothing(ranks: Ranks) -> None:
    """An error holds the frames it came through, and they what they worked on."""
    for before, after in ranks(2).run(drop_after_a_failure):
        assert after[1:] == before[1:]


def job_lets_tensors_go() -> bool:
    comm = Communicator(dist.group.WORLD)
    tensor = torch.ones(4)
    ref = weakref.ref(tensor)
    work = comm.all_reduce(tensor, async_op=True)
    work.wait()  # type: ignore[union-attr]
    call(comm, "all_reduce", async_op=True)  # the worker has left the first job
    del tensor
    gc.collect()
    comm.close()
    return ref() is None


def test_a_handle_does_not_hold_the_tensor(ranks: Ranks) -> None:
    assert ranks(2).run(job_lets_tensors_go) == [True, True]


def groups_at_once(lists: list[list[int]], rounds: int) -> list[bool]:
    """Several groups of ranks, some of which a rank may be in, with calls of each under way at once."""
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in lists]
    mine = [(number, group) for number, group in enumerate(groups) if rank in lists[number]]
    comms = [(number, Communicator(group)) for number, group in mine]
    right = []
    for step in range(rounds):
        works, checks = [], []
        for number, comm in comms:
            size = 1000 + number
            tensor = torch.full((size,), float(rank + step))
            works.append(comm.all_reduce(tensor, async_op=True))
            gathered = torch.empty(size * comm.world)
            works.append(comm.all_gather_into_tensor(gathered, torch.full((size,), float(rank)), async_op=True))
            plain = torch.full((3,), float(number + 1))
            total = float(sum(member + step for member in lists[number]))
            order = torch.tensor([float(member) for member in lists[number]]).repeat_interleave(size)
            checks.append((tensor, torch.full((size,), total)))
            checks.append((gathered, order))
            if step % 2:
                comm.all_reduce(plain)
                checks.append((plain, torch.full((3,), float((number + 1) * comm.world))))
        for work in works:
            work.wait()  # type: ignore[union-attr]
        right += [torch.equal(*check) for check in checks]
    right += [comm.transport is not None for _, comm in comms]
    for _, comm in comms:
        comm.close()
    for _, group in mine:
        dist.destroy_process_group(group)
    return right


@pytest.mark.parametrize(
    "lists",
    [
        pytest.param([[1, 3]], id="two of four"),
        pytest.param([[0, 1], [2, 3]], id="halves"),
        pytest.param([[0, 1, 2, 3], [1, 2], [0, 2, 3]], id="overlapping"),
        pytest.param([[0, 1, 2, 3], [0, 1, 2, 3]], id="the same ranks twice"),
    ],
)
def test_groups(ranks: Ranks, lists: list[list[int]]) -> None:
    for rank, right in enumerate(ranks(4).run(groups_at_once, lists, 4)):
        assert all(right), (rank, right)
        assert bool(right) == any(rank in members for members in lists)


def group_of_one() -> tuple[int, int, list[float], bool]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    comm = Communicator(groups[dist.get_rank()])
    tensor = torch.full((3,), 5.0)
    comm.all_reduce(tensor)
    return comm.rank, comm.world, tensor.tolist(), comm.transport is None


def test_a_group_of_one_opens_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(group_of_one) == [(0, 1, [5.0] * 3, True)] * 2


def broadcast_in_group() -> list[float]:
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    tensor = torch.full((2,), float(rank))
    if rank in (1, 3):
        Communicator(group).broadcast(tensor, src=1)
    return tensor.tolist()


def test_src_is_a_rank_of_the_group(ranks: Ranks) -> None:
    assert ranks(4).run(broadcast_in_group) == [[0.0, 0.0], [3.0, 3.0], [2.0, 2.0], [3.0, 3.0]]


# Without ranks


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [0, 1, 6, 7, 8, 1000])
def test_even_splits(numel: int, world: int) -> None:
    splits = even_splits(numel, world)
    sizes = [stop - start for start, stop in itertools.pairwise(splits)]
    assert len(sizes) == world and splits[0] == 0 and splits[-1] == numel
    assert max(sizes) - min(sizes) <= 1
    assert splits_are_even(splits) == (numel % world == 0)
