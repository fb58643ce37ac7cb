"""ds-zero: optimizer states, gradients and parameters shared out over data-parallel ranks."""

from ds_zero.config import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from ds_zero.covered import is_sharded
from ds_zero.errors import ZeroError
from ds_zero.estimate import (
    MemoryEstimate,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from ds_zero.estimate3 import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from ds_zero.external import register_external_parameter, unregister_external_parameter
from ds_zero.fetch_plan import FetchPlan, Unit, plan_units
from ds_zero.gathered import GatheredParameters
from ds_zero.init import Init
from ds_zero.layout import Cut, GroupLayout, ParameterInfo, Slot, plan_groups
from ds_zero.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from ds_zero.policy import ShardPolicy
from ds_zero.sharded_optimizer import ShardedOptimizer, StepReport
from ds_zero.state_access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

__all__ = [
    "Cut",
    "FetchPlan",
    "GatheredParameters",
    "GroupLayout",
    "Init",
    "MemoryEstimate",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "ParameterInfo",
    "ShardPolicy",
    "ShardedOptimizer",
    "Slot",
    "StepReport",
    "Unit",
    "ZeroConfig",
    "ZeroError",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_z3_leaf_modules",
    "is_sharded",
    "plan_groups",
    "plan_units",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]
