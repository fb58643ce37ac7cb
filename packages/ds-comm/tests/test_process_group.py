"""Who this process is and where it meets the others: decided without acting, then in real processes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import ds_comm
from ds_comm import CommError, init_distributed
from ds_comm.process_group import DEFAULT_TIMEOUT, Rendezvous, default_backend, device_type, resolve

Launch = Callable[..., list[Any]]

TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29512"}
MINUTE = timedelta(minutes=1)


def test_nothing_at_all_is_a_world_of_one() -> None:
    assert resolve(env={}) == Rendezvous(default_backend(), "local", 0, 1, 0, DEFAULT_TIMEOUT)
    assert timedelta(minutes=30) == DEFAULT_TIMEOUT


@pytest.mark.parametrize("init_method", [None, "env://"])
def test_the_environment(init_method: str | None) -> None:
    found = resolve("gloo", init_method=init_method, env=TWO)
    assert found == Rendezvous("gloo", "tcp://10.0.0.1:29512", 1, 2, 1, DEFAULT_TIMEOUT)


def test_the_port_is_an_argument_where_the_environment_has_none() -> None:
    env = {key: value for key, value in TWO.items() if key != "MASTER_PORT"}
    assert resolve(env=env).init_method == "tcp://10.0.0.1:29500"
    assert resolve(distributed_port=123, env=env).init_method == "tcp://10.0.0.1:123"
    assert resolve(distributed_port=123, env=TWO).init_method == "tcp://10.0.0.1:29512"


def test_an_address_of_ip_version_6_stands_in_brackets() -> None:
    assert resolve(env={**TWO, "MASTER_ADDR": "::1"}).init_method == "tcp://[::1]:29512"
    assert resolve(env={**TWO, "MASTER_ADDR": "[::1]"}).init_method == "tcp://[::1]:29512"


def test_one_rank_of_one_needs_no_address() -> None:
    assert resolve(env={"RANK": "0", "WORLD_SIZE": "1"}).init_method == "local"
    assert resolve(rank=0, world_size=1, env={}).init_method == "local"


@pytest.mark.parametrize("init_method", ["tcp://h:1", "file:///tmp/x"])
def test_an_init_method_wins_over_the_environments_address(init_method: str) -> None:
    assert resolve(init_method=init_method, env=TWO).init_method == init_method
    found = resolve(init_method=init_method, rank=0, world_size=3, env={})
    assert (found.init_method, found.rank, found.world_size, found.local_rank) == (init_method, 0, 3, 0)


def test_arguments_win_over_the_environment() -> None:
    found = resolve(rank=2, world_size=5, env=TWO)
    assert (found.rank, found.world_size, found.local_rank) == (2, 5, 1)


@given(
    argument=st.none() | st.integers(1, 10_000).map(lambda seconds: timedelta(seconds=seconds)),
    config_s=st.none() | st.floats(0.5, 10_000),
    minutes=st.none() | st.integers(1, 600),
)
def test_the_limit_argument_then_configuration_then_environment(
    argument: timedelta | None, config_s: float | None, minutes: int | None
) -> None:
    env = {} if minutes is None else {"DEEPSPEED_TIMEOUT": str(minutes)}
    found = resolve(timeout=argument, config_timeout_s=config_s, env=env).timeout
    expected = [
        argument,
        None if config_s is None else timedelta(seconds=config_s),
        None if minutes is None else timedelta(minutes=minutes),
        timedelta(minutes=30),
    ]
    assert found == next(each for each in expected if each is not None)


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "head",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_mpi_launchers() -> None:
    found = resolve(env=OPEN_MPI)
    assert (found.rank, found.world_size, found.local_rank) == (3, 4, 1)
    assert found.init_method == "tcp://head:29500"
    found = resolve(env=MPICH)
    assert (found.rank, found.world_size, found.local_rank) == (1, 2, 1)
    assert found.init_method == "tcp://127.0.0.1:29500", "all ranks are on one machine"


def test_mpi_is_asked_last_and_only_if_wanted() -> None:
    assert resolve(env={**OPEN_MPI, **TWO}).rank == 1
    assert resolve(auto_mpi_discovery=False, env=OPEN_MPI).world_size == 1
    several_hosts = {key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"}
    with pytest.raises(ValueError, match="MASTER_ADDR, which is not set"):
        resolve(env=several_hosts)


@pytest.mark.parametrize(
    ("env", "arguments", "words"),
    [
        ({"RANK": "0"}, {}, ["RANK is 0", "WORLD_SIZE is missing", "ds launch"]),
        ({"WORLD_SIZE": "4"}, {}, ["RANK is missing", "WORLD_SIZE is 4", "set both"]),
        ({}, {"rank": 3}, ["RANK is 3", "WORLD_SIZE is missing"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, ["MASTER_ADDR", "ds launch", "rank 0's machine"]),
        ({**TWO, "RANK": "2"}, {}, ["RANK is 2 in a world of 2", "0..1"]),
        ({**TWO, "RANK": "one"}, {}, ["RANK is a whole number", "'one'"]),
        ({**TWO, "RANK": "-1"}, {}, ["RANK is a whole number of at least 0", "'-1'"]),
        (TWO, {"world_size": 0}, ["at least one rank", "world_size=0", "-1"]),
        ({**TWO, "WORLD_SIZE": "2.0"}, {}, ["WORLD_SIZE is a whole number", "'2.0'"]),
        ({**TWO, "MASTER_PORT": ""}, {}, ["MASTER_PORT is a whole number", "''"]),
        ({**TWO, "LOCAL_RANK": "x"}, {}, ["LOCAL_RANK is a whole number", "'x'"]),
        ({**TWO, "DEEPSPEED_TIMEOUT": "30m"}, {}, ["DEEPSPEED_TIMEOUT is a whole number", "'30m'"]),
        ({}, {"init_method": "tcp://h:1"}, ["'tcp://h:1'", "pass rank= and world_size="]),
        ({}, {"init_method": "file:///tmp/x"}, ["'file:///tmp/x'", "set RANK and WORLD_SIZE"]),
    ],
)
def test_half_an_identity(env: dict[str, str], arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(env=env, **arguments)
    for word in words:
        assert word in str(caught.value)


def test_a_world_of_no_ranks_is_refused_in_words() -> None:
    with pytest.raises(ValueError) as caught:
        resolve(env={**TWO, "RANK": "0", "WORLD_SIZE": "0"})
    assert "WORLD_SIZE" in str(caught.value) and "0..-1" not in str(caught.value)
    assert "at least 1" in str(caught.value) and "'0'" in str(caught.value)


def test_backends() -> None:
    assert default_backend("cpu") == "gloo"
    assert default_backend("cuda") == "cpu:gloo,cuda:nccl"
    assert default_backend() == default_backend(device_type())
    assert resolve("mpi", env=TWO).backend == "mpi"


def test_names_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ds_comm.is_initialized()
    assert (ds_comm.get_rank(), ds_comm.get_world_size()) == (0, 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert ds_comm.get_local_rank() == 0
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert ds_comm.get_local_rank() == 3
    monkeypatch.setenv("LOCAL_RANK", "three")
    with pytest.raises(ValueError, match="LOCAL_RANK is a whole number"):
        ds_comm.get_local_rank()


LOCAL_RANK_KEYS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def set_local_rank(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for key in LOCAL_RANK_KEYS:
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)


@pytest.mark.parametrize(
    ("env", "local_rank"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({"MPI_LOCALRANKID": "3"}, 3),
        ({"LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 2),
        ({**OPEN_MPI, "LOCAL_RANK": "0"}, 0),
        ({**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4"}, 1),
    ],
)
def test_the_local_rank_is_the_same_to_all_who_ask(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], local_rank: int
) -> None:
    set_local_rank(monkeypatch, {key: value for key, value in env.items() if key in LOCAL_RANK_KEYS})
    assert ds_comm.get_local_rank() == local_rank
    assert resolve(env=env).local_rank == local_rank
    who = {"rank": 3, "world_size": 4, "init_method": "tcp://h:1"}
    assert resolve(auto_mpi_discovery=False, env=env, **who).local_rank == local_rank


class Accelerators:
    """torch.accelerator of a machine with `count` devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
        self.current = current
        fakes = {
            "current_accelerator": lambda check_available=False: torch.device("cuda") if count else None,
            "device_count": lambda: count,
            "current_device_index": lambda: self.current,
            "set_device_index": self.set,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.accelerator, name, fake)

    def set(self, device: Any) -> None:
        self.current = torch.device(device).index if not isinstance(device, int) else device


@pytest.mark.parametrize(
    ("env", "before", "after"),
    [
        ({"LOCAL_RANK": "3"}, 0, 3),
        ({"LOCAL_RANK": "0"}, 0, 0),
        ({"LOCAL_RANK": "5"}, 0, 1),  # more ranks than devices
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 0, 2),
        ({"LOCAL_RANK": "3"}, 2, 2),  # the caller has chosen
        ({}, 0, 0),
    ],
)
def test_a_rank_takes_its_device_though_the_group_runs_already(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], before: int, after: int
) -> None:
    set_local_rank(monkeypatch, env)
    devices = Accelerators(monkeypatch, 4, before)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    init_distributed()
    assert devices.current == after


def test_a_group_bound_to_a_device_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_local_rank(monkeypatch, {"LOCAL_RANK": "1"})
    devices = Accelerators(monkeypatch, 4)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    bound = SimpleNamespace(bound_device_id=torch.device("cuda", 2))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=bound))
    init_distributed()
    assert devices.current == 2


def test_without_an_accelerator_no_device_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    set_local_rank(monkeypatch, {"LOCAL_RANK": "1"})
    devices = Accelerators(monkeypatch, 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    init_distributed()
    assert devices.current == 0


@pytest.mark.parametrize(
    ("env", "before", "after"), [({"LOCAL_RANK": "1"}, 0, 1), ({"LOCAL_RANK": "1"}, 3, 1), ({}, 3, 3)]
)
def test_a_rank_takes_its_device_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], before: int, after: int
) -> None:
    set_local_rank(monkeypatch, env)
    devices = Accelerators(monkeypatch, 4, before)
    seen: list[int] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(devices.current))
    init_distributed("gloo", rank=0, world_size=1, verbose=False)
    assert seen == [after]


def test_false_expects_a_group_that_runs() -> None:
    with pytest.raises(CommError, match=r"dist_init_required=False.*there is none; call torch.distributed"):
        init_distributed(dist_init_required=False)
    assert not dist.is_initialized()


# Real processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(rank: int, arguments: dict[str, Any], with_rank: bool) -> list[Any]:
    """Starts the group, sums the ranks, and says what it is."""
    init_distributed(**arguments, **({"rank": rank} if with_rank else {}))
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    return [
        ds_comm.is_initialized(),
        ds_comm.get_rank() == rank,
        ds_comm.get_world_size(),
        total.item(),
        dist.get_backend(),
        options._timeout.total_seconds(),
    ]


def of_two(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_ranks_meet_by_the_environment(launch: Launch) -> None:
    port = free_port()
    env = lambda rank: {**of_two(rank, port), "DEEPSPEED_TIMEOUT": "2"}  # noqa: E731
    for each in launch(2, meet, {}, False, env=env):
        assert each.value == [True, True, 2, 3.0, "gloo", 120.0], each.error
    config = {"config": {"comm_timeout_s": 7.0}, "init_method": "env://", "verbose": False}
    for each in launch(2, meet, config, False, env=env):
        assert each.value == [True, True, 2, 3.0, "gloo", 7.0], each.error


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_meet_at_an_address(launch: Launch, tmp_path: Path, scheme: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    arguments = {"init_method": address, "world_size": 2, "timeout": MINUTE, "dist_backend": "gloo"}
    for each in launch(2, meet, arguments, True):
        assert each.value == [True, True, 2, 3.0, "gloo", 60.0], each.error


def test_ranks_meet_by_mpis_environment(launch: Launch) -> None:
    port = free_port()
    env = lambda rank: {  # noqa: E731
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    for each in launch(2, meet, {"distributed_port": port}, False, env=env):
        assert each.value == [True, True, 2, 3.0, "gloo", 1800.0], each.error


def be_alone(rank: int) -> list[Any]:
    before = sockets()
    found = meet(0, {}, False)
    return [*found, listening() - before]


def sockets() -> set[str]:
    return listening()


def listening() -> set[str]:
    """Ports of this network on which something listens."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {parts[1] for parts in lines if len(parts) > 3 and parts[3] == "0A" and parts[9] in own_sockets()}


def own_sockets() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def test_a_process_by_itself(launch: Launch) -> None:
    """No environment, no arguments; and the store opens no port (gloo's own pairs may)."""
    (ended,) = launch(1, be_alone)
    assert ended.value is not None, ended.error
    assert ended.value[:6] == [True, True, 1, 1.0, "gloo", 1800.0]
    assert not any(address.endswith(f":{29500:04X}") for address in ended.value[6])


def start_again(rank: int) -> list[str]:
    found = []
    init_distributed()
    for required in (None, False):
        init_distributed(dist_init_required=required)
        found.append("fine")
    try:
        init_distributed(dist_init_required=True)
        found.append("fine")
    except CommError as error:
        found.append(str(error))
    return found


def test_starting_again(launch: Launch) -> None:
    (ended,) = launch(1, start_again)
    assert ended.value is not None, ended.error
    none, false, true = ended.value
    assert (none, false) == ("fine", "fine")
    assert "runs already" in true and "pass None" in true


def never_met(rank: int, address: str, limit_s: float) -> str:
    try:
        init_distributed(init_method=address, rank=0, world_size=2, timeout=timedelta(seconds=limit_s))
    except CommError as error:
        return str(error)
    return "met"


def test_a_rank_that_nobody_meets_says_where_it_waited(launch: Launch) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    (ended,) = launch(1, never_met, address, 1.0)
    assert ended.value is not None, ended.error
    assert ended.value.startswith(f"rank 0 of 2 could not meet the others at {address}: ")
    assert "check that every rank was started" in ended.value


def test_a_port_in_use_is_an_error_with_its_address(launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        (ended,) = launch(1, never_met, address, 2.0)
    assert ended.value is not None, ended.error
    assert address in ended.value and "rank 0 of 2" in ended.value


def write_log(rank: int, verbose: bool) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_comm").addHandler(handler)
    logging.getLogger("ds_comm").setLevel(logging.INFO)
    init_distributed(verbose=verbose)
    return lines


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose(launch: Launch, verbose: bool) -> None:
    (ended,) = launch(1, write_log, verbose)
    assert ended.value == (["process group: 1 ranks, backend gloo"] if verbose else [])
