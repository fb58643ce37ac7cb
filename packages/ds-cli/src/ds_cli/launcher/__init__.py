"""The launcher of one machine: first a frozen plan (`LaunchPlan`), then its executor (`Supervisor`)."""

from __future__ import annotations

from ds_cli.launcher.errors import LaunchError
from ds_cli.launcher.machine import Machine
from ds_cli.launcher.options import LaunchOptions
from ds_cli.launcher.plan import LaunchPlan, RankPlan
from ds_cli.launcher.supervisor import Supervisor

__all__ = ["LaunchError", "LaunchOptions", "LaunchPlan", "Machine", "RankPlan", "Supervisor"]
