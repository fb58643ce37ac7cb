"""What users of ds-comm catch."""


class CommError(RuntimeError):
    """Ranks can't communicate: one died, one is in another collective, or one did not come in time."""
