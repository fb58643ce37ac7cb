"""The command line of ds-stack: `ds`, and the `deepspeed` launcher.

Importing this package loads nothing else: each command imports what it needs when it runs.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
