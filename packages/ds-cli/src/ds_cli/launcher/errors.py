"""What a user of the launcher can get wrong."""

from __future__ import annotations


class LaunchError(ValueError):
    """A job that cannot be launched as asked. The message states the rule, the value and the mend."""
