"""`ds`: assembles the commands. One file in `ds_cli.commands` holds one command."""

from __future__ import annotations

from typing import Annotated

import typer

from ds_cli import __version__
from ds_cli.commands import io, launch, nvme_tune

# No rich markup: plain help starts in half the time, and is plain in a pipe whatever FORCE_COLOR says.
app = typer.Typer(
    name="ds",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"ds {__version__}")
        raise typer.Exit


@app.callback()
def ds(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Launch training and measure drives from the shell."""


launch.register(app)
nvme_tune.register(app)
io.register(app)
