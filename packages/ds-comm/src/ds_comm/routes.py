"""What a collective is built from: a choice by backend, size and place, the same on every rank.

Measured on one machine, 2 gloo ranks of one thread, 93 MB of fp32 (milliseconds):

| route             | reduce-scatter | all-gather | all-reduce |
|-------------------|---------------:|-----------:|-----------:|
| the backend's own |            186 |        141 |         71 |
| point to point    |             76 |         76 |          – |
| shared memory     |             18 |         15 |         34 |

The route decides speed only: results are equal, and the tests hold every route to that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

SHARED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What shared memory is used for: dtypes in which sums can be made on a CPU."""


class Route(enum.Enum):
    """How a collective travels."""

    NATIVE = "native"
    """The backend's own collective."""

    PEERS = "peers"
    """Exchanges by send and receive, summed here: gloo's reduce-scatter and all-gather copy too much."""

    SHARED_MEMORY = "shared memory"
    """Memory that the ranks of one host share."""


@dataclass(frozen=True)
class RoutePolicy:
    """The thresholds. One object, so that a test can force a route.

    Args:
        min_shared_bytes: below it, the backend is asked. Sharing is faster at every size measured, and sums in
            rank order, so that results do not depend on how tensors are cut.
        min_peer_bytes: below it, one native call beats several sends.
        max_shared_ranks: every rank signals every other, so the cost of a step grows with their number.
        shared_memory: False never shares memory.
        peers: False never builds collectives from sends.
    """

    min_shared_bytes: int = 0
    min_peer_bytes: int = 64 << 10
    max_shared_ranks: int = 32
    shared_memory: bool = True
    peers: bool = True

    def choose(self, kind: str, backend: str, tensor: torch.Tensor, world: int, one_host: bool) -> Route:
        """The route of one call.

        Args:
            kind: "all_reduce", "reduce_scatter" or "all_gather".
            backend: the backend that serves the tensor's device, as "gloo".
            tensor: the larger of the call's tensors.
            world: ranks in the group.
            one_host: all of them run on one machine and can share memory.
        """
        if backend != "gloo" or tensor.device.type != "cpu" or tensor.dtype not in SHARED_DTYPES:
            return Route.NATIVE
        num_bytes = tensor.numel() * tensor.element_size()
        if (
            self.shared_memory
            and one_host
            and 1 < world <= self.max_shared_ranks
            and num_bytes >= self.min_shared_bytes
        ):
            return Route.SHARED_MEMORY
        if self.peers and kind != "all_reduce" and num_bytes >= self.min_peer_bytes:
            return Route.PEERS
        return Route.NATIVE
