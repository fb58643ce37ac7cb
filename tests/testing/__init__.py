"""The harness that tests of every package share: a pool of ranks kept alive between tests."""

from testing.pool import RankError, RankPool

__all__ = ["RankError", "RankPool"]
