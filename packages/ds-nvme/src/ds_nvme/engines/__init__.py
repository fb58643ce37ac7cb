"""Engines: what carries blocks between memory and files."""
