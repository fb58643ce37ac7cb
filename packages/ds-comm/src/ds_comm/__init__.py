"""ds-comm: process groups, meshes, collectives and shard specifications."""

from ds_comm.communicator import Communicator
from ds_comm.config import CommsLoggerConfig
from ds_comm.errors import CommError
from ds_comm.functional import (
    all_gather_into_tensor,
    all_reduce,
    barrier,
    broadcast,
    communicator,
    reduce_scatter_tensor,
)
from ds_comm.mesh import ParallelDims
from ds_comm.process_group import (
    default_backend,
    device_type,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
)
from ds_comm.routes import Route, RoutePolicy
from ds_comm.shard_spec import ShardSpec
from ds_comm.work import Work

__all__ = [
    "CommError",
    "CommsLoggerConfig",
    "Communicator",
    "ParallelDims",
    "Route",
    "RoutePolicy",
    "ShardSpec",
    "Work",
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "communicator",
    "default_backend",
    "device_type",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
    "reduce_scatter_tensor",
]
