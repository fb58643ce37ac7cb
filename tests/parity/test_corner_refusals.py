"""Corners where an engine may refuse what plain PyTorch allows, but must not be silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ds_engine import Config, ConfigError
from parity.corner_refusals import USES, outcome, unused
from testing import RankPool

# What a refusal has to name, so that one who meets it knows what to change.
MUST_NAME = {
    "second_engine": "destroy",
    "replaced_engine": "destroy",
    "shared_layer": "0.",
    "complex_parameter": "turn",
    "complex_parameter_in_bf16": "turn",
    "sparse_adam": "SparseAdam",
    "lbfgs": "closure",
    "replaced_data": "0.weight",
    "converted_model": "torch.float64",
}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("use", USES)
def test_right_or_refused(ranks: Callable[[int], RankPool], use: str, stage: int) -> None:
    """The result is plain PyTorch's, or every rank raises an error that names the cause."""
    found = ranks(2).run(outcome, use, stage)
    for far, message in found:
        if message:
            assert MUST_NAME.get(use, "") in message, message
        else:
            assert far <= 1e-5, f"silently wrong by {far}"
    assert len({bool(message) for _, message in found}) == 1, f"ranks disagree: {found}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_named(ranks: Callable[[int], RankPool], stage: int) -> None:
    """ignore_unused_parameters=false: every rank names them and how many ranks missed them; nobody hangs."""
    for message, far in ranks(2).run(unused, stage):
        assert message.startswith("ZeroError"), message
        assert "'1.weight' (unused on 1 of 2 ranks)" in message and "'1.bias'" in message, message
        assert "'2.weight' (unused on 2 of 2 ranks)" in message and "'2.bias'" in message, message
        assert "0.weight" not in message, message
        assert far <= 1e-6, far


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"reduce_bucket_sise": 5}, "'reduce_bucket_sise' (did you mean 'reduce_bucket_size'?)"),
        ({"overlap_coms": True}, "'overlap_coms' (did you mean 'overlap_comm'?)"),
        ({"stage3_prefetch_bucket": 5}, "(did you mean 'stage3_prefetch_bucket_size'?)"),
        ({"offload_optimizer": {"devise": "cpu"}}, "zero_optimization.offload_optimizer has no key 'devise' (did you"),
        ({"offload_optimizer": {"device": "cpu"}}, "not available in this version: offload_optimizer.device='cpu'"),
        ({"stage": 1, "zero_quantized_weights": True}, "not available in this version: zero_quantized_weights=true"),
        ({"reduce_bucket_size": -5}, "zero_optimization.reduce_bucket_size: Input should be greater than 0, got -5"),
    ],
)
def test_a_misspelt_or_later_key_is_refused(section: dict[str, Any], words: str) -> None:
    """Through the engine's configuration, which offers the nearest name."""
    with pytest.raises(ConfigError) as caught:
        Config.load({"train_batch_size": 2, "zero_optimization": section})
    assert words in str(caught.value)
