"""Importing a package does nothing but import: no accelerator, thread, output or global state; and it is light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py"))
SCRIPTS = Path(sysconfig.get_path("scripts"))
COMMANDS = [
    ["ds"],
    ["ds", "launch"],
    ["ds", "nvme-tune"],
    ["ds", "io"],
    ["deepspeed"],
    ["ds_nvme_tune"],
    ["ds_io"],
]

PROBE = """
import json, logging, os, signal, sys, threading, warnings
import random

def state():
    import torch
    return {
        "environment": dict(os.environ),
        "signals": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "root handlers": str(logging.getLogger().handlers),
        "root level": logging.getLogger().level,
        "our handlers": str([logging.getLogger(name).handlers for name in PACKAGES]),
        "excepthook": str(sys.excepthook),
        "warning filters": str(warnings.filters),
        "recursion limit": sys.getrecursionlimit(),
        "path": sys.path,
        "folder": os.getcwd(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed(),
        "random": hash(random.getstate()),
        "torch threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "start method": str(torch.multiprocessing.get_start_method(allow_none=True)),
        "process group": torch.distributed.is_initialized(),
        "threads": [each.name for each in threading.enumerate()],
        "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "children": open(f"/proc/self/task/{os.getpid()}/children").read() if os.path.isdir("/proc/self") else "",
    }

import torch
import torch.multiprocessing, torch.distributed
touched = []
def touch(*args, **kwargs):
    touched.append("torch.cuda.init")
    raise RuntimeError("an accelerator was touched")
torch.cuda.init = torch.cuda._lazy_init = touch
torch.cuda.set_device = torch.cuda.current_device = torch.cuda.synchronize = touch

before, modules = state(), set(sys.modules)
__import__(PACKAGE)
after = state()
print(json.dumps({
    "changed": {name: [before[name], after[name]] for name in before if before[name] != after[name]},
    "touched": touched,
    "initialized": torch.cuda.is_initialized(),
    "schemas": "pydantic.plugin._loader" in sys.modules,
    "new": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
}), file=sys.stderr)
"""

FORK = """
import os, sys, torch
for name in PACKAGES:
    __import__(name)
child = os.fork()
if child == 0:
    torch.manual_seed(0)
    works = float(torch.ones(64, 64).mm(torch.ones(64, 64)).sum()) == 64 ** 3
    # After a fork only the forking thread lives on: what an import started would be gone or hang here.
    engine, *_ = sys.modules[PACKAGE].initialize(
        model=torch.nn.Linear(2, 2),
        config={"train_batch_size": 1, "optimizer": {"type": "Adam"}, "steps_per_print": 0},
    )
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    os._exit(0 if works and not torch.cuda._is_in_bad_fork() else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""

HEAVY = {
    *("pandas", "matplotlib", "rich", "numpy", "scipy", "psutil", "PIL", "triton", "tensorboard", "wandb"),
    *("transformers", "torchvision", "pytest", "hypothesis", "IPython", "pynvml", "setuptools", "pkg_resources"),
}
"""Modules that no `import` of ours may add to what torch loads."""

ALONG = {
    "ds_comm": {"pydantic"},
    "ds_zero": {"ds_comm", "pydantic"},
    "ds_engine": {"ds_comm", "ds_zero", "pydantic"},
}
"""What a package's import may bring beside itself, of our packages and the libraries that take time. Others: none."""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    env.update(environment)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


def declared(code: str, package: str) -> str:
    return f"PACKAGE, PACKAGES = {package!r}, {PACKAGES!r}\n{code}"


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_does_nothing_else(package: str) -> None:
    done = run(declared(PROBE, package), CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "no output"
    *warnings, line = done.stderr.strip().splitlines()
    assert [each for each in warnings if "ds_" in each] == [], "no warnings"
    found = json.loads(line)
    assert found["changed"] == {}
    assert found["touched"] == [] and found["initialized"] is False
    assert HEAVY.isdisjoint(found["new"]), "light"
    assert not found["schemas"], "pydantic builds a model's schema, and looks for its plugins, at the first use"
    brought = {name for name in found["new"] if name.startswith("ds_") or name in ("pydantic", "typer", "click")}
    assert brought == {package, *ALONG.get(package, ())}


CHANGES = {
    "environment": "os.environ['X_NEW'] = '1'",
    "threads": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "signals": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "dtype": "torch.set_default_dtype(torch.float64)",
    "root handlers": "logging.basicConfig()",
    "warning filters": "warnings.simplefilter('ignore')",
    "files": "open_file = open(os.devnull)",
    "seed": "torch.manual_seed(1)",
    "random": "random.random()",
}


def test_the_probe_sees_changes() -> None:
    """What the test above calls unchanged would be seen if it changed."""
    code = declared(PROBE, "none").replace("__import__(PACKAGE)", "; ".join(CHANGES.values()))
    found = json.loads(run(code).stderr.strip().splitlines()[-1])
    assert set(found["changed"]) == {*CHANGES, "tasks"}


def test_imports_survive_a_fork() -> None:
    done = run(declared(FORK, "ds_engine"), OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_loads_no_torch(command: list[str]) -> None:
    """As the console script runs it: everything that Python imported is on its standard error."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPTS / command[0], *command[1:], "--help"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "ds_cli" in loaded
    assert loaded.isdisjoint({"torch", *HEAVY}) and "ds_comm" not in loaded


def test_every_command_is_looked_at() -> None:
    done = subprocess.run([SCRIPTS / "ds", "--help"], capture_output=True, text=True, timeout=240)
    _, _, listed = done.stdout.partition("Commands:\n")
    names = {line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "}
    assert names == {command[1] for command in COMMANDS if len(command) == 2}
