"""Whether cuFile moves bytes straight between drive and GPU, or through host memory; and how that is known."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ALLOW_COMPAT = 1 << 1  # of dcontrolflags
_P2P = 1 << 4  # of fflags
_FILESYSTEMS = {
    0: "Lustre",
    1: "WekaFS",
    2: "NFS",
    3: "GPFS",
    4: "NVMe",
    5: "NVMe-oF",
    6: "SCSI",
    7: "ScaleFlux",
    8: "NVMesh",
    9: "BeeGFS",
    12: "ScateFS",
    13: "VirtioFS",
    14: "PanFS",
}
"""Bits of dstatusflags: what nvidia-fs can reach directly."""


@dataclass(frozen=True)
class Properties:
    """What cuFile says of itself once its driver is open.

    Args:
        nvfs: version of the nvidia-fs kernel module; (0, 0) where it isn't loaded.
        status, control, features: the flag words.
    """

    nvfs: tuple[int, int]
    status: int
    control: int
    features: int


@dataclass(frozen=True)
class Mode:
    """How cuFile moves bytes.

    Args:
        direct: straight between drive and GPU, for files that allow it; otherwise in compatibility mode, through host
            memory.
        why: how that is known.
    """

    direct: bool
    why: str

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'compatibility mode, through host memory'} ({self.why})"


def mode(properties: Properties, config: Mapping[str, Any], environment: Mapping[str, str]) -> Mode:
    """Decide from what is known which mode runs.

    cuFile decides for each file and buffer anew and tells nobody; so direct means that nothing stands in its way here.

    Args:
        properties: of the open driver.
        config: cufile.json's `properties`.
        environment: of the process.
    """
    allowed = bool(properties.control & _ALLOW_COMPAT)
    otherwise = "else in compatibility mode" if allowed else "else it fails: allow_compat_mode is off"
    if _true(environment.get("CUFILE_FORCE_COMPAT_MODE")):
        return Mode(False, "CUFILE_FORCE_COMPAT_MODE asks for it")
    if _true(config.get("force_compat_mode")):
        return Mode(False, "force_compat_mode in cufile.json asks for it")
    if properties.nvfs != (0, 0):
        reached = [name for bit, name in _FILESYSTEMS.items() if properties.status >> bit & 1]
        version = ".".join(map(str, properties.nvfs))
        if not reached:
            return Mode(False, f"nvidia-fs {version} is loaded, and can reach no sort of storage")
        return Mode(True, f"nvidia-fs {version} reaches {', '.join(reached)}; {otherwise}")
    asked = environment.get("CUFILE_USE_PCIP2PDMA", config.get("use_pci_p2pdma"))
    if properties.features & _P2P and _true(asked):
        return Mode(True, f"PCI peer-to-peer DMA, on local NVMe; {otherwise}")
    p2p = "; PCI peer-to-peer DMA is there, but use_pci_p2pdma is off" if properties.features & _P2P else ""
    return Mode(False, f"the nvidia-fs kernel module isn't loaded{p2p}")


def read_config(environment: Mapping[str, str]) -> dict[str, Any]:
    """The `properties` of cufile.json; {} where there is none, or none that can be read."""
    path = Path(environment.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return {}
    # JSON with // comments, which texts in quotes may contain too, and with commas before a closing bracket.
    text = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*', lambda found: found[1] or "", text)
    try:
        found = json.loads(re.sub(r",(\s*[}\]])", r"\1", text))["properties"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def current_mode(properties: Properties) -> Mode:
    """`mode` with this process's configuration and environment."""
    return mode(properties, read_config(os.environ), os.environ)


def _true(value: Any) -> bool:
    return value is True or str(value).strip().lower() in ("1", "true", "on", "yes")
