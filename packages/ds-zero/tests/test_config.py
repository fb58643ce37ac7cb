"""The `zero_optimization` section: documented keys, defaults, older spellings, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from ds_zero import OffloadOptimizerConfig, OffloadParamConfig, ShardPolicy, ZeroConfig

DOCUMENTED: dict[str, Any] = {
    "stage": 0,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "use_multi_rank_bucket_allreduce": True,
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": None,
    "load_from_fp32_weights": True,
    "elastic_checkpoint": False,
    "offload_param": None,
    "offload_optimizer": None,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_gather_16bit_weights_on_model_save": False,
    "stage3_module_granularity_threshold": 0,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "round_robin_gradients": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
    "memory_efficient_linear": True,
    "pipeline_loading_checkpoint": False,
    "override_module_apply": True,
    "grad_hooks": True,
    "log_trace_cache_warnings": False,
    "zenflow": None,
}
"""Key and default, from DeepSpeed's API reference 5.1.1, configuration reference and tutorials. `overlap_comm`
depends on the stage, so None."""

OFFLOAD_PARAM = {
    "device": "none",
    "nvme_path": None,
    "buffer_count": 5,
    "buffer_size": 100_000_000,
    "max_in_cpu": 1_000_000_000,
    "pin_memory": False,
}
OFFLOAD_OPTIMIZER = {
    "device": "none",
    "nvme_path": None,
    "buffer_count": 4,
    "pin_memory": False,
    "pipeline_read": False,
    "pipeline_write": False,
    "fast_init": False,
    "ratio": 1.0,
}
REFERENCE: dict[str, dict[str, Any]] = {
    "": {
        "stage": 0,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
        "load_from_fp32_weights": True,
        "grad_hooks": True,
        "round_robin_gradients": False,
        "offload_param": False,
        "offload_optimizer": False,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_module_granularity_threshold": 0,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": False,
        "log_trace_cache_warnings": False,
        "cpu_offload": False,
    },
    "offload_param": {
        "device": "cpu",
        "nvme_path": "/local_nvme",
        "pin_memory": True,
        "buffer_count": 5,
        "buffer_size": 1e8,
        "max_in_cpu": 1e9,
    },
    "offload_optimizer": {
        "device": "cpu",
        "nvme_path": "/local_nvme",
        "pin_memory": True,
        "ratio": 1,
        "buffer_count": 4,
        "fast_init": False,
    },
}
"""Every key of the configuration reference with the default that it states, by section. It says 5e8 of
prefetching where the API reference says 5e7, and gives offloading as switched on."""
SIZES = [key for key, default in DOCUMENTED.items() if isinstance(default, int) and default >= 50_000]


def load(section: Any) -> ZeroConfig:
    """As the engine reads it: through JSON."""
    return ZeroConfig.model_validate(json.loads(json.dumps(section)))


def complaint(section: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        load(section)
    (error,) = caught.value.errors()
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


@pytest.mark.parametrize(
    ("model", "documented"),
    [(ZeroConfig, DOCUMENTED), (OffloadParamConfig, OFFLOAD_PARAM), (OffloadOptimizerConfig, OFFLOAD_OPTIMIZER)],
)
def test_documented_keys_and_defaults(model: type[BaseModel], documented: dict[str, Any]) -> None:
    assert model().model_dump(by_alias=True) == documented


@pytest.mark.parametrize("key", DOCUMENTED)
def test_every_default_may_be_written_out(key: str) -> None:
    assert load({key: DOCUMENTED[key]}) == ZeroConfig()


@pytest.mark.parametrize("section", REFERENCE)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_reference_s_defaults_are_taken_or_refused(section: str, stage: int) -> None:
    """Key by key: what a later version brings says so, everything else is what leaving it out is."""
    other_default = {"stage3_prefetch_bucket_size", "stage"}
    for key, default in REFERENCE[section].items():
        if section == "":
            config = load({"stage": stage, key: default})
            if key not in other_default:
                without = load({"stage": stage}).model_dump()
                assert config.model_dump() == {**without, **({"overlap_comm": False} if key == "overlap_comm" else {})}
        elif key == "device":
            assert "offloading is not available in this version" in complaint({"stage": stage, section: {key: default}})
        else:
            found = getattr(getattr(load({"stage": stage, section: {key: default}}), section), key)
            assert (str(found) if key == "nvme_path" else found) == default


def test_zenflow_is_known_and_refused() -> None:
    assert "zenflow is not available in this version" in complaint({"zenflow": {"topk_ratio": 0.05}})


def test_fields_are_documented_and_the_documentation_names_the_default() -> None:
    """Each field is followed by a docstring; the default that it states is the field's."""
    import inspect

    for model in (ZeroConfig, OffloadParamConfig, OffloadOptimizerConfig):
        source = inspect.getsource(model)
        for name, field in model.model_fields.items():
            found = re.search(rf'^    {name}: .*\n    """((?:.|\n)*?)"""', source, re.MULTILINE)
            assert found, f"{model.__name__}.{name} has no docstring"
            stated = re.search(r"Default: (\S+)", found[1])
            assert stated, f"{model.__name__}.{name} states no default"
            word = stated[1].rstrip(".,;(")
            if isinstance(field.default, bool):
                assert word == str(field.default).lower(), name
            elif isinstance(field.default, int | float) and field.default != sys.maxsize:
                assert float(word) == field.default, name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(stage: int) -> None:
    assert load({"stage": stage}).stage == stage
    policy = ShardPolicy.of_stage(stage)
    assert (policy.optimizer_states, policy.gradients, policy.parameters) == (stage >= 1, stage >= 2, stage >= 3)
    assert ShardPolicy.of_stage(3) == ShardPolicy(True, True, True)


@pytest.mark.parametrize(("section", "stage"), [(True, 1), (False, 0), ({}, 0)])
def test_a_bool_for_the_section(section: Any, stage: int) -> None:
    assert load(section) == ZeroConfig(stage=stage)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", SIZES)
def test_sizes_written_as_5e8(key: str) -> None:
    for text, value in (("5e8", 500_000_000), ("2.5e6", 2_500_000), ("1E5", 100_000), ("7", 7)):
        config = ZeroConfig.model_validate(json.loads(f'{{"{key}": {text}}}'))
        found = config.model_dump(by_alias=True)[key]
        assert found == value and isinstance(found, int)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [-1, 1.5, "many", None, [1], float("nan"), float("inf")])
def test_what_is_not_a_size(key: str, value: Any) -> None:
    message = complaint({key: value})
    assert message.startswith(f"{key}: Input should be")


def test_true_is_not_a_size() -> None:
    assert complaint({"reduce_bucket_size": True}).startswith("reduce_bucket_size: ")


def test_whole_floats_are_sizes_and_others_are_not() -> None:
    @given(st.floats(1, 1e15))
    def check(size: float) -> None:
        if size.is_integer():
            assert load({"reduce_bucket_size": size}).reduce_bucket_size == int(size)
        else:
            assert complaint({"reduce_bucket_size": size}).startswith("reduce_bucket_size: ")

    check()


@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size"])
def test_a_bucket_holds_an_element(key: str) -> None:
    assert complaint({key: 0}) == f"{key}: Input should be greater than 0"


@pytest.mark.parametrize(
    ("documented", "name"),
    [(field.alias, name) for name, field in ZeroConfig.model_fields.items() if field.alias],
)
def test_both_names_of_a_stage_3_key(documented: str, name: str) -> None:
    value = True if isinstance(DOCUMENTED[documented], bool) else 12345
    assert load({documented: value}) == load({name: value}) != ZeroConfig()


def test_aliases_are_the_documented_ones() -> None:
    aliases = {field.alias for field in ZeroConfig.model_fields.values() if field.alias}
    assert aliases == {key for key in DOCUMENTED if key.startswith("stage3_")}


def test_deprecated_keys_that_say_no() -> None:
    for key in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
        assert load({key: False}) == load({key: None}) == ZeroConfig()


def test_the_older_name_of_gathering_on_save() -> None:
    old = "stage3_gather_fp16_weights_on_model_save"
    new = "stage3_gather_16bit_weights_on_model_save"
    assert load({old: True}).gather_16bit_weights_on_model_save is True
    assert load({old: False}) == ZeroConfig()
    assert load({old: True, new: False}).gather_16bit_weights_on_model_save is False, "the newer name wins"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"stage": 3, "zero_hpz_partition_size": 2}, ["zero_hpz_partition_size is a part of stage 3", "set it to 1"]),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, ["offload_optimizer.device='cpu'", "set it to 'none'"]),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, ["offload_optimizer.device='nvme'"]),
        ({"offload_param": {"device": "cpu"}}, ["offload_param.device='cpu'", "leave offload_param out"]),
        ({"cpu_offload": True}, ["offload_optimizer.device='cpu'"]),
        ({"cpu_offload_param": True}, ["offload_param.device='cpu'"]),
    ],
)
def test_what_is_not_available_yet(section: dict[str, Any], words: list[str]) -> None:
    message = complaint(section)
    for word in ["not available in this version", *words]:
        assert word in message


@pytest.mark.parametrize(
    "key",
    [
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "mics_hierarchical_params_gather",
    ],
)
def test_a_feature_of_stage_3_is_not_ignored_in_silence(key: str) -> None:
    assert "not available in this version" in complaint({"stage": 2, key: True})


@pytest.mark.parametrize("key", ["offload_param", "offload_optimizer"])
def test_offloading_switched_on_wants_to_know_where(key: str) -> None:
    assert complaint({key: True}).startswith(f"{key}: ")


@pytest.mark.parametrize(("key", "value"), [("zero_hpz_partition_size", 4), ("mics_shard_size", 4)])
def test_a_size_of_stage_3_is_not_ignored_in_silence(key: str, value: int) -> None:
    assert "not available in this version" in complaint({"stage": 2, key: value})


def test_offloading_to_none_is_no_offloading() -> None:
    config = load({"offload_optimizer": {"device": "none", "ratio": 0.5}, "offload_param": {"device": "none"}})
    assert config.offload_optimizer == OffloadOptimizerConfig(ratio=0.5)
    assert config.offload_param == OffloadParamConfig()


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"stage": 4}, "stage"),
        ({"stage": -1}, "stage"),
        ({"stage": "2"}, "stage"),
        ({"stages": 2}, "stages"),
        ({"overlap_comm": "maybe"}, "overlap_comm"),
        ({"offload_optimizer": {"device": "gpu"}}, "offload_optimizer.device"),
        ({"offload_optimizer": {"ratio": 1.5}}, "offload_optimizer.ratio"),
        ({"offload_optimizer": {"nvme_paths": "/nvme"}}, "offload_optimizer.nvme_paths"),
        ({"offload_param": {"buffer_count": -1}}, "offload_param.buffer_count"),
        ({"zero_hpz_partition_size": 0}, "zero_hpz_partition_size"),
    ],
)
def test_what_cannot_be(section: dict[str, Any], where: str) -> None:
    assert complaint(section).startswith(f"{where}: ")


@pytest.mark.parametrize("section", ["on", 2, [2], "stage2"])
def test_a_section_is_an_object_or_a_bool(section: Any) -> None:
    assert "should be a valid dictionary" in complaint(section)


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError):
        ZeroConfig().stage = 1
