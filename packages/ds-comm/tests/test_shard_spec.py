"""ShardSpec: intervals of a logical tensor."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_comm import ShardSpec

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> ShardSpec:
    if shape is None:
        shape = draw(SHAPES)
    edges = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return ShardSpec(draw(st.sampled_from(["a", "b"])), shape, torch.float32, *edges)


@given(specs())
def test_sizes(spec: ShardSpec) -> None:
    assert spec.global_numel == math.prod(spec.shape)
    assert 0 <= spec.numel == spec.stop - spec.start <= spec.global_numel
    assert spec.is_whole == (spec.start == 0 and spec.stop == spec.global_numel)


@given(specs())
def test_a_piece_is_a_view_of_those_elements(spec: ShardSpec) -> None:
    tensor = torch.arange(spec.global_numel, dtype=torch.float32).view(spec.shape)
    piece = spec.of(tensor)
    assert piece.tolist() == list(range(spec.start, spec.stop))
    piece.fill_(-1)
    assert int((tensor == -1).sum()) == spec.numel


def test_of_a_tensor_with_other_strides_counts_rows_first() -> None:
    tensor = torch.arange(6).view(2, 3).t()  # rows: 0 3, 1 4, 2 5
    assert ShardSpec("w", (3, 2), torch.int64, 1, 4).of(tensor).tolist() == [3, 1, 4]


@given(SHAPES.flatmap(lambda shape: st.tuples(specs(shape), specs(shape))))
def test_overlap(pair: tuple[ShardSpec, ShardSpec]) -> None:
    one, other = pair
    common = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    found = one.overlap(other)
    assert found == other.overlap(one)
    if one.name != other.name:
        assert found is None
    else:
        assert (set(range(*found)) if found is not None else set()) == common


@given(SHAPES, st.data())
def test_a_cut_covers_every_element_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, numel), max_size=4))), numel]
    pieces = [ShardSpec("w", shape, torch.float32, *edge) for edge in pairwise(edges)]
    tensor = torch.arange(numel).view(shape)
    assert torch.cat([piece.of(tensor) for piece in pieces]).tolist() == list(range(numel))
    assert all(one.overlap(other) is None for i, one in enumerate(pieces) for other in pieces[:i])


@pytest.mark.parametrize("interval", [(-1, 2), (0, 7), (5, 4), (7, 7)])
def test_a_piece_lies_inside(interval: tuple[int, int]) -> None:
    with pytest.raises(ValueError) as caught:
        ShardSpec("layer.weight", (2, 3), torch.float32, *interval)
    for word in ("'layer.weight'", "(2, 3)", "6 elements", f"[{interval[0]}, {interval[1]})", "give 0 <="):
        assert word in str(caught.value)


def test_of_another_tensor() -> None:
    spec = ShardSpec("w", (2, 3), torch.float32, 0, 6)
    with pytest.raises(ValueError, match=r"'w' has shape \(2, 3\), got \(2, 4\); pass the whole tensor"):
        spec.of(torch.zeros(2, 4))


def test_a_scalar_and_an_empty_tensor() -> None:
    assert ShardSpec("s", (), torch.float32, 0, 1).of(torch.tensor(3.0)).tolist() == [3.0]
    assert ShardSpec("e", (0, 4), torch.float32, 0, 0).is_whole


def test_specs_are_values() -> None:
    spec = ShardSpec("w", (2,), torch.float32, 0, 1)
    assert spec == dataclasses.replace(spec) and len({spec, dataclasses.replace(spec)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.stop = 2  # type: ignore[misc]
