"""`deepspeed`: the launcher under the name its users know. Same options and same code as `ds launch`."""

from __future__ import annotations

import typer

from ds_cli.commands import launch

app = typer.Typer(
    name="deepspeed",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
launch.register(app, "deepspeed")
