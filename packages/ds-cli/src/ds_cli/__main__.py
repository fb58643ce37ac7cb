"""`python -m ds_cli` is `ds`."""

from __future__ import annotations

from ds_cli.main import app

app()
