"""The configuration: files, older spellings, and what each mistake is answered with."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_engine import Config, ConfigError


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"train_batchsize": 8},
            ["the configuration has no key 'train_batchsize'", "did you mean 'train_batch_size'?"],
        ),
        ({"FP16": {}}, ["did you mean 'fp16'?"]),
        ({"steps_per_prnt": 1}, ["did you mean 'steps_per_print'?"]),
        ({"fp16": {"enable": True}}, ["fp16 has no key 'enable'", "did you mean 'enabled'?"]),
        ({"bf16": {"hysteresis": 1}}, ["bf16 has no key 'hysteresis'", "Known: auto_cast, bf16_master"]),
        ({"optimizer": {"type": "Adam", "parms": {}}}, ["optimizer has no key 'parms'", "did you mean 'params'?"]),
        ({"zero_optimization": {"stag": 1}}, ["zero_optimization has no key 'stag'", "did you mean 'stage'?"]),
        (
            {"zero_optimization": {"stage3_prefetch_bucketsize": 1}},
            ["did you mean 'stage3_prefetch_bucket_size'?"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            ["zero_optimization.offload_optimizer has no key 'devise'", "did you mean 'device'?"],
        ),
        ({"comms_logger": {"prof_op": []}}, ["comms_logger has no key 'prof_op'", "did you mean 'prof_ops'?"]),
        ({"qqq": 1}, ["the configuration has no key 'qqq'; correct or remove it. Known: bf16,"]),
        ({"fp16": {"enable": True}, "qqq": 1}, ["fp16 has no key", "\nthe configuration has no key 'qqq'"]),
    ],
)
def test_unknown_keys_and_the_nearest_known(config: dict[str, Any], words: list[str]) -> None:
    message = refused(config)
    for word in words:
        assert word in message
    if "qqq" in config:
        assert "did you mean 'qqq'" not in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": True}, "fp16: a section is an object, got True; write {...}"),
        (
            {"fp16": {"enabled": "auto"}},
            "fp16.enabled: Input should be a valid boolean, .*got 'auto'; change the value",
        ),
        ({"optimizer": "Adam"}, "optimizer: a section is an object, got 'Adam'"),
        ({"optimizer": {"params": {}}}, "optimizer.type is required and missing; add it"),
        ({"optimizer": {"type": "Adam", "params": [1]}}, r"optimizer.params: .*dictionary, got \[1\]"),
        ({"gradient_clipping": -1}, "gradient_clipping: .*greater than or equal to 0, got -1"),
        ({"gradient_clipping": math.inf}, "gradient_clipping: .*finite"),
        ({"gradient_clipping": math.nan}, "gradient_clipping: .*got nan"),
        ({"gradient_clipping": True}, "gradient_clipping: a number is wanted, got true"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor: .*greater than 0, got 0"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op: .*'mean' or 'sum', got 'max'"),
        ({"communication_data_type": "int8"}, "communication_data_type: .*'fp32', .*got 'int8'"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "data_types.grad_accum_dtype: .*'bf16', got 'fp8'"),
        ({"torch_autocast": {"dtype": "int8"}}, "torch_autocast.dtype: .*got 'int8'"),
        ({"steps_per_print": -1}, "steps_per_print: .*greater than or equal to 0, got -1"),
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage: .*0, 1, 2 or 3, got 5"),
        ({"zero_optimization": "on"}, "zero_optimization: a section is an object, got 'on'"),
        ({3: 4}, "3: Keys should be strings"),
        ([1], "a dict or the path of a JSON file: got list; pass one of them"),
    ],
)
def test_wrong_types_and_values(config: Any, message: str) -> None:
    assert re.search(message, refused(config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16 and bf16 are both enabled; switch one of them off",
        ),
        (
            {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}},
            "enabled together with fp16; switch one of them off",
        ),
        (
            {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}},
            "enabled together with bf16; switch one of them off",
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16: optimizer states have the dtype"),
        ({"comms_logger": {"enabled": True}}, "not available in this version: enabled=true; set it to false"),
        ({"managed_gradient_accumulation": False}, "=false is not available in this version; leave it out"),
    ],
)
def test_what_cannot_be_together_or_yet(config: dict[str, Any], words: str) -> None:
    assert words in refused(config)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
        ({"fp32_allreduce": False}, {}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"steps_per_print": math.inf}, {"steps_per_print": 0}),
        ({"steps_per_print": None}, {"steps_per_print": 0}),
        ({"loss_scale": None, "fp16": None, "train_batch_size": None}, {}),
        ({"train_batch_size": 1e3}, {"train_batch_size": 1000}),
    ],
)
def test_older_and_other_spellings(older: dict[str, Any], newer: dict[str, Any]) -> None:
    before = json.dumps(older)
    older.pop("loss_scale", None)
    assert Config.load(older) == Config.load(newer)
    assert json.dumps(older) == before or "loss_scale" in before, "what the user gave is left alone"


@pytest.mark.parametrize(
    "config",
    [
        {"bfloat16": {"enabled": True}, "bf16": {"enabled": False}},
        {"fp32_allreduce": True, "communication_data_type": "fp16"},
    ],
)
def test_two_spellings_must_agree(config: dict[str, Any]) -> None:
    older, newer = config
    assert f"{older!r} is an older way to say {newer!r}: both are given and differ; remove {older!r}" in refused(config)


def test_dtypes() -> None:
    config = Config.load({"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bfp16"})
    assert config.gradient_dtype is config.communication_dtype is torch.bfloat16
    assert Config().gradient_dtype is Config().communication_dtype is None


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = '{"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": 5e8}}'
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(text, encoding)
        assert Config.load(path) == Config.load(str(path)) == Config.load(json.loads(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            b'{"train_batch_size": 8,\n "fp16": {"enabled": tru}}',
            ["line 2, column 22", '\'"fp16": {"enabled": tru}}\''],
        ),
        (b'{\n"train_batch_size": 8,\n}', ["at line ", "no comma after the last item"]),
        (b'{"train_batch_size": 8,\n', ["is not JSON", "line 2, column 1: ''"]),
        (b'// ours\n{"train_batch_size": 8}', ["line 1, column 1: '// ours'", "JSON has no comments"]),
        (b"", ["line 1, column 1: ''"]),
        (b"\n", ["is not JSON"]),
        (b"[1, 2]", ["holds a list; write {...}"]),
        (
            b'{"bf16": {"enabled": true, "enabled": false}}',
            ["'enabled' stands twice in one object; remove one of them"],
        ),
        (b'{"fp16": {}, "fp16": {}}', ["'fp16' stands twice"]),
        (b'{"a": "\xff"}', ["JSON in UTF-8", r"b'\xff' at byte 7", "save it as UTF-8"]),
    ],
)
def test_files_that_are_not_right(text: bytes, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    message = refused(str(path))
    for word in words:
        assert word in message
    assert str(path) in message or "twice" in message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    words = "No such file or directory; check the path"
    assert refused(missing) == f"a configuration is a dict or a readable JSON file: {str(missing)!r}: {words}"
    assert "Is a directory; check the path" in refused(tmp_path)
