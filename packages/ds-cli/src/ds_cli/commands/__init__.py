"""One file a command. Each has `register(app)`, which adds the command to a Typer application."""
