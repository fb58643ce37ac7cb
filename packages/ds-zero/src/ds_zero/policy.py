"""What the ZeRO stages are: for each model state, whether ranks share it out or all hold it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardPolicy:
    """Which model states are sharded over the ranks. The stages are four of these, and nothing else.

    Args:
        parameters: each rank holds a part, gathered for use.
        gradients: each rank keeps only its part, so every backward reduces.
        optimizer_states: each rank updates only its part.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """

    parameters: bool
    gradients: bool
    optimizer_states: bool

    @classmethod
    def of_stage(cls, stage: int) -> ShardPolicy:
        """The policy of ZeRO stage 0, 1, 2 or 3."""
        return cls(parameters=stage >= 3, gradients=stage >= 2, optimizer_states=stage >= 1)
