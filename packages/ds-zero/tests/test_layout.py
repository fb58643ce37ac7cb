"""The sharding plan: what holds of every plan, whatever the parameters, the world, the limit and the cut."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_zero import Cut, GroupLayout, ParameterInfo, plan_groups
from ds_zero.layout import ALIGN

WHOLE = (Cut.BETWEEN, Cut.ROUND_ROBIN)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def models(draw: st.DrawFn) -> list[ParameterInfo]:
    """Parameters of a model: scalars, empty ones, several dtypes and optimizer groups."""
    shapes = draw(st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), min_size=1, max_size=12))
    return [
        ParameterInfo(
            f"layer.{number}",
            shape,
            draw(st.sampled_from(DTYPES)),
            draw(st.integers(0, 2)),
            unit=draw(st.integers(0, 2)),
            trained=draw(st.booleans()),
        )
        for number, shape in enumerate(shapes)
    ]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan and what it was made of."""

    infos: list[ParameterInfo]
    world: int
    max_numel: int
    cut: Cut
    groups: tuple[GroupLayout, ...]


@st.composite
def plans(draw: st.DrawFn, cuts: tuple[Cut, ...] = tuple(Cut)) -> Planned:
    infos = draw(models())
    world, limit = draw(st.integers(1, 9)), draw(st.sampled_from([1, 32, 100, 1000, 10_000, 10**9]))
    cut = draw(st.sampled_from(cuts))
    return Planned(infos, world, limit, cut, plan_groups(infos, world, limit, cut))


def aligned(numel: int) -> int:
    return math.ceil(numel / ALIGN) * ALIGN


@given(plans())
def test_every_parameter_stands_once_with_its_kind(planned: Planned) -> None:
    slots = [slot for group in planned.groups for slot in group.slots]
    assert sorted(slot.info.name for slot in slots) == sorted(info.name for info in planned.infos)
    for group in planned.groups:
        assert group.slots, "no group is empty"
        assert {slot.info.dtype for slot in group.slots} == {group.dtype}
        assert {(slot.info.unit, slot.info.trained) for slot in group.slots} == {(group.unit, group.trained)}


@given(plans())
def test_every_element_is_updated_by_one_rank(planned: Planned) -> None:
    """Or by every rank, where the states are replicated."""
    owners = {info.name: [0] * info.numel for info in planned.infos}
    for group, rank in itertools.product(planned.groups, range(planned.world)):
        for number, spec in group.specs(rank):
            info = group.slots[number].info
            assert (spec.name, spec.shape, spec.dtype) == (info.name, info.shape, info.dtype)
            assert spec.numel > 0
            for element in range(spec.start, spec.stop):
                owners[spec.name][element] += 1
    expected = planned.world if planned.cut is Cut.NOWHERE else 1
    assert all(count == expected for counts in owners.values() for count in counts)


@given(plans())
def test_parameters_lie_apart_and_begin_at_aligned_places(planned: Planned) -> None:
    for group in planned.groups:
        intervals = sorted((slot.offset, slot.stop) for slot in group.slots)
        assert all(offset % ALIGN == 0 for offset, _ in intervals)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(intervals))
        assert intervals[0][0] >= 0 and intervals[-1][1] <= group.numel
        assert group.numel % ALIGN == 0


@given(plans())
def test_gaps_and_parameters_make_up_the_buffer(planned: Planned) -> None:
    for group in planned.groups:
        covered = [0] * group.numel
        for start, stop in [*group.gaps(), *((slot.offset, slot.stop) for slot in group.slots)]:
            for element in range(start, stop):
                covered[element] += 1
        assert covered == [1] * group.numel


@given(plans())
def test_ranks_intervals_make_up_the_buffer(planned: Planned) -> None:
    for group in planned.groups:
        owned = [group.owned(rank) for rank in range(planned.world)]
        if planned.cut is Cut.NOWHERE:
            assert group.splits is None and set(owned) == {(0, group.numel)}
            continue
        assert owned[0][0] == 0 and owned[-1][1] == group.numel
        assert all(one[1] == other[0] for one, other in itertools.pairwise(owned))
        assert all(start <= stop and start % ALIGN == 0 for start, stop in owned)


@given(plans((Cut.ANYWHERE,)))
def test_an_even_cut_is_even_and_wastes_little(planned: Planned) -> None:
    for group in planned.groups:
        sizes = {stop - start for start, stop in map(group.owned, range(planned.world))}
        assert len(sizes) == 1 and sizes.pop() >= ALIGN
        used = sum(aligned(slot.info.numel) for slot in group.slots)
        assert group.numel - used < ALIGN * (planned.world + 1)


@given(plans(WHOLE))
def test_a_whole_parameter_has_one_owner(planned: Planned) -> None:
    for group in planned.groups:
        specs = [spec for rank in range(planned.world) for _, spec in group.specs(rank)]
        assert all(spec.is_whole for spec in specs)
        assert len(specs) == sum(slot.info.numel > 0 for slot in group.slots)


@given(plans((Cut.BETWEEN,)))
def test_whole_parameters_are_shared_out_evenly(planned: Planned) -> None:
    """Over all groups together: a group of one parameter can't be."""
    loads = [0] * planned.world
    for group in planned.groups:
        for rank in range(planned.world):
            start, stop = group.owned(rank)
            loads[rank] += stop - start
    assert max(loads) - min(loads) <= max(aligned(info.numel) for info in planned.infos)


@given(plans((Cut.ROUND_ROBIN,)))
def test_whole_parameters_in_turn(planned: Planned) -> None:
    for group in planned.groups:
        counts = [0] * planned.world
        for slot in group.slots:
            rank = next(
                rank
                for rank in range(planned.world)
                if group.owned(rank)[0] <= slot.offset
                and slot.offset + aligned(slot.info.numel) <= group.owned(rank)[1]
            )
            counts[rank] += slot.info.numel > 0
        assert sum(counts) <= len(group.slots)
        if all(slot.info.numel for slot in group.slots):
            assert max(counts) - min(counts) <= 1


@given(plans())
def test_groups_keep_to_the_limit(planned: Planned) -> None:
    for group in planned.groups:
        size = sum(aligned(slot.info.numel) for slot in group.slots)
        assert size <= planned.max_numel or len(group.slots) == 1 or size == 0


@given(models(), st.integers(1, 4), st.sampled_from(list(Cut)))
def test_without_a_limit_there_is_a_group_for_each_kind(infos: list[ParameterInfo], world: int, cut: Cut) -> None:
    groups = plan_groups(infos, world, 10**9, cut)
    assert len(groups) == len({(info.dtype, info.unit, info.trained) for info in infos})


@given(plans())
def test_groups_come_in_the_order_of_backward(planned: Planned) -> None:
    """Backward goes from the model's end to its beginning: a group is complete with its first parameter."""
    order = {info.name: position for position, info in enumerate(planned.infos)}
    complete = [min(order[slot.info.name] for slot in group.slots) for group in planned.groups]
    assert complete == sorted(complete, reverse=True)
    assert [group.index for group in planned.groups] == list(range(len(planned.groups)))
    for group in planned.groups:
        if planned.cut in (Cut.NOWHERE, Cut.ANYWHERE):
            places = [order[slot.info.name] for slot in sorted(group.slots, key=lambda slot: slot.offset)]
            assert places == sorted(places, reverse=True)


@given(plans())
def test_a_plan_is_a_value_that_every_rank_finds_alike(planned: Planned) -> None:
    again = plan_groups(iter(planned.infos), planned.world, planned.max_numel, planned.cut)
    assert again == planned.groups and hash(again) == hash(planned.groups)
    with pytest.raises(dataclasses.FrozenInstanceError):
        planned.groups[0].index = 1  # type: ignore[misc]


@given(plans())
def test_a_plan_prints(planned: Planned) -> None:
    for group in planned.groups:
        text = str(group)
        head, *lines = text.splitlines()
        assert head.startswith(f"group {group.index}: {group.numel:,} ")
        assert len(lines) == len(group.slots)
        for slot, line in zip(group.slots, lines):
            assert line.endswith(f"{slot.info.name} {list(slot.info.shape)}")
            assert f"{slot.offset:,}" in line and f"{slot.stop:,}" in line


def test_the_printed_form() -> None:
    infos = [
        ParameterInfo("embed.weight", (40, 10), torch.bfloat16),
        ParameterInfo("head.weight", (10, 3), torch.bfloat16),
        ParameterInfo("head.bias", (3,), torch.bfloat16, unit=1, trained=False),
    ]
    plan = plan_groups(infos, 2, 10_000, Cut.ANYWHERE, first_index=5)
    assert "\n".join(map(str, plan)) == (
        "group 5: 64 bfloat16, frozen, cut at [32]\n"
        "  [         0          3)  head.bias [3]\n"
        "group 6: 448 bfloat16, cut at [224]\n"
        "  [         0         30)  head.weight [10, 3]\n"
        "  [        32        432)  embed.weight [40, 10]"
    )
    (alone,) = plan_groups(infos[:1], 2, 10_000, Cut.NOWHERE)
    assert str(alone).startswith("group 0: 416 bfloat16, every rank\n")


def test_one_parameter_larger_than_the_limit_is_a_group() -> None:
    infos = [ParameterInfo(name, (size,), torch.float32) for name, size in (("a", 10), ("b", 500), ("c", 10))]
    plan = plan_groups(infos, 2, 100, Cut.ANYWHERE)
    assert [[slot.info.name for slot in group.slots] for group in plan] == [["c"], ["b"], ["a"]]


def test_no_parameters_no_groups() -> None:
    assert plan_groups([], 4, 100, Cut.ANYWHERE) == ()


def test_round_robin_goes_on_from_group_to_group() -> None:
    """Rank 0 does not get the first parameter of every group, which would be all of them where each stands alone."""
    infos = [ParameterInfo(str(number), (64,), torch.float32) for number in range(8)]
    owners = [
        rank for group in plan_groups(infos, 4, 1, Cut.ROUND_ROBIN) for rank in range(4) for _ in group.specs(rank)
    ]
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("cut", list(WHOLE))
def test_whole_parameters_are_shared_out_over_all_groups(cut: Cut) -> None:
    """Small buckets must not leave one rank with every state."""
    infos = [ParameterInfo(str(number), (64,), torch.float32) for number in range(8)]
    for limit in (1, 128, 10**6):
        loads = [0] * 4
        for group in plan_groups(infos, 4, limit, cut):
            for rank in range(4):
                loads[rank] += sum(spec.numel for _, spec in group.specs(rank))
        assert loads == [128] * 4, (limit, loads)


@pytest.mark.parametrize(
    ("world", "limit", "names", "message"),
    [
        (0, 100, "ab", "a world of 1 at least: got 0"),
        (-2, 100, "ab", "a world of 1 at least: got -2"),
        (2, 0, "ab", "a max_numel of 1 at least: got 0"),
        (2, 100, "aba", "'a' stands twice"),
    ],
)
def test_what_cannot_be_planned(world: int, limit: int, names: str, message: str) -> None:
    infos = [ParameterInfo(name, (3,), torch.float32) for name in names]
    with pytest.raises(ValueError, match=message):
        plan_groups(infos, world, limit, Cut.ANYWHERE)
