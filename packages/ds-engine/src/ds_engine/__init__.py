"""ds-engine: the training engine. `initialize(...)` is where to start."""

import gc

# Modules make many objects that stay. Collecting garbage meanwhile goes through all of torch's objects, which takes
# as long as the import itself.
_collects = gc.isenabled()
gc.disable()
try:
    from ds_engine.batch import BatchSizes
    from ds_engine.config import Config
    from ds_engine.dataloader import DistributedLoader, RepeatingLoader
    from ds_engine.engine import Engine
    from ds_engine.errors import ConfigError, EngineError
    from ds_engine.events import Event, Events
    from ds_engine.initialize import add_config_arguments, initialize
    from ds_engine.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
    from ds_engine.optim_lamb import Lamb
    from ds_engine.optim_lion import Lion
finally:
    if _collects:
        gc.enable()

__all__ = [
    "BatchSizes",
    "Config",
    "ConfigError",
    "DistributedLoader",
    "Engine",
    "EngineError",
    "Event",
    "Events",
    "LRRangeTest",
    "Lamb",
    "Lion",
    "OneCycle",
    "RepeatingLoader",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_config_arguments",
    "initialize",
]
