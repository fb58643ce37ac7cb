"""Every collective by every route equals torch.distributed's, for every size, cut, dtype and operation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

import ds_comm
from ds_comm import Communicator, Route, RoutePolicy, shared_memory
from ds_comm.shared_memory import even_splits
from testing import RankPool

Ranks = Callable[[int], RankPool]

POLICIES = {
    Route.SHARED_MEMORY: RoutePolicy(),
    Route.PEERS: RoutePolicy(shared_memory=False, min_peer_bytes=0),
    Route.NATIVE: RoutePolicy(shared_memory=False, peers=False),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WORLDS = [2, 3, 4]
SMALL_SLOT_BYTES = 4096
"""Slots this small are passed several times by tensors of a few thousand elements."""


@dataclass(frozen=True)
class Case:
    """One call. `sizes` are the ranks' pieces; `output` a wider dtype; `aliased`: the piece lies in the whole."""

    kind: str
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    output: torch.dtype | None = None
    aliased: bool = False
    async_op: bool = False

    @property
    def splits(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.sizes, initial=0))


@contextmanager
def communicator(route: Route, slot_bytes: int = SMALL_SLOT_BYTES) -> Iterator[Communicator]:
    """A communicator of this rank whose calls take `route`."""
    with mock.patch.object(shared_memory, "SEGMENT_SLOT_BYTES", slot_bytes):
        comm = Communicator(dist.group.WORLD, POLICIES[route])
        try:
            yield comm
        finally:
            comm.close()


def whole_numbers(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """A rank's data: small whole numbers, whose sums are exact in every dtype and every order."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def reals(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """A rank's data: numbers of all sizes, whose sums depend on their order."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return (torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)).to(dtype)


def run_case(comm: Communicator, case: Case) -> str:
    """Makes the call and torch's; says how they differ, or nothing."""
    numel, rank, world = sum(case.sizes), comm.rank, comm.world
    start, stop = case.splits[rank], case.splits[rank + 1]
    op = getattr(ReduceOp, case.op)
    even = len(set(case.sizes)) == 1
    splits = None if even else case.splits
    given_whole = whole_numbers(numel, case.dtype, rank)
    if case.kind == "all_gather":
        expected = torch.cat([whole_numbers(size, case.dtype, owner) for owner, size in enumerate(case.sizes)])
        piece = whole_numbers(case.sizes[rank], case.dtype, rank)
        found = torch.full_like(expected, math.nan)
        if case.aliased:
            found[start:stop] = piece
            piece = found[start:stop]
        work = comm.all_gather_into_tensor(found, piece, case.async_op, splits)
    else:
        expected = given_whole.clone()
        if case.op == "MAX":
            dist.all_reduce(expected, ReduceOp.MAX)
        else:
            dist.all_reduce(expected)
        if case.op == "AVG":
            expected = (expected.double() / world).to(case.output or case.dtype)
        if case.kind == "all_reduce":
            found = given_whole
            work = comm.all_reduce(found, op, case.async_op)
        else:
            expected = expected[start:stop].to(case.output or case.dtype)
            found = given_whole[start:stop] if case.aliased else torch.full_like(expected, math.nan)
            work = comm.reduce_scatter_tensor(found, given_whole, op, case.async_op, splits)
    if (work is not None) != case.async_op:
        return f"{case} returned {work}"
    if work is not None:
        work.wait()
    if case.op == "AVG" and world == 3:  # a third has no finite expansion
        same = torch.allclose(found, expected, rtol=2 * torch.finfo(found.dtype).eps, atol=0)
    else:
        same = torch.equal(found, expected)
    return "" if same else f"{case} on rank {rank}: {found.tolist()[:20]} is not {expected.tolist()[:20]}"


def run_cases(cases: list[Case], route: Route, slot_bytes: int = SMALL_SLOT_BYTES) -> list[str]:
    """What differs, of all cases on this rank."""
    with communicator(route, slot_bytes) as comm:
        return [message for case in cases if (message := run_case(comm, case))]


def assert_equal_to_torch(pool: RankPool, cases: list[Case], route: Route, **kwargs: Any) -> None:
    messages = [message for of_rank in pool.run(run_cases, cases, route, **kwargs) for message in of_rank]
    assert not messages, "\n".join(messages[:5])


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("world", WORLDS)
def test_dtypes_operations_and_forms(ranks: Ranks, world: int, route: Route) -> None:
    cases = []
    # gloo's own collectives are slow between many ranks on few cores, and torch's to test.
    dtypes = DTYPES if world == 2 or route is not Route.NATIVE else [torch.float32]
    for dtype, async_op in itertools.product(dtypes, [False, True]):
        for op in ("SUM", "AVG", "MAX"):
            cases.append(Case("all_reduce", (50,) * world, dtype, op, async_op=async_op))
        for op, aliased in itertools.product(("SUM", "AVG"), [False, True]):
            cases.append(Case("reduce_scatter", (50,) * world, dtype, op, aliased=aliased, async_op=async_op))
            uneven = tuple(range(40, 40 + world))
            cases.append(Case("reduce_scatter", uneven, dtype, op, aliased=aliased, async_op=async_op))
        for aliased in (False, True):
            cases.append(Case("all_gather", (50,) * world, dtype, aliased=aliased, async_op=async_op))
    for dtype, op in itertools.product([torch.bfloat16, torch.float16], ["SUM", "AVG"]):
        cases.append(Case("reduce_scatter", (50,) * world, dtype, op, output=torch.float32))
        cases.append(Case("reduce_scatter", (7, *(31,) * (world - 1)), dtype, op, output=torch.float32, async_op=True))
    assert_equal_to_torch(ranks(world), cases, route)


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("world", [2, 4])
def test_sizes_around_a_slot(ranks: Ranks, world: int, route: Route) -> None:
    cases = []
    for dtype in DTYPES:
        slot = SMALL_SLOT_BYTES // dtype.itemsize  # elements of a slot; a reader's part is a part of it
        part = SMALL_SLOT_BYTES // (world - 1) // 64 * 64 // dtype.itemsize
        sizes = {0, 1, 7, part - 1, part, part + 1, slot - 1, slot, slot + 1, 3 * slot, 3 * slot + 5}
        for size, kind in itertools.product(sorted(sizes), ["reduce_scatter", "all_gather"]):
            cases.append(Case(kind, (size,) * world, dtype))
        cases += [Case("all_reduce", (size, *(0,) * (world - 1)), dtype) for size in sizes]
    assert_equal_to_torch(ranks(world), cases, route)


def test_real_slots(ranks: Ranks) -> None:
    slot = shared_memory.SEGMENT_SLOT_BYTES // 4
    cases = [
        Case(kind, (slot + more, slot + more))
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
        for more in (-1, 0, 1)
    ]
    cases.append(Case("all_reduce", (5 * slot, slot + 3), torch.float32))
    assert_equal_to_torch(ranks(2), cases, Route.SHARED_MEMORY, slot_bytes=shared_memory.SEGMENT_SLOT_BYTES)


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("empty", ["first", "last", "all but one", "every"])
def test_empty_pieces(ranks: Ranks, world: int, route: Route, empty: str) -> None:
    sizes = {
        "first": (0, *(9,) * (world - 1)),
        "last": (*(9,) * (world - 1), 0),
        "all but one": (0, 3000, *(0,) * (world - 2)),
        "every": (0,) * world,
    }[empty]
    cases = [
        Case(kind, sizes, aliased=aliased, async_op=async_op)
        for kind in ("reduce_scatter", "all_gather")
        for aliased in (False, True)
        for async_op in (False, True)
    ]
    assert_equal_to_torch(ranks(world), cases, route)


@st.composite
def any_cases(draw: st.DrawFn, world: int) -> list[Case]:
    """A few calls of any form, with pieces of any size."""
    cases = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]))
        sizes = draw(st.lists(st.integers(0, 2500), min_size=world, max_size=world))
        if draw(st.booleans()):
            sizes = sizes[:1] * world
        dtype = draw(st.sampled_from(DTYPES))
        low = dtype in (torch.bfloat16, torch.float16)
        wide = draw(st.sampled_from([None, torch.float32])) if low and kind == "reduce_scatter" else None
        cases.append(
            Case(
                kind,
                tuple(sizes),
                dtype,
                draw(st.sampled_from(["SUM", "AVG"])) if kind != "all_gather" else "SUM",
                wide,
                aliased=wide is None and draw(st.booleans()),
                async_op=draw(st.booleans()),
            )
        )
    return cases


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("world", [2, 4])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_sizes_and_splits(ranks: Ranks, world: int, route: Route, data: st.DataObject) -> None:
    assert_equal_to_torch(ranks(world), data.draw(any_cases(world)), route)


def reduce_in_cuts(
    numel: int, cuts: list[list[int]], dtype: torch.dtype, route: Route
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """The sum of the ranks' reals: in one call, in a call for each piece of a cut, and scattered by splits."""
    with communicator(route) as comm:
        data = reals(numel, dtype, comm.rank)
        whole = data.clone()
        comm.all_reduce(whole)
        by_pieces, scattered = [], []
        for cut in cuts:
            edges = [0, *cut, numel]
            pieces = data.clone()
            for start, stop in itertools.pairwise(edges):
                comm.all_reduce(pieces[start:stop])
            by_pieces.append(pieces)
            splits = [*sorted(([0, *cut] + [numel] * comm.world)[: comm.world]), numel]
            output = torch.empty(splits[comm.rank + 1] - splits[comm.rank], dtype=dtype)
            comm.reduce_scatter_tensor(output, data.clone(), splits=splits)
            gathered = torch.empty_like(data)
            comm.all_gather_into_tensor(gathered, output, splits=splits)
            scattered.append(gathered)
    return whole, by_pieces, scattered


@pytest.mark.parametrize("world", [2, 4])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_results_do_not_depend_on_the_cut(ranks: Ranks, world: int, data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 3000))
    cut = st.lists(st.integers(0, numel), max_size=world - 1).map(sorted)
    cuts = data.draw(st.lists(cut, min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(DTYPES))
    results = ranks(world).run(reduce_in_cuts, numel, cuts, dtype, Route.SHARED_MEMORY)
    expected = reals(numel, dtype, 0)
    for rank in range(1, world):  # rank order, rounded after each addition
        expected = expected + reals(numel, dtype, rank)
    for whole, by_pieces, scattered in results:
        for each in (whole, *by_pieces, *scattered):
            assert torch.equal(each, expected)


@pytest.mark.parametrize("route", [Route.SHARED_MEMORY, Route.PEERS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_output_is_summed_in_its_dtype(ranks: Ranks, dtype: torch.dtype, route: Route) -> None:
    found = ranks(4).run(scatter_wide, dtype, route)
    parts = [reals(2000, dtype, rank).float() for rank in range(4)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(torch.cat(found), expected)


def scatter_narrow(route: Route) -> list[torch.Tensor]:
    found = []
    with communicator(route) as comm:
        for splits in (None, (0, 400, 1100, 1500, 2000)):
            bounds = splits or even_splits(2000, 4)
            output = torch.empty(bounds[comm.rank + 1] - bounds[comm.rank], dtype=torch.bfloat16)
            comm.reduce_scatter_tensor(output, reals(2000, torch.float32, comm.rank), splits=splits)
            found.append(output)
    return found


@pytest.mark.parametrize("route", [Route.SHARED_MEMORY, Route.PEERS])
def test_a_narrower_output_is_rounded_once(ranks: Ranks, route: Route) -> None:
    found = ranks(4).run(scatter_narrow, route)
    parts = [reals(2000, torch.float32, rank) for rank in range(4)]
    expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]).bfloat16()
    for pieces in zip(*found):
        assert torch.equal(torch.cat(pieces), expected)


def scatter_wide(dtype: torch.dtype, route: Route) -> torch.Tensor:
    with communicator(route) as comm:
        output = torch.empty(500)
        comm.reduce_scatter_tensor(output, reals(2000, dtype, comm.rank))
    return output


@pytest.mark.parametrize("route", Route)
def test_real_numbers_are_close_to_torchs(ranks: Ranks, route: Route) -> None:
    for ours, theirs in ranks(4).run(reduce_both, route):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def reduce_both(route: Route) -> tuple[torch.Tensor, torch.Tensor]:
    with communicator(route) as comm:
        data = reals(4321, torch.float32, comm.rank)
        theirs = data.clone()
        dist.all_reduce(theirs)
        comm.all_reduce(data)
    return data, theirs


def call_coalesced(route: Route) -> list[str]:
    """The coalesced forms against a plain call for each member."""
    wrong = []
    with communicator(route) as comm:
        rank, world = comm.rank, comm.world
        shapes = [(3, 5), (1,), (), (0,), (700,), (2, 2, 2)]
        for op, async_op in itertools.product([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX], [False, True]):
            tensors = [whole_numbers(math.prod(shape), torch.float32, rank).view(shape) for shape in shapes]
            expected = [tensor.clone() for tensor in tensors]
            for tensor in expected:
                comm.all_reduce(tensor, op)
            addresses = [tensor.data_ptr() for tensor in tensors]
            wait(comm.all_reduce_coalesced(tensors, op, async_op), async_op)
            if not all(map(torch.equal, tensors, expected)):
                wrong.append(f"all_reduce {op} async_op={async_op}")
            if addresses != [tensor.data_ptr() for tensor in tensors]:
                wrong.append("the tensors were replaced")
        transposed = whole_numbers(12, torch.float32, rank).view(3, 4).t()
        summed = transposed.contiguous()
        comm.all_reduce(summed)
        comm.all_reduce_coalesced([transposed])
        if not torch.equal(transposed, summed):
            wrong.append("all_reduce of a transposed view")
        for async_op in (False, True):
            inputs = [whole_numbers(size * world, torch.float32, rank) for size in (1, 64, 3000, 0)]
            outputs = [torch.full((each.numel() // world,), math.nan) for each in inputs]
            wait(comm.reduce_scatter_coalesced(outputs, inputs, ReduceOp.AVG, async_op), async_op)
            gathered = [torch.full_like(each, math.nan) for each in inputs]
            wait(comm.all_gather_coalesced(gathered, outputs, async_op), async_op)
            for whole, each in zip(gathered, inputs):
                comm.all_reduce(each, ReduceOp.AVG)
                if not torch.equal(whole, each):
                    wrong.append(f"{each.numel()} elements scattered and gathered, async_op={async_op}")
        for call in (comm.all_reduce_coalesced, comm.reduce_scatter_coalesced, comm.all_gather_coalesced):
            arguments: tuple = ([],) if call == comm.all_reduce_coalesced else ([], [])
            wait(call(*arguments, async_op=True), True)
            wait(call(*arguments), False)
    return wrong


def wait(work: Any, async_op: bool) -> None:
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
        work.wait()  # twice is once


@pytest.mark.parametrize("route", Route)
def test_coalesced_forms(ranks: Ranks, route: Route) -> None:
    assert ranks(2).run(call_coalesced, route) == [[], []]


def spied(route: Route) -> dict[str, list[str]]:
    """Which functions of torch.distributed each collective calls, once its route is open."""
    names = [
        *("all_reduce", "reduce", "broadcast", "barrier", "isend", "irecv", "send", "recv", "all_gather"),
        *("all_gather_object", "all_gather_into_tensor", "reduce_scatter_tensor", "monitored_barrier"),
        *("all_gather_single", "reduce_scatter_single"),
    ]
    names = [name for name in names if hasattr(dist, name)]
    calls: dict[str, list[str]] = {}
    with communicator(route) as comm:
        data, piece = torch.ones(64), torch.ones(32)
        comm.all_reduce(data)  # connects
        with mock.patch.multiple(dist, **{name: mock.Mock(wraps=getattr(dist, name)) for name in names}):
            spies = {name: getattr(dist, name) for name in names}
            # The communicator looked some of them up when it was imported.
            module = "ds_comm.communicator"
            reduce_scatter, all_gather = mock.Mock(), mock.Mock()
            with (
                mock.patch(f"{module}._reduce_scatter", reduce_scatter),
                mock.patch(f"{module}._all_gather", all_gather),
            ):
                spies |= {"native reduce-scatter": reduce_scatter, "native all-gather": all_gather}
                for name, call in {
                    "all_reduce": lambda: comm.all_reduce(data),
                    "reduce_scatter": lambda: comm.reduce_scatter_tensor(piece, data),
                    "all_gather": lambda: comm.all_gather_into_tensor(data, piece),
                }.items():
                    call()
                    calls[name] = [spy for spy, each in spies.items() for _ in each.mock_calls if each.called]
                    for each in spies.values():
                        each.reset_mock()
    return calls


def test_a_call_is_one_exchange_and_no_more(ranks: Ranks) -> None:
    """No barrier, no agreement, no second transfer: what a call adds to the transfer stays on its rank."""
    shared, *_ = ranks(2).run(spied, Route.SHARED_MEMORY)
    assert shared == {"all_reduce": [], "reduce_scatter": [], "all_gather": []}
    peers, *_ = ranks(2).run(spied, Route.PEERS)
    pair = ["isend", "irecv"]
    assert peers == {"all_reduce": ["all_reduce"], "reduce_scatter": pair, "all_gather": pair}
    native, *_ = ranks(2).run(spied, Route.NATIVE)
    assert native["all_reduce"] == ["all_reduce"]
    assert {name.split(".")[0] for name in native["reduce_scatter"]} == {"native reduce-scatter"}
    assert {name.split(".")[0] for name in native["all_gather"]} == {"native all-gather"}


def signals_of_calls() -> dict[str, int]:
    """Messages a shared-memory call sends to each peer, by call."""
    counts: dict[str, int] = {}
    with communicator(Route.SHARED_MEMORY) as comm:
        transport = comm.transport
        assert transport is not None
        with mock.patch.object(transport, "_exchange", wraps=transport._exchange) as exchange:
            data, piece = torch.ones(64), torch.ones(32)
            for name, call in {
                "all_reduce": lambda: comm.all_reduce(data),
                "reduce_scatter": lambda: comm.reduce_scatter_tensor(piece, data),
                "all_gather": lambda: comm.all_gather_into_tensor(data, piece),
            }.items():
                call()
                counts[name] = exchange.call_count
                exchange.reset_mock()
    return counts


def test_a_small_call_signals_once_a_chunk(ranks: Ranks) -> None:
    assert ranks(2).run(signals_of_calls)[0] == {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


def make_bad_calls() -> list[str]:
    """What bad calls raise; ranks make none of them, so nobody waits."""
    whole, piece = torch.zeros(8), torch.zeros(4)
    with communicator(Route.SHARED_MEMORY) as comm:
        calls: list[Callable[[], Any]] = [
            lambda: comm.reduce_scatter_tensor(torch.zeros(3), whole),
            lambda: comm.reduce_scatter_tensor(piece, torch.zeros(9)),
            lambda: comm.reduce_scatter_tensor(piece.view(2, 2), whole),
            lambda: comm.all_gather_into_tensor(whole.view(2, 4), piece),
            lambda: comm.all_gather_into_tensor(whole, torch.zeros(5)),
            lambda: comm.all_gather_into_tensor(whole, piece, splits=(0, 5, 8)),
            lambda: comm.all_gather_into_tensor(whole, piece, splits=(0, 4, 9)),
            lambda: comm.all_gather_into_tensor(whole, piece, splits=(0, 4)),
            lambda: comm.all_gather_into_tensor(whole, piece, splits=(0, 4, 8, 8)),
            lambda: comm.all_gather_into_tensor(whole, piece, splits=(-4, 0, 8) if comm.rank else (4, 8, 8)),
            lambda: comm.reduce_scatter_tensor(piece, whole, ReduceOp.MAX),
        ]
        raised = []
        for call in calls:
            try:
                call()
                raised.append("nothing")
            except Exception as error:
                raised.append(f"{type(error).__name__}: {error}")
    return raised


def test_calls_that_cannot_be_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    for raised in ranks(2).run(make_bad_calls):
        *shapes, op = raised
        for message in shapes:
            assert message.startswith("ValueError: "), raised
            assert "one piece of each of 2 ranks" in message and "splits=" in message, raised
        assert op.startswith("ValueError: ") and "MAX" in op and "use ReduceOp.SUM or ReduceOp.AVG" in op


def refuse_and_go_on(route: Route) -> list[tuple[str, bool]]:
    """What other calls that can't be raise, and whether the group's next call is right."""
    whole, piece, whole_i, piece_i = torch.ones(8), torch.ones(4), torch.ones(8).long(), torch.ones(4).long()
    with communicator(route) as comm:
        calls: list[Callable[[], Any]] = [
            lambda: comm.reduce_scatter_tensor(torch.ones(8)[::2], whole),
            lambda: comm.all_gather_into_tensor(torch.ones(16)[::2], piece),
            lambda: comm.all_gather_into_tensor(whole, piece.double()),
            lambda: comm.reduce_scatter_tensor(piece_i, whole),
            lambda: comm.reduce_scatter_tensor(piece.to("meta"), whole),
            lambda: comm.all_gather_into_tensor(whole, piece.to("meta")),
            lambda: comm.reduce_scatter_tensor(piece_i, whole_i, ReduceOp.AVG),
            lambda: comm.all_reduce(whole_i, ReduceOp.AVG),
            lambda: comm.broadcast(whole, src=2),
            lambda: comm.broadcast(whole, src=-1),
            lambda: comm.all_reduce_coalesced([whole, whole.double()]),
            lambda: comm.reduce_scatter_coalesced([piece, piece], [whole]),
            lambda: comm.reduce_scatter_coalesced([piece, piece], [whole, torch.ones(10)]),
            lambda: comm.reduce_scatter_coalesced([piece], [whole], ReduceOp.MAX),
            lambda: comm.all_gather_coalesced([whole], [piece, piece]),
            lambda: comm.all_gather_coalesced([whole, whole], [piece, torch.ones(3)]),
        ]
        raised = []
        for call in calls:
            message = "nothing"
            try:
                # By one rank alone: had it sent anything, the other's next call would meet that.
                if comm.rank == 1:
                    call()
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
            tensor = torch.full((3,), comm.rank + 1.0)
            comm.all_reduce(tensor)
            raised.append((message, tensor.tolist() == [3.0] * 3))
    return raised


@pytest.mark.parametrize("route", Route)
def test_the_group_goes_on_after_a_refused_call(ranks: Ranks, route: Route) -> None:
    words = [
        *(
            "strides (2,)",
            "strides (2,)",
            "input torch.float64, output torch.float32",
            "torch.float32 into torch.int64",
        ),
        *(
            "cpu and meta",
            "cpu and meta",
            "torch.int64; use SUM",
            "torch.int64; use SUM",
            "src=2; give 0..1",
            "src=-1;",
        ),
        *("float32 on cpu, torch.float64 on cpu", "2 outputs, 1 inputs", "whole (10,), piece (4,)", "MAX"),
        *("1 outputs, 2 inputs", "whole (8,), piece (3,)"),
    ]
    one, other = ranks(2).run(refuse_and_go_on, route)
    assert len(other) == len(words)
    for (message, right), (_, right_too), word in zip(other, one, words):
        assert message.startswith("ValueError: ") and word in message, message
        assert right and right_too, message


def reduce_odd_layouts(route: Route) -> list[str]:
    wrong = []
    with communicator(route) as comm:
        for tensor in (
            whole_numbers(24, torch.float32, comm.rank).view(2, 3, 4),
            whole_numbers(1, torch.float32, comm.rank).view(()),
            whole_numbers(24, torch.float32, comm.rank).view(4, 6).t(),
            whole_numbers(24, torch.int64, comm.rank),
        ):
            expected = tensor.contiguous()
            if expected.data_ptr() == tensor.data_ptr():
                expected = expected.clone()
            dist.all_reduce(expected)
            comm.all_reduce(tensor)
            if not torch.equal(tensor, expected):
                wrong.append(f"all_reduce of {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}")
    return wrong


@pytest.mark.parametrize("route", Route)
def test_any_shape_and_integers(ranks: Ranks, route: Route) -> None:
    assert ranks(2).run(reduce_odd_layouts, route) == [[], []]


def reduce_what_autograd_follows(route: Route, async_op: bool) -> list[Any]:
    """A parameter and a loss through every collective, as torch.distributed takes them."""
    done: list[Any] = []
    with communicator(route) as comm:
        parameter = torch.nn.Parameter(torch.ones(4))
        loss = parameter.sum() * 2
        calls: dict[str, Callable[[], Any]] = {
            "leaf": lambda: comm.all_reduce(parameter, async_op=async_op),
            "result": lambda: comm.all_reduce(loss, async_op=async_op),
            "scattered": lambda: comm.reduce_scatter_tensor(torch.empty(2), parameter, async_op=async_op),
        }
        for name, call in calls.items():
            try:
                work = call()
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                done.append(f"{name}: {error}")
        done += [parameter.tolist(), loss.item(), parameter.grad_fn is None]
    return done


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("route", Route)
def test_autograd_does_not_see_collectives(ranks: Ranks, route: Route, async_op: bool) -> None:
    """As torch.distributed: the values change, the graph does not."""
    for done in ranks(2).run(reduce_what_autograd_follows, route, async_op):
        assert done == [[2.0] * 4, 16.0, True]


def use_names(group_of: tuple[int, ...] | None = None) -> list[Any]:
    """The module's functions over the world."""
    rank, world = ds_comm.get_rank(), ds_comm.get_world_size()
    tensor = torch.full((2, 3), float(rank + 1))
    ds_comm.all_reduce(tensor)
    whole = torch.arange(4.0 * world).view(world, 2, 2)
    piece = torch.empty(2, 2)
    ds_comm.reduce_scatter_tensor(piece, whole)
    gathered = torch.empty(world, 2, 2)
    ds_comm.all_gather_into_tensor(gathered, piece)
    sent = torch.full((3,), float(rank))
    ds_comm.broadcast(sent, src=1)
    ds_comm.barrier()
    same = ds_comm.communicator() is ds_comm.communicator(dist.group.WORLD)
    return [tensor.tolist(), gathered.flatten().tolist(), sent.tolist(), same]


def test_names_over_the_world(ranks: Ranks) -> None:
    for reduced, gathered, sent, same in ranks(2).run(use_names):
        assert reduced == [[3.0] * 3] * 2
        assert gathered == [2.0 * number for number in range(8)]
        assert sent == [1.0] * 3
        assert same


@pytest.mark.parametrize("async_op", [False, True])
def test_a_world_of_one(async_op: bool) -> None:
    comm = Communicator(None)
    data = torch.arange(4.0)
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        tensor = data.clone()
        wait(comm.all_reduce(tensor, op, async_op), async_op)
        assert torch.equal(tensor, data)
    wide = torch.empty(4, dtype=torch.float64)
    wait(comm.reduce_scatter_tensor(wide, data, ReduceOp.AVG, async_op), async_op)
    assert torch.equal(wide, data.double())
    output = torch.empty(4)
    wait(comm.all_gather_into_tensor(output, data, async_op), async_op)
    assert torch.equal(output, data)
    wait(comm.all_gather_into_tensor(output, output, async_op), async_op)
    wait(comm.broadcast(output, 0, async_op), async_op)
    wait(comm.all_reduce_coalesced([output], async_op=async_op), async_op)
    comm.barrier()
    assert torch.equal(output, data)
    assert comm.transport is None and (comm.rank, comm.world) == (0, 1)


def routes_of_a_group() -> list[Route]:
    """Routes with default thresholds, and without shared memory: by kind, size and dtype."""
    small, large, whole = torch.zeros(8), torch.zeros(1 << 18), torch.zeros(1 << 18, dtype=torch.int64)
    with communicator(Route.SHARED_MEMORY) as comm:
        found = [comm.route(kind, large) for kind in ("all_reduce", "reduce_scatter", "all_gather")]
        found += [comm.route("all_reduce", small), comm.route("all_reduce", whole)]
    comm = Communicator(dist.group.WORLD, RoutePolicy(shared_memory=False))
    found += [comm.route(kind, large) for kind in ("all_reduce", "reduce_scatter", "all_gather")]
    found += [comm.route("reduce_scatter", small), comm.route("all_gather", whole)]
    # Hosts that can't share memory: found out together when the first call connects.
    with mock.patch.object(shared_memory, "_place", return_value=f"host {dist.get_rank()}"):
        comm = Communicator(dist.group.WORLD)
        found += [comm.route("all_gather", large), comm.route("all_reduce", large)]
        assert comm.transport is None
    return found


def test_routes(ranks: Ranks) -> None:
    shared, peers, native = Route.SHARED_MEMORY, Route.PEERS, Route.NATIVE
    expected = [shared, shared, shared, shared, native, native, peers, peers, native, native, peers, native]
    assert ranks(2).run(routes_of_a_group) == [expected, expected]


def test_the_policy_by_itself() -> None:
    tensor = torch.zeros(1 << 18)
    policy = RoutePolicy(min_shared_bytes=1 << 20, max_shared_ranks=4)
    assert policy.choose("all_reduce", "gloo", tensor, 4, one_host=True) is Route.SHARED_MEMORY
    assert policy.choose("all_reduce", "gloo", tensor, 5, one_host=True) is Route.NATIVE
    assert policy.choose("all_reduce", "gloo", tensor[:-1], 4, one_host=True) is Route.NATIVE
    assert policy.choose("all_gather", "gloo", tensor, 4, one_host=False) is Route.PEERS
    assert policy.choose("all_gather", "nccl", tensor, 4, one_host=True) is Route.NATIVE
    assert policy.choose("all_gather", "gloo", tensor.to("meta"), 4, one_host=True) is Route.NATIVE
