"""Every key of the configuration reference: its documented default, or a refusal that says it comes later."""

from __future__ import annotations

import csv
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from ds_engine import Config, ConfigError
from ds_engine.config import NOT_YET, DataTypesConfig
from ds_engine.precision import AutocastConfig, Bf16Config, Fp16Config

DATA = Path(__file__).parent / "data"

SECTIONS = {
    "Batch Size Related Parameters": "",
    "Optimizer Parameters": "",
    "Scheduler Parameters": "",
    "Communication options": "",
    "FP16 training options": "",
    "BFLOAT16 training options": "",
    "PyTorch Automatic Mixed Precision (torch.autocast) training options": "",
    "Gradient Clipping": "",
    "ZeRO Optimizations for FP16 Training": "zero_optimization",
    "Parameter offloading": "zero_optimization.offload_param",
    "Optimizer offloading": "zero_optimization.offload_optimizer",
    "Logging": "",
    "Communication Logging": "",
    "Data Type options": "data_types",
}
"""Sections of the configuration reference that this version has, and where their keys stand."""

LATER = {
    "Automatic mixed precision (AMP) training options": "amp",
    "Asynchronous I/O": "aio",
    "Tensor Parallel (AutoTP)": "tensor_parallel",
    "Hybrid Engine": "hybrid_engine",
    "Expert Parallel (AutoEP)": "expert_parallel",
    "Autotuning": "autotuning",
    "Flops Profiler": "flops_profiler",
    "Activation Checkpointing": "activation_checkpointing",
    "Sparse Attention": "sparse_attention",
    "Data Efficiency": "data_efficiency",
    "Curriculum Learning": "curriculum_learning",
    "Monitoring Module": "",
    "Layer Reduction": "compression_training",
    "Weight Quantization": "compression_training",
    "Activation Quantization": "compression_training",
    "Sparse Pruning": "compression_training",
    "Row Pruning": "compression_training",
    "Head Pruning": "compression_training",
    "Channel Pruning": "compression_training",
    "Checkpoint options": "checkpoint",
    "AutoTP options": "compile",
    "DeepCompile activation offload": "compile",
}
"""Sections that later versions bring, and the key under which they stand."""

OURS = {
    "gradient_clipping": 0.0,  # see Config: the original clips only where the key is set
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,  # the API reference 5.1.1 against the table
    "overlap_comm": None,  # by the stage
    "device": "none",  # offloading wants a device named
    "nvme_path": None,
    "pin_memory": False,  # the API reference 5.1.1 against the table
}
"""Defaults that differ from the table's, by key."""


def documented() -> list[tuple[str, str, str]]:
    """Section, key, default of every line of the reference's table."""
    with (DATA / "config_keys.tsv").open() as file:
        return [(row["section"], row["key"], row["default"]) for row in csv.DictReader(file, delimiter="\t")]


KNOWN = [row for row in documented() if row[0] in SECTIONS]


def place(section: str, key: str) -> list[str]:
    """The path of a documented key: `fp16:enabled` is `enabled` in `fp16`."""
    if key in ("zero_optimization", "comms_logger"):
        return [key]
    return [*filter(None, SECTIONS[section].split(".")), *key.split(":")]


def nested(path: list[str], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return value


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


def test_the_table_is_covered() -> None:
    assert {section for section, _, _ in documented()} == {*SECTIONS, *LATER}


@pytest.mark.parametrize(("section", "key", "default"), KNOWN, ids=lambda part: part.replace(" ", "_"))
def test_every_documented_key_has_its_default(section: str, key: str, default: str) -> None:
    path = place(section, key)
    zero = {"offload_param": {}, "offload_optimizer": {}}
    found: Any = Config.load({"zero_optimization": zero}).model_dump(by_alias=True)
    if path[-1] in ("cpu_offload",):
        assert Config.load(nested(path, False)) == Config()
        return
    for part in path:
        found = found[part]
    if isinstance(found, dict):  # a section: off, or as if it were not there
        assert not found.get("enabled") and Config.load({path[0]: {}}) == Config()
        return
    if path[-1] in OURS:
        assert found == OURS[path[-1]]
        return
    value = {"": None, "None": None, "train_batch_size value": None}.get(default, default.strip('"'))
    if path == ["gradient_accumulation_steps"]:
        assert Config.load({"train_batch_size": 8}).batch_sizes(2).accumulation == int(default)
    elif isinstance(found, bool):
        assert str(found).lower() == default.lower()
    elif isinstance(found, int | float):
        assert found == float(default)
    elif path[-1] in ("offload_param", "offload_optimizer", "optimizer", "scheduler"):
        assert found is None
    else:
        assert found == value


@pytest.mark.parametrize(("section", "key", "default"), [row for row in documented() if row[0] in LATER])
def test_what_comes_later_is_refused(section: str, key: str, default: str) -> None:
    top = LATER[section] or key
    assert top in NOT_YET
    path = [top] if key == top else [top, key]
    config = nested(path, True)
    message = refused(config)
    if key == "enabled":
        assert Config.load(nested(path, False)) == Config(), "switched off it may stand"
    assert message.startswith(f"{top!r} is documented but not available in this version, and asks for something")


@pytest.mark.parametrize("section", [None, False, {}, {"enabled": False, "anything": [1]}])
def test_sections_that_are_off_may_stand(section: Any) -> None:
    assert Config.load(dict.fromkeys(NOT_YET, section)) == Config()


def test_fields_state_their_defaults() -> None:
    """Each field is followed by a docstring with its default."""
    for model in (Config, DataTypesConfig, Fp16Config, Bf16Config, AutocastConfig):
        source = inspect.getsource(model)
        for name, field in model.model_fields.items():
            found = re.search(rf'^    {name}: .*\n    """((?:.|\n)*?)"""', source, re.MULTILINE)
            assert found and "Default: " in found[1], f"{model.__name__}.{name}"
            word = re.search(r"Default: ([^\s;]+)", found[1])[1].rstrip(".,")  # type: ignore[index]
            if isinstance(field.default, bool):
                assert word == str(field.default).lower(), name
            elif isinstance(field.default, int | float):
                assert float(word) == field.default, name
