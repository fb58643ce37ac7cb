"""What users of ds-zero catch."""


class ZeroError(RuntimeError):
    """Sharded training can't go on: an unused parameter, a state that isn't there, a call at the wrong time."""
