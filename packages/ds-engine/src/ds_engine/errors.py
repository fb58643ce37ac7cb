"""What users of ds-engine catch."""


class EngineError(RuntimeError):
    """The engine was called at the wrong time, or training can't go on."""


class ConfigError(ValueError):
    """The configuration can't be: what is wrong, and what to change."""
