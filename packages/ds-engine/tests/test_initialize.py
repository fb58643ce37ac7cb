"""initialize: its documented signature and results, and every form that an argument may take."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, StepLR
from torch.utils.data import IterableDataset, TensorDataset

import ds_engine
from ds_comm import CommError
from ds_engine import Config, ConfigError, DistributedLoader, Engine, WarmupLR, initialize
from ds_zero import ShardedOptimizer
from testing import RankPool

Ranks = Callable[[int], RankPool]
Start = Callable[..., Any]

SMALL: dict[str, Any] = {"train_batch_size": 2, "steps_per_print": 0}
ADAM = {"type": "Adam", "params": {"lr": 0.5}}


# The signature and the results


def test_the_documented_signature() -> None:
    parameters = inspect.signature(initialize).parameters
    documented = (
        "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required "
        "collate_fn config config_params"
    )
    assert list(parameters) == documented.split()
    assert {name: each.default for name, each in parameters.items() if each.default is not None} == {
        "distributed_port": 29500
    }


def test_the_documented_results(start: Start) -> None:
    data = TensorDataset(torch.zeros(8, 4))
    engine, optimizer, loader, scheduler = start({"scheduler": {"type": "WarmupLR"}}, training_data=data)
    assert isinstance(engine, Engine)
    assert isinstance(optimizer, ShardedOptimizer) and optimizer is engine.optimizer
    assert isinstance(loader, DistributedLoader) and loader is engine.training_dataloader
    assert isinstance(scheduler, WarmupLR) and scheduler is engine.lr_scheduler


def test_results_of_what_was_not_asked_for_are_none(start: Start) -> None:
    assert start()[2:] == (None, None)
    engine, *others = start({"optimizer": None})
    assert others == [None, None, None]
    assert engine(torch.zeros(2, 4)).shape == (2, 3), "it still runs the model"


@pytest.mark.parametrize("model", [None, nn.Linear, [nn.Linear(1, 1)]])
def test_a_model_is_a_module(model: Any) -> None:
    with pytest.raises(ValueError, match=r"trains a torch.nn.Module: model is \w+; pass model="):
        initialize(model=model, config=SMALL)


# The configuration


def test_where_the_configuration_may_be(alone: None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    arguments = ds_engine.add_config_arguments(argparse.ArgumentParser()).parse_args(
        ["--deepspeed", "--deepspeed_config", str(path)]
    )
    assert arguments.deepspeed is True
    for place in (
        {"config": SMALL},
        {"config": path},
        {"config": str(path)},
        {"config": Config.load(SMALL)},
        {"config_params": SMALL},
        {"args": arguments},
        {"args": argparse.Namespace(deepspeed_config=None), "config": SMALL},
        {"args": argparse.Namespace(local_rank=0), "config": SMALL},
    ):
        engine, *_ = initialize(model=nn.Linear(1, 1), **place)  # type: ignore[arg-type]
        assert engine.config == Config.load(SMALL)
    assert SMALL == {"train_batch_size": 2, "steps_per_print": 0}, "the user's own is left alone"


def test_a_configuration_comes_from_one_place(alone: None) -> None:
    with pytest.raises(ConfigError, match="got none: pass config="):
        initialize(model=nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="one place: got config and config_params; pass one of them"):
        initialize(model=nn.Linear(1, 1), config=SMALL, config_params=SMALL)
    with pytest.raises(ConfigError, match=r"got config and args.deepspeed_config"):
        initialize(argparse.Namespace(deepspeed_config="x.json"), model=nn.Linear(1, 1), config=SMALL)


def test_a_bad_configuration_starts_nothing(alone: None) -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        initialize(model=nn.Linear(1, 1), config={"train_batch_sise": 2})
    assert not dist.is_initialized()


# What is trained


@pytest.mark.parametrize(
    ("given", "groups"),
    [
        (lambda model: None, [2]),
        (lambda model: model.parameters(), [2]),
        (lambda model: list(model.parameters()), [2]),
        (lambda model: model.named_parameters(), [2]),
        (lambda model: model, [2]),
        (lambda model: [model.bias], [1]),
        (lambda model: [{"params": [model.weight], "lr": 0.25}, {"params": model.bias}], [1, 1]),
        (lambda model: ({"params": [each]} for each in model.parameters()), [1, 1]),
    ],
)
def test_forms_of_model_parameters(given: Any, groups: list[int], start: Start) -> None:
    model = nn.Linear(4, 3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine, optimizer, *_ = start(model=model, model_parameters=given(model))
    assert [len(group["params"]) for group in optimizer.param_groups] == groups
    if groups == [1, 1]:
        assert engine.get_lr() in ([0.25, 0.1], [0.1, 0.1])
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters())]
    assert changed == ([True, True] if sum(groups) == 2 else [False, True])


def _used_up(model: nn.Module) -> Any:
    parameters = model.parameters()
    list(parameters)
    return parameters


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda model: [], "model_parameters is empty; pass model.parameters()"),
        (_used_up, "a generator that was used up before gives nothing"),
        (lambda model: ["weight"], "lists tensors, or groups .*: got str; pass model.parameters()"),
        (lambda model: {"params": list(model.parameters())}, "got dict"),
        (lambda model: model.weight, "got Parameter"),
        (lambda model: 3, "got int"),
        (lambda model: [each.requires_grad_(False) for each in model.parameters()], "lists 2 parameters and none req"),
    ],
)
def test_nothing_to_train_is_an_error(given: Any, words: str, start: Start) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=words):
        start(model=model, model_parameters=given(model))


def test_a_model_without_parameters_is_an_error(start: Start) -> None:
    with pytest.raises(ValueError, match="there is something to train"):
        start(model=nn.ReLU())


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.Adam(model.parameters(), lr=0.5),
        lambda model: partial(torch.optim.Adam, lr=0.5),
        lambda model: lambda parameters: torch.optim.Adam(parameters, lr=0.5),
    ],
)
def test_a_clients_optimizer_wins_over_the_configurations(make: Any, start: Start) -> None:
    model = nn.Linear(4, 3)
    engine, optimizer, *_ = start(model=model, optimizer=make(model))
    assert type(optimizer.inner) is torch.optim.Adam
    assert engine.get_lr() == [0.5]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (3, "or a callable that makes one: got int; leave it out"),
        (lambda parameters: None, "a callable optimizer returns a torch.optim.Optimizer: it returned NoneType"),
    ],
)
def test_what_is_no_optimizer(optimizer: Any, words: str, start: Start) -> None:
    with pytest.raises(ValueError, match=words):
        start(optimizer=optimizer)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"optimizer": {"type": "Adaam"}}, "got 'Adaam' (did you mean 'Adam'?)"),
        ({"optimizer": {"type": "Adam", "params": {"lrr": 1}}}, "got 'lrr' (did you mean 'lr'?)"),
        ({"scheduler": {"type": "WarmUpLRs"}}, "got 'WarmUpLRs' (did you mean 'WarmupLR'?)"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 1}}}, "got 'warmup' (did you mean 'warmup_"),
    ],
)
def test_unknown_names_in_a_section(section: dict[str, Any], words: str, start: Start) -> None:
    with pytest.raises(ValueError) as caught:
        start(section)
    assert words in str(caught.value)


# The schedule


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: StepLR(inner, step_size=1, gamma=0.5),
        lambda inner: partial(StepLR, step_size=1, gamma=0.5),
        lambda inner: lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5),
    ],
)
def test_forms_of_a_schedule(make: Any, start: Start) -> None:
    model = nn.Linear(4, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, _, _, scheduler = start(
        {"scheduler": {"type": "WarmupLR"}, "train_batch_size": 4},
        model=model,
        optimizer=inner,
        lr_scheduler=make(inner),
    )
    assert isinstance(scheduler, StepLR), "it wins over the configuration's"
    rates = []
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        rates += engine.get_lr()
    assert rates == [0.5, 0.25, 0.25, 0.125], "it moves with the optimizer, not with micro-batches"


def test_a_schedules_class_is_a_callable(start: Start) -> None:
    assert isinstance(start(lr_scheduler=ConstantLR)[3], ConstantLR)


@pytest.mark.parametrize(("given", "got"), [(3, "int"), (lambda optimizer: None, "NoneType")])
def test_what_is_no_schedule(given: Any, got: str, start: Start) -> None:
    with pytest.raises(ValueError, match=rf"has a step\(\), or makes an object that has: got {got}; pass a"):
        start(lr_scheduler=given)


def test_a_schedule_wants_an_optimizer(alone: None) -> None:
    with pytest.raises(ValueError, match="there is no optimizer; pass one"):
        initialize(model=nn.Linear(1, 1), lr_scheduler=lambda o: LambdaLR(o, lambda i: 1.0), config=SMALL)


# The data


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(5))


@pytest.mark.parametrize("data", [list(range(5)), torch.arange(5), Stream()])
@pytest.mark.parametrize("drop_last", [False, True])
def test_forms_of_training_data(data: Any, drop_last: bool, start: Start) -> None:
    _, _, loader, _ = start({"dataloader_drop_last": drop_last}, training_data=data)
    sizes = [len(batch) for batch in loader]
    assert sizes == ([2, 2] if drop_last else [2, 2, 1]), "micro-batches of the configured size"


def test_a_collate_function(start: Start) -> None:
    *_, loader, _ = start(training_data=[3, 3, 3, 3], collate_fn=sum)
    assert list(loader) == [6, 6]


def share_of_data() -> list[int]:
    engine, _, loader, _ = initialize(
        model=nn.Linear(1, 1), training_data=list(range(8)), config={**SMALL, "train_batch_size": 4}
    )
    shuffled = [sample for batch in loader for sample in batch.tolist()]
    plain = [sample for batch in engine.deepspeed_io(list(range(8)), 4, "eval") for sample in batch.tolist()]
    assert plain == list(range(dist.get_rank(), 8, 2))
    return shuffled


def test_ranks_share_the_data_out(ranks: Ranks) -> None:
    mine, theirs = ranks(2).run(share_of_data)
    assert sorted(mine + theirs) == list(range(8))
    assert mine != list(range(0, 8, 2))


def test_a_route_is_known(start: Start) -> None:
    with pytest.raises(ConfigError, match="train, eval or predict: got 'test'"):
        start()[0].deepspeed_io([1], route="test")


# Ranks


def values_after_start() -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = nn.BatchNorm1d(2)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.running_mean, model.running_var):
            tensor.uniform_()
    model.bias.requires_grad_(False)
    engine, *_ = initialize(model=model, config={**SMALL, "optimizer": ADAM})
    values = [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]
    engine.destroy()
    return values


def test_rank_0s_values_go_to_every_rank(ranks: Ranks) -> None:
    mine, theirs = ranks(2).run(values_after_start)
    assert mine == theirs


class Mpu:
    """Every rank is a data-parallel group of its own."""

    def __init__(self) -> None:
        self.groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups[dist.get_rank()]  # type: ignore[return-value]


def sizes_with_an_mpu() -> tuple[int, int, tuple[int, int, int]]:
    mpu = Mpu()
    engine, *_ = initialize(model=nn.Linear(1, 1), mpu=mpu, config={**SMALL, "optimizer": ADAM})
    found = engine.dp_world_size, engine.world_size, engine.get_batch_info()
    engine.destroy()
    for group in mpu.groups:
        dist.destroy_process_group(group) if group is not dist.GroupMember.NON_GROUP_MEMBER else None
    return found


def test_an_mpu_names_the_data_parallel_ranks(ranks: Ranks) -> None:
    assert ranks(2).run(sizes_with_an_mpu) == [(1, 2, (2, 2, 1))] * 2


def test_the_process_group_may_be_expected(alone: None) -> None:
    with pytest.raises(CommError, match="dist_init_required=False expects a running process group"):
        initialize(model=nn.Linear(1, 1), config=SMALL, dist_init_required=False)
    initialize(model=nn.Linear(1, 1), config=SMALL, dist_init_required=True)
    assert dist.get_world_size() == 1
    with pytest.raises(CommError, match="it runs already"):
        initialize(model=nn.Linear(1, 1), config=SMALL, dist_init_required=True)


def test_dump_state_logs_the_configuration(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ds_engine"):
        start()
        assert "configuration: " not in caplog.text
        start({"dump_state": True})
    assert '"dump_state": true' in caplog.text and '"train_micro_batch_size_per_gpu": 2' in caplog.text
