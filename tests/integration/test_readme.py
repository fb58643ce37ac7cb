"""Every snippet of every README runs as it stands, in the order in which it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
SNIPPET = re.compile(r"^```(python|bash|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def command(language: str, text: str) -> tuple[list[str], str]:
    if language == "python":
        return [sys.executable, "-"], text
    # make's two set-ups would run this test again: that the targets are there and well-formed is checked here,
    # that they work is what continuous integration shows.
    return ["bash", "-eu"], re.sub(r"^make ", "make -n ", text, flags=re.MULTILINE)


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: str(readme.relative_to(ROOT)))
def test_snippets(readme: Path, tmp_path: Path) -> None:
    snippets = SNIPPET.findall(readme.read_text())
    assert snippets, "a README shows how it is used"
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["OMP_NUM_THREADS"] = "1"
    where = ROOT if readme.parent == ROOT else tmp_path
    for language, text in snippets:
        arguments, source = command(language, text)
        done = subprocess.run(
            arguments, input=source, text=True, cwd=where, env=env, capture_output=True, timeout=500, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: str(readme.relative_to(ROOT)))
def test_links_lead_somewhere(readme: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", readme.read_text()):
        assert (readme.parent / target).exists(), f"{readme.relative_to(ROOT)} links to {target}"
