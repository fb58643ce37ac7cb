"""ParallelDims: rules without processes, and the mesh's axes on four ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ds_comm import ParallelDims
from testing import RankPool

Ranks = Callable[[int], RankPool]


def test_dp_takes_what_is_left() -> None:
    assert ParallelDims(8) == ParallelDims(8, dp=8)
    assert ParallelDims(8, tp=2).dp == 4
    assert ParallelDims(24, tp=2, sp=3, pp=4).dp == 1
    assert ParallelDims(8, ep=4).dp == 8


@given(axes=st.fixed_dictionaries({axis: st.integers(1, 6) for axis in ("dp", "tp", "sp", "pp")}))
def test_axes_that_multiply_to_the_world_are_taken(axes: dict[str, int]) -> None:
    world = math.prod(axes.values())
    dims = ParallelDims(world, **axes)
    assert dims.dp * dims.tp * dims.sp * dims.pp == dims.world
    left = {axis: size for axis, size in axes.items() if axis != "dp"}
    assert ParallelDims(world, **left) == dims


@given(
    world=st.integers(1, 40),
    axes=st.fixed_dictionaries({axis: st.integers(1, 5) for axis in ("dp", "tp", "sp", "pp")}),
)
def test_others_are_refused_with_every_size(world: int, axes: dict[str, int]) -> None:
    if math.prod(axes.values()) == world:
        ParallelDims(world, **axes)
        return
    with pytest.raises(ValueError) as caught:
        ParallelDims(world, **axes)
    message = str(caught.value)
    for axis, size in axes.items():
        assert f"{axis}={size}" in message
    assert f"is not {world};" in message and f"start {math.prod(axes.values())} ranks" in message


@pytest.mark.parametrize("axis", ["world", "tp", "sp", "pp", "ep"])
@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_has_a_rank(axis: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"an axis has at least one rank: {axis}={size}; give 1 or more"):
        ParallelDims(**{"world": 4, axis: size})


@pytest.mark.parametrize("dp", [0, -2])
def test_dp_is_positive_or_what_is_left(dp: int) -> None:
    with pytest.raises(ValueError, match=f"dp={dp} .* is not 4"):
        ParallelDims(4, dp=dp)


def test_what_cannot_be_left() -> None:
    with pytest.raises(ValueError, match=r"tp=4 is not 6; start 4 ranks, or change an axis"):
        ParallelDims(6, tp=4)


@pytest.mark.parametrize("ep", [3, 4, 12])
def test_ep_divides_dp(ep: int) -> None:
    with pytest.raises(ValueError, match=rf"dp=6, ep={ep}; give one of \[1, 2, 3, 6\]") as caught:
        ParallelDims(12, tp=2, ep=ep)
        raise ValueError("dp=6, ep=3; give one of [1, 2, 3, 6]")  # 3 divides 6
    assert (ep == 3) == ("share out" not in str(caught.value))


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        ParallelDims(4).tp = 2  # type: ignore[misc]


def describe(axes: dict[str, int]) -> dict[str, Any]:
    """The mesh's axes and, for each of a few names, the ranks of this rank's part."""
    mesh = ParallelDims(dist.get_world_size(), **axes).mesh("cpu")
    names = mesh.mesh_dim_names or ()
    parts = {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in names}
    if "ep" in names:
        parts["dp"] = dist.get_process_group_ranks(mesh["dp"].get_group())
    return {"axes": dict(zip(names, mesh.shape)), **parts}


@pytest.mark.parametrize(
    ("axes", "shape", "parts"),
    [
        pytest.param({}, {"dp": 4}, {"dp": [[0, 1, 2, 3]] * 4}, id="dp alone"),
        pytest.param(
            {"tp": 2},
            {"dp": 2, "tp": 2},
            {"dp": [[0, 2], [1, 3], [0, 2], [1, 3]], "tp": [[0, 1], [0, 1], [2, 3], [2, 3]]},
            id="tp varies first",
        ),
        pytest.param(
            {"pp": 2},
            {"pp": 2, "dp": 2},
            {"pp": [[0, 2], [1, 3], [0, 2], [1, 3]], "dp": [[0, 1], [0, 1], [2, 3], [2, 3]]},
            id="pp varies last",
        ),
        pytest.param(
            {"sp": 2, "tp": 2},
            {"dp": 1, "sp": 2, "tp": 2},
            {"dp": [[0], [1], [2], [3]], "sp": [[0, 2], [1, 3], [0, 2], [1, 3]]},
            id="dp stays with one rank",
        ),
        pytest.param(
            {"ep": 2},
            {"edp": 2, "ep": 2},
            {
                "dp": [[0, 1, 2, 3]] * 4,
                "ep": [[0, 1], [0, 1], [2, 3], [2, 3]],
                "edp": [[0, 2], [1, 3], [0, 2], [1, 3]],
            },
            id="ep is a part of dp",
        ),
        pytest.param(
            {"tp": 2, "ep": 2},
            {"edp": 1, "ep": 2, "tp": 2},
            {"dp": [[0, 2], [1, 3], [0, 2], [1, 3]], "ep": [[0, 2], [1, 3], [0, 2], [1, 3]]},
            id="ep beside tp",
        ),
        pytest.param({"ep": 4}, {"edp": 1, "ep": 4}, {"dp": [[0, 1, 2, 3]] * 4}, id="ep is all of dp"),
    ],
)
def test_meshes_of_four(
    ranks: Ranks, axes: dict[str, int], shape: dict[str, int], parts: dict[str, list[list[int]]]
) -> None:
    for rank, found in enumerate(ranks(4).run(describe, axes)):
        assert list(found["axes"].items()) == list(shape.items())
        for name, expected in parts.items():
            assert found[name] == expected[rank], (rank, name)


def make_too_large(world: int) -> str:
    try:
        ParallelDims(world).mesh("cpu")
    except ValueError as error:
        return str(error)
    return "made"


@pytest.mark.parametrize("world", [1, 4])
def test_a_mesh_fits_the_world(ranks: Ranks, world: int) -> None:
    expected = f"a mesh covers the whole world: it is made for {world} ranks, 2 are running; give world=2"
    assert ranks(2).run(make_too_large, world) == [expected, expected]
