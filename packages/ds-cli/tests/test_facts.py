"""What is learned from the system: GPUs from NVML, cores from the kernel's files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ds_cli.launcher.accelerators import count_gpus
from ds_cli.launcher.cores import format_core_list, parse_core_list, read_numa_nodes


class FakeNvml(ModuleType):
    """NVML with a given number of GPUs, or with an error at its start."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        super().__init__("pynvml")
        self.count, self.error, self.is_open = count, error, False

    def nvmlInit(self) -> None:
        if self.error:
            raise self.error
        self.is_open = True

    def nvmlDeviceGetCount(self) -> int:
        assert self.is_open
        return self.count

    def nvmlShutdown(self) -> None:
        self.is_open = False


def test_gpus_are_counted_and_nvml_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(3)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert count_gpus() == 3
    assert not nvml.is_open


def test_no_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(3, RuntimeError("driver/library version mismatch")))
    assert count_gpus() == 0


def test_no_pynvml_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import fails
    assert count_gpus() == 0


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0-3,8,10-11", (0, 1, 2, 3, 8, 10, 11)), ("5,2-3", (5, 2, 3)), (" 1, 2 ", (1, 2))],
)
def test_core_lists(text: str, cores: tuple[int, ...]) -> None:
    assert parse_core_list(text) == cores
    assert parse_core_list(format_core_list(cores)) == cores


def test_core_lists_are_short() -> None:
    assert format_core_list((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"


def machine_files(root: Path, nodes: list[str], siblings: dict[int, str]) -> Path:
    for index, cpus in enumerate(nodes):
        folder = root / f"node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for cpu, text in siblings.items():
        folder = root / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    return root


def test_one_cpu_of_each_core_by_numa_node(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    system = machine_files(tmp_path, ["0-1,4-5", "2-3,6-7", ""], siblings)
    assert read_numa_nodes(range(8), system) == ((0, 1), (2, 3))
    # Where only the second thread of a core is allowed, it stands for the core.
    assert read_numa_nodes({1, 4, 5, 6}, system) == ((1, 4), (6,))


def test_a_silent_kernel_gives_one_node(tmp_path: Path) -> None:
    assert read_numa_nodes({3, 1}, tmp_path) == ((1, 3),)
