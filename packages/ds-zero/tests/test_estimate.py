"""The memory estimate of ZeRO-2: the documented tables, formulas and how parameters are counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_zero import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from ds_zero.estimate import (
    MemoryRow,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

DOCUMENTED = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.45GB |   5.31GB | offload_optimizer=cpu
  127.45GB |  15.93GB | offload_optimizer=none
"""
"""The documentation's example, with the columns as DeepSpeed sets them: the page has lost the spaces."""


def test_the_documented_table_is_written_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = estimate_zero2_model_states_mem_needs_all_cold(2851e6, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out == DOCUMENTED
    assert f"{estimate}\n" == DOCUMENTED
    assert (estimate.total_params, estimate.num_gpus_per_node, estimate.num_nodes) == (2_851_000_000, 8, 1)
    assert estimate.rows == (
        MemoryRow("offload_optimizer=cpu", 136_848_000_000, 5_702_000_000),
        MemoryRow("offload_optimizer=none", 136_848_000_000, 17_106_000_000),
    )


def test_the_documented_live_table(capsys: pytest.CaptureFixture[str]) -> None:
    # The page has "2851M" and 127.48GB for t5-3b, so its count lies here: millions are cut off, not rounded.
    with torch.device("meta"):
        model = nn.ParameterList([nn.Parameter(torch.empty(2_851_598_336 // 64, 64))])
    estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=8)
    assert capsys.readouterr().out == DOCUMENTED.replace("127.45GB", "127.48GB")


def test_quiet_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(1e6, quiet=True)
    estimate_zero2_model_states_mem_needs_all_live(nn.Linear(2, 2), quiet=True)
    assert capsys.readouterr().out == ""


# What DeepSpeed 0.19.8 returns: (total_params, num_gpus_per_node, num_nodes, additional_buffer_factor), then
# (cpu_bytes, gpu_bytes) with and without offload. None stands where it departs from its documentation: the
# GPU without offload (more than one GPU) and the host under offload (more than one node).
PEER = [
    ((1e6, 1, 1, 1.5), (24_000_000, 2_000_000), (6_000_000, 20_000_000)),
    ((1e6, 1, 1, 1.0), (16_000_000, 2_000_000), (4_000_000, 20_000_000)),
    ((1e6, 1, 1, 2.0), (32_000_000, 2_000_000), (8_000_000, 20_000_000)),
    ((2851e6, 8, 1, 1.5), (136_848_000_000, 5_702_000_000), (136_848_000_000, None)),
    ((2851e6, 8, 1, 1.0), (91_232_000_000, 5_702_000_000), (91_232_000_000, None)),
    ((123_456_789, 4, 3, 2.0), (None, 246_913_578), (3_950_617_248, None)),
    ((7e9, 2, 16, 1.5), (None, 14_000_000_000), (84_000_000_000, None)),
    ((500, 16, 2, 1.5), (None, 1000), (48_000, None)),
]


@pytest.mark.parametrize(("setup", "offload", "no_offload"), PEER)
def test_deepspeed_s_numbers(
    setup: tuple[float, int, int, float],
    offload: tuple[int | None, int],
    no_offload: tuple[int, int | None],
) -> None:
    total_params, num_gpus_per_node, num_nodes, factor = setup
    for cpu_offload, expected in ((True, offload), (False, no_offload)):
        got = estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node, num_nodes, cpu_offload, factor)
        assert all(type(each) is int for each in got)
        assert [mine for mine, other in zip(got, expected) if other is not None] == [
            other for other in expected if other is not None
        ]


@given(params=st.integers(0, 10**12), gpus=st.integers(1, 16), nodes=st.integers(1, 1000))
def test_the_documented_formulas(params: int, gpus: int, nodes: int) -> None:
    def close(got: tuple[int, int], cpu: float, gpu: float) -> bool:
        return got == pytest.approx((cpu, gpu), rel=1e-12, abs=1)

    assert close(
        estimate_zero2_model_states_mem_needs(params, gpus, nodes, True, 1.5),
        params * max(4 * gpus, 16) * 1.5,
        2 * params,
    )
    assert close(
        estimate_zero2_model_states_mem_needs(params, gpus, nodes, False, 1.5),
        params * 4 * gpus * 1.5,
        4 * params + 16 * params / (gpus * nodes),
    )


def test_nouns_agree_with_their_numbers() -> None:
    one = str(estimate_zero2_model_states_mem_needs_all_cold(1234, quiet=True))
    many = str(estimate_zero2_model_states_mem_needs_all_cold(7e9, 2, 16, 2.0, quiet=True))
    assert "HW: Setup with 1 node, 1 GPU per node.\nSW: Model with 0M total params.\n" in one
    assert "HW: Setup with 16 nodes, 2 GPUs per node.\nSW: Model with 7000M total params.\n" in many


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shared_parameters_are_counted_once(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False), nn.Linear(10, 3))
    model[1].weight = model[0].weight
    estimate = estimate_zero2_model_states_mem_needs_all_live(model, quiet=True)
    assert estimate.total_params == 100 + 33


def test_parameters_tied_through_their_data_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight.data = model[0].weight.data
    assert estimate_zero2_model_states_mem_needs_all_live(model, quiet=True).total_params == 100


def test_frozen_and_empty_parameters() -> None:
    model = nn.Sequential(nn.Linear(10, 10).requires_grad_(False), nn.Linear(10, 2))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    assert estimate_zero2_model_states_mem_needs_all_live(model, quiet=True).total_params == 110 + 22


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "total_params is at least 0, got -1"),
        ((1, 0), "num_gpus_per_node is at least 1, got 0"),
        ((1, 1, 0), "num_nodes is at least 1, got 0"),
        ((1, 1, 1, -0.5), "additional_buffer_factor is at least 0, got -0.5"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_zero2_model_states_mem_needs_all_cold(*arguments, quiet=True)


DOCUMENTED_3 = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0
"""


def test_the_documented_table_of_zero_3(capsys: pytest.CaptureFixture[str]) -> None:
    estimate = estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, num_gpus_per_node=8, num_nodes=1)
    assert capsys.readouterr().out == DOCUMENTED_3
    assert f"{estimate}\n" == DOCUMENTED_3 and estimate.largest_layer_params == 32_000_000


def test_a_live_model_under_zero_3() -> None:
    """T5-large's numbers in the documentation's discussion: 4 GPUs, largest layer 125 MB, 3291 and 477 MB."""
    with torch.device("meta"):
        model = nn.ModuleList([nn.Embedding(32128, 1024), nn.Linear(1024, 688_080, bias=False)])
        model[1].weight = nn.Parameter(torch.empty(32128 * 1024, device="meta"))
        rest = [nn.Parameter(torch.empty(1024 * 1024, device="meta")) for _ in range(640)]
        model.extend([nn.ParameterList([parameter]) for parameter in rest])
    total = sum(p.numel() for p in model.parameters())
    estimate = estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=4, quiet=True)
    assert (estimate.total_params, estimate.largest_layer_params) == (total, 32128 * 1024)
    layer = 4 * 32128 * 1024
    assert [row.gpu_bytes for row in estimate.rows[::2]] == [
        layer,
        layer + 2 * total // 4,
        layer + 18 * total // 4,
    ]
    assert layer >> 20 == 125


@pytest.mark.parametrize(("states", "params", "multiplier"), [(True, True, 18), (True, False, 16)])
def test_hosts_share_what_is_offloaded_under_zero_3(states: bool, params: bool, multiplier: int) -> None:
    with_init = estimate_zero3_model_states_mem_needs(1e6, 1e3, 8, 4, states, params, True, 1.0)
    without = estimate_zero3_model_states_mem_needs(1e6, 1e3, 8, 4, states, params, False, 1.0)
    assert (with_init[0], without[0]) == (multiplier * 250_000, 32_000_000)
    assert with_init[1] == without[1] and with_init[2] == 4000


@pytest.mark.parametrize("wrong", [{"num_gpus_per_node": 0}, {"num_nodes": 0}, {"additional_buffer_factor": -1}])
def test_zero_3_numbers_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is at least"):
        estimate_zero3_model_states_mem_needs(1e6, 1e3, **wrong)  # type: ignore[arg-type]
