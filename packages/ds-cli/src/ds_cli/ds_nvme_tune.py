"""`ds_nvme_tune`: the documented name of `ds nvme-tune`. Same options and same code."""

from __future__ import annotations

import typer

from ds_cli.commands import nvme_tune

app = typer.Typer(
    name="ds_nvme_tune",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
nvme_tune.register(app, "ds_nvme_tune")
