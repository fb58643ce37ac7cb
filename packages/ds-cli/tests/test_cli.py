"""The command line: help, versions, parsing, errors. Ranks are not started here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ds_cli
import ds_cli.deepspeed
import ds_cli.main

runner = CliRunner()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "train.py"
    path.write_text("")
    yield str(path)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_start_is_light(option: str) -> None:
    code = (
        "import sys\n"
        "from ds_cli.main import app\n"
        "try:\n"
        f"    app([{option!r}])\n"
        "except SystemExit as end:\n"
        "    assert end.code in (0, None), end.code\n"
        "heavy = {'torch', 'pydantic', 'pynvml', 'numpy', 'ds_cli.launcher'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_launching_does_not_import_torch(script: str) -> None:
    code = (
        "import sys\n"
        "from ds_cli.deepspeed import app\n"
        "try:\n"
        f"    app(['--num_gpus', '1', {script!r}])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "assert 'ds_cli.launcher.supervisor' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", [["ds"], ["ds", "launch"], ["deepspeed"]])
def test_console_scripts_are_plain_in_a_pipe(command: list[str], scripts_dir: Path) -> None:
    env = {**os.environ, "FORCE_COLOR": "1", "GITHUB_ACTIONS": "true", "PY_COLORS": "1"}
    for option, code in (("--help", 0), ("--bogus", 2)):
        result = subprocess.run(
            [scripts_dir / command[0], *command[1:], option], capture_output=True, text=True, env=env
        )
        assert result.returncode == code
        assert "Usage: " in result.stdout + result.stderr
        assert "\x1b" not in result.stdout + result.stderr


def test_version() -> None:
    result = runner.invoke(ds_cli.main.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"ds {ds_cli.__version__}\n"


def test_versions_agree() -> None:
    from importlib.metadata import version

    assert version("ds-cli") == ds_cli.__version__


@pytest.mark.parametrize("name", ["launch", "deepspeed"])
def test_dry_run_shows_the_plan(name: str, script: str) -> None:
    arguments = ["--num_gpus", "2", "--dry-run", script, "--lr", "1"]
    if name == "launch":
        result = runner.invoke(ds_cli.main.app, ["launch", *arguments], env={"CUDA_VISIBLE_DEVICES": ""})
    else:
        result = runner.invoke(ds_cli.deepspeed.app, arguments, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.exit_code == 0
    assert "2 rank(s)" in result.stdout
    assert f"{script} --local_rank=1 --lr 1" in result.stdout
    assert "WORLD_SIZE=2" in result.stdout


def plan_of(*arguments: str) -> dict:
    result = runner.invoke(ds_cli.deepspeed.app, ["--json", *arguments], env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "options",
    [
        ["--num_gpus", "2"],
        ["--num-gpus", "2"],
        ["--num_gpus=2"],
        ["--num_accelerators=2"],
        ["--num-accelerators", "2"],
        ["--num_nodes", "1", "--num_gpus", "2"],
    ],
)
def test_spellings(options: list[str], script: str) -> None:
    assert plan_of(*options, script)["world_size"] == 2


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_the_scripts_arguments_are_untouched(separator: list[str], script: str) -> None:
    arguments = ["--num-gpus", "7", "--", "--help", "", "-x", "--dry_run", "--", "a b", "--hostfile=h", "é"]
    plan = plan_of("--no-local-rank", *separator, script, *arguments)
    assert plan["world_size"] == 1
    assert plan["ranks"][0]["command"] == [sys.executable, script, *arguments]


def test_all_options_arrive(script: str) -> None:
    plan = plan_of(
        *("--include", "localhost:0,1", "--master_addr", "10.1.1.1", "--log_dir", "logs", "--grace-s", "2.5"),
        *("--bind_cores_to_rank", "--bind_core_list", _core(), "--include", "localhost:0", script),
    )
    assert (plan["world_size"], plan["master_addr"]) == (1, "10.1.1.1")
    assert (plan["log_dir"], plan["grace_s"]) == ("logs", 2.5)
    assert plan["ranks"][0]["cores"] == [int(_core())]


def _core() -> str:
    return str(min(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], ["deepspeed: SCRIPT must be a file that exists", "'absent.py'"]),
        (["--num_nodes=2", "x.py"], ["not yet", "--num_nodes"]),
        (["--include=far:0", "{script}"], ["not yet", "'far:0'"]),
        (["--num_gpus=many", "{script}"], ["--num_gpus", "many"]),
        (["--num_gpu=2", "{script}"], ["--num_gpu", "--num_gpus"]),
        ([], ["SCRIPT"]),
    ],
)
def test_errors_exit_with_2_and_no_traceback(arguments: list[str], words: list[str], script: str) -> None:
    result = runner.invoke(
        ds_cli.deepspeed.app,
        [part.format(script=script) for part in arguments],
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_an_unusable_log_dir_is_an_error(script: str, tmp_path: Path, scripts_dir: Path) -> None:
    (tmp_path / "file").write_text("")
    result = subprocess.run(
        [scripts_dir / "ds", "launch", "--log_dir", tmp_path / "file", script], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.startswith("ds launch: --log_dir must be a directory")
    assert "Traceback" not in result.stderr


def test_python_m_is_the_same_program() -> None:
    result = subprocess.run([sys.executable, "-m", "ds_cli", "--version"], capture_output=True, text=True)
    assert result.stdout == f"ds {ds_cli.__version__}\n"
