"""Launch plans, made for machines that are only described. Nothing is started."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ds_cli.launcher import LaunchError, LaunchOptions, LaunchPlan, Machine
from ds_cli.launcher.ports import choose_port, port_is_free

FOUR_GPUS = Machine(
    hostnames=frozenset({"localhost", "worker-1"}),
    num_gpus=4,
    cpus=tuple(range(16)),
    numa_nodes=((0, 1, 2, 3), (4, 5, 6, 7)),
)
NO_GPU = dataclasses.replace(FOUR_GPUS, num_gpus=0)


def build(machine: Machine, environ: Mapping[str, str] | None = None, **options: Any) -> LaunchPlan:
    options.setdefault("script", __file__)
    return LaunchPlan.build(LaunchOptions(**options), machine, environ or {})


def devices(plan: LaunchPlan) -> str:
    (value,) = {rank.env["CUDA_VISIBLE_DEVICES"] for rank in plan.ranks}
    return value


def cores(plan: LaunchPlan) -> list[tuple[int, ...] | None]:
    return [rank.cores for rank in plan.ranks]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "0,1,2,3"),
        ({"num_gpus": 2}, "0,1"),
        ({"include": "localhost:0,1"}, "0,1"),
        ({"include": "localhost:3,1"}, "3,1"),
        ({"include": "worker-1:2"}, "2"),
        ({"include": "localhost"}, "0,1,2,3"),
        ({"exclude": "localhost:0"}, "1,2,3"),
        ({"exclude": "localhost:3,1"}, "0,2"),
    ],
)
def test_gpus_are_chosen(options: dict[str, Any], expected: str) -> None:
    plan = build(FOUR_GPUS, **options)
    assert devices(plan) == expected
    assert len(plan.ranks) == len(expected.split(","))
    assert [rank.env["LOCAL_RANK"] for rank in plan.ranks] == [str(n) for n in range(len(plan.ranks))]


@pytest.mark.parametrize(
    ("visible", "options", "expected"),
    [
        ("2,3", {}, "2,3"),
        ("3,1", {"num_gpus": 1}, "3"),
        ("2,3", {"include": "localhost:1"}, "3"),
        ("1,2,3", {"exclude": "localhost:1"}, "1,3"),
        ("GPU-aa, MIG-bb", {"include": "localhost:1,0"}, "MIG-bb,GPU-aa"),
        ("0,9,1", {}, "0"),  # CUDA stops at the first index that does not exist
    ],
)
def test_slots_count_within_cuda_visible_devices(visible: str, options: dict[str, Any], expected: str) -> None:
    assert devices(build(FOUR_GPUS, {"CUDA_VISIBLE_DEVICES": visible}, **options)) == expected


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_no_gpus(hidden: str) -> None:
    plan = build(FOUR_GPUS, {"CUDA_VISIBLE_DEVICES": hidden})
    assert len(plan.ranks) == 1
    assert "CUDA_VISIBLE_DEVICES" not in plan.ranks[0].env


@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [({}, 1), ({"num_gpus": 3}, 3), ({"include": "localhost:0,1"}, 2), ({"include": "localhost"}, 1)],
)
def test_without_gpus_ranks_run_on_the_cpu(options: dict[str, Any], num_ranks: int) -> None:
    plan = build(NO_GPU, **options)
    assert len(plan.ranks) == num_ranks
    assert all("CUDA_VISIBLE_DEVICES" not in rank.env for rank in plan.ranks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": 5}, ["4 visible GPUs", "is 5"]),
        ({"num_gpus": 0}, ["at least 1", "is 0"]),
        ({"num_nodes": 2}, ["not yet", "is 2"]),
        ({"include": "localhost:4"}, ["from 0 to 3", "names 4"]),
        ({"exclude": "localhost:7"}, ["from 0 to 3", "names 7"]),
        ({"include": "worker-9:0"}, ["not yet", "'worker-9:0'", "localhost:0"]),
        ({"exclude": "worker-9"}, ["not yet", "'worker-9'"]),
        ({"include": "localhost:0@worker-2:0,1"}, ["not yet", "localhost:0@worker-2:0,1"]),
        ({"include": "localhost:a"}, ["numbers", "'a'"]),
        ({"include": "localhost:"}, ["numbers", "'localhost:'"]),
        ({"include": "localhost:1,1"}, ["once", "second 1"]),
        ({"exclude": "localhost:0,1,2,3"}, ["leave a slot"]),
        ({"exclude": "localhost"}, ["leave a slot"]),
        ({"include": "localhost:0", "exclude": "localhost:1"}, ["combined"]),
        ({"include": "localhost:0", "num_gpus": 1}, ["combined"]),
        ({"module": True, "no_python": True}, ["--module", "--no_python"]),
        ({"master_port": 70000}, ["65535", "70000"]),
        ({"grace_s": -1.0}, ["--grace_s", "-1"]),
        ({"script": "absent.py"}, ["exists", "'absent.py'", "--module"]),
        ({"script": "absent-command", "no_python": True}, ["executable", "'absent-command'"]),
        ({"script": ""}, ["empty"]),
        ({"bind_core_list": "0-99"}, ["0-15", "16-99"]),
        ({"bind_core_list": "3-1"}, ["ranges", "'3-1'"]),
        ({"bind_core_list": "1,x"}, ["ranges", "'x'"]),
        ({"bind_core_list": "0-3,2"}, ["once", "2 twice"]),
        ({"bind_core_list": "0-2"}, ["4 ranks for 3 cores", "0-2"]),
    ],
)
def test_errors_name_the_rule_and_the_value(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        build(FOUR_GPUS, **options)
    for word in words:
        assert word in str(caught.value)


def test_a_device_named_twice_is_an_error() -> None:
    with pytest.raises(LaunchError, match="second '1'"):
        build(FOUR_GPUS, {"CUDA_VISIBLE_DEVICES": "1,2,1"})


def test_environment_of_a_rank() -> None:
    plan = build(NO_GPU, num_gpus=3, master_addr="10.0.0.1", master_port=1234)
    assert dict(plan.ranks[2].env) == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "LOCAL_SIZE": "3",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "OMP_NUM_THREADS": "5",  # 16 CPUs for 3 ranks
        "PYTHONUNBUFFERED": "1",
    }


def test_the_users_environment_is_kept() -> None:
    (rank,) = build(NO_GPU, {"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""}).ranks
    assert not {"OMP_NUM_THREADS", "PYTHONUNBUFFERED"} & set(rank.env)


def test_every_rank_gets_a_thread() -> None:
    assert build(NO_GPU, num_gpus=40).ranks[39].env["OMP_NUM_THREADS"] == "1"


ARGUMENTS = ("--num_gpus", "7", "--", "--help", "", "a b", "--local_rank=9")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (sys.executable, __file__, "--local_rank=1", *ARGUMENTS)),
        ({"no_local_rank": True}, (sys.executable, __file__, *ARGUMENTS)),
        ({"module": True, "script": "a.b"}, (sys.executable, "-m", "a.b", "--local_rank=1", *ARGUMENTS)),
        ({"no_python": True, "script": "sh"}, ("sh", "--local_rank=1", *ARGUMENTS)),
    ],
)
def test_commands(options: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert build(NO_GPU, num_gpus=2, script_args=ARGUMENTS, **options).ranks[1].command == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_gpus": 2, "bind_core_list": "0-3,8,10-11"}, [(0, 1, 2), (3, 8, 10)]),  # 11 stays idle
        ({"num_gpus": 1, "bind_core_list": "0-3,8,10-11"}, [(0, 1, 2, 3, 8, 10, 11)]),
        ({"bind_cores_to_rank": True}, [(0, 1, 2, 3), (4, 5, 6, 7)]),  # a rank for each NUMA node
        ({"num_gpus": 4, "bind_cores_to_rank": True}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"num_gpus": 3, "bind_cores_to_rank": True}, [(0, 1), (2, 3), (4, 5)]),
        ({"num_gpus": 2}, [None, None]),
    ],
)
def test_cores_are_divided(options: dict[str, Any], expected: list[tuple[int, ...] | None]) -> None:
    plan = build(NO_GPU, {"OMP_NUM_THREADS": "99"}, **options)
    assert cores(plan) == expected
    for rank in plan.ranks:
        assert rank.env.get("OMP_NUM_THREADS") == (None if rank.cores is None else str(len(rank.cores)))


def test_the_smaller_numa_node_decides_the_share() -> None:
    machine = dataclasses.replace(NO_GPU, numa_nodes=((0, 1, 2), (4, 5)))
    assert cores(build(machine, bind_cores_to_rank=True)) == [(0, 1), (4, 5)]


def test_binding_needs_a_system_that_binds() -> None:
    with pytest.raises(LaunchError, match="Linux"):
        build(dataclasses.replace(NO_GPU, can_bind=False), bind_cores_to_rank=True)


def test_default_port_unless_taken() -> None:
    assert build(NO_GPU).master_port == 29500
    plan = build(dataclasses.replace(NO_GPU, port_is_free=lambda port: port != 29500))
    assert plan.master_port != 29500
    assert plan.ranks[0].env["MASTER_PORT"] == str(plan.master_port)
    assert port_is_free(plan.master_port)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_chosen_port_that_is_taken_is_an_error(address: str) -> None:
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not port_is_free(port)
        with pytest.raises(LaunchError, match=rf"{port} is taken.*leave it out"):
            choose_port(port)


def test_a_plan_is_frozen_and_prints() -> None:
    plan = build(FOUR_GPUS, num_gpus=2, bind_core_list="0-7", script_args=("it's", "\udcff"), log_dir="logs")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.master_port = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.ranks[0].env["RANK"] = "1"  # type: ignore[index]
    data = json.loads(plan.to_json())
    assert data == plan.to_dict()
    assert data["world_size"] == 2
    assert data["log_dir"] == "logs"
    assert data["ranks"][1]["cores"] == [4, 5, 6, 7]
    assert data["ranks"][1]["command"][-2:] == ["it's", "\udcff"]
    text = plan.to_text()
    text.encode()
    assert "rank 1 on cores 4-7" in text
    assert "  CUDA_VISIBLE_DEVICES=0,1\n" in text


def test_detect_describes_this_machine() -> None:
    machine = Machine.detect()
    assert {"localhost", socket.gethostname()} <= machine.hostnames
    assert machine.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert {cpu for node in machine.numa_nodes for cpu in node} <= set(machine.cpus)
    assert all(machine.numa_nodes)


def test_a_script_may_be_a_folder_with_main(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("")
    assert build(NO_GPU, script=str(tmp_path)).ranks[0].command[1] == str(tmp_path)
