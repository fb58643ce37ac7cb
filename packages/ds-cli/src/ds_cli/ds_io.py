"""`ds_io`: the documented name of `ds io`. Same options and same code."""

from __future__ import annotations

import typer

from ds_cli.commands import io

app = typer.Typer(
    name="ds_io",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
io.register(app, "ds_io")
