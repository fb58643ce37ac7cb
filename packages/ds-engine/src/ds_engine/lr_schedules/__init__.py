"""Learning-rate schedules that change at every training step, and how a configuration names them.

A schedule is a pure function of the iteration (`lr_at`) and one integer of state, `last_batch_iteration`. The
optimizer starts at iteration -1; the n-th call of `step()` (from 0) moves it to iteration n.

The formulas are those of DeepSpeed's documentation (chapter "Learning Rate Schedulers"); where it gives only
words, the numbers are those DeepSpeed 0.19 produces. Each class names where it differs, and why.
"""

from ds_engine.lr_schedules.build import SCHEDULES, build_scheduler, check_scheduler
from ds_engine.lr_schedules.one_cycle import OneCycle
from ds_engine.lr_schedules.range_test import LRRangeTest
from ds_engine.lr_schedules.schedule import Schedule
from ds_engine.lr_schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
    "check_scheduler",
]
