"""initialize: from a model and a configuration to an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ds_comm import Communicator, ParallelDims, communicator, device_type, get_world_size, init_distributed
from ds_engine.config import Config
from ds_engine.engine import Engine
from ds_engine.errors import ConfigError
from ds_engine.lr_schedules import build_scheduler, check_scheduler
from ds_engine.optimizers import build_optimizer, elementwise
from ds_engine.precision import LossScaler
from ds_engine.progress import WallClock, log_to_stdout, logger, print_progress
from ds_zero import Cut, ShardedOptimizer, is_sharded


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
) -> tuple[Engine, ShardedOptimizer | None, Any, Any]:
    """Puts an engine together. Starts the process group where none runs. Collective.

    Args:
        args: an object whose `deepspeed_config` is a path; needed only without `config`.
        model: the model, in any dtype, before any wrapper. Rank 0's values go to every rank. With fp16 or
            bf16 enabled its floating-point parameters and buffers get that dtype — unless they are already
            of several floating dtypes (a bf16 base with fp32 adapters), which are then left as they are.
        optimizer: an optimizer over the model's parameters, or a callable that makes one of
            `model_parameters`. Wins over the configuration's.
        model_parameters: parameters, named parameters or parameter groups to train, or a module that has them.
            Default: all of the model's.
        training_data: a dataset; its loader is the third result.
        lr_scheduler: a scheduler, or a callable that makes one of the optimizer. Wins over the configuration's.
        distributed_port: rank 0's port where MASTER_PORT is not set. Default: 29500.
        mpu: an object with `get_data_parallel_group()`; without one all ranks are data-parallel.
        dist_init_required: see `ds_comm.init_distributed`. Default: None.
        collate_fn: makes a batch of samples. Default: torch's.
        config: a dict or the path of a JSON file. One of `args`, `config` and `config_params` has it.
        config_params: the same, by its older name.

    Returns:
        The engine, its optimizer (None without one), the loader of `training_data` (or None), the scheduler
        (or None).

    Raises:
        ConfigError: the configuration can't be; see `Config.load` and `BatchSizes.solve`.
        ValueError: an unknown optimizer or scheduler, nothing to train, or no model.

    Source: DeepSpeed API reference 1.1.2, "Training Initialization".
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"initialize() trains a torch.nn.Module: model is {type(model).__name__}; pass model=")
    parsed = _config(args, config, config_params)
    init_distributed(
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
        config={"comm_timeout_s": parsed.comm_timeout_s},
    )
    log_to_stdout()
    device = _device()
    comm = _data_parallel(mpu, device)
    batch = parsed.batch_sizes(comm.world)
    if parsed.dump_state and comm.rank == 0:
        logger.info("configuration: %s", parsed.model_dump_json(indent=2))
    _place(model, device)
    parameter_dtype = _parameter_dtype(model, parsed)
    _check_scheduler(lr_scheduler, parsed)  # before anything is changed
    inner = _optimizer(optimizer, model, model_parameters, parsed, parsed.precision.masters or parameter_dtype)
    if inner is None and parsed.zero_optimization.stage == 3:
        raise ConfigError(
            "stage 3 shards what an optimizer trains, and there is none: sharding a model only to run it is not "
            'available in this version; pass an optimizer, or set "stage": 0'
        )
    if parameter_dtype is not None:
        _cast(model, parameter_dtype, inner)
    with ExitStack() as undo:
        sharded = None
        if inner is not None:
            sharded = ShardedOptimizer(
                inner,
                model.named_parameters(),
                comm,
                parsed.zero_optimization,
                cut=Cut.ANYWHERE if elementwise(inner) else Cut.BETWEEN,
                parameter_dtype=parameter_dtype,
                master_dtype=parsed.precision.masters,
                gradient_dtype=parsed.gradient_dtype,
                communication_dtype=parsed.communication_dtype,
                prescale_gradients=parsed.prescale_gradients,
                gradient_predivide_factor=parsed.gradient_predivide_factor,
                average=parsed.gradient_allreduce_op == "mean",
                module=model,
            )
            undo.callback(sharded.close)
        _share(model, sharded, comm)
        scheduler = _scheduler(lr_scheduler, sharded, parsed)
        undo.pop_all()
    engine = Engine(model, parsed, batch, comm, device, sharded, scheduler, LossScaler(parsed.loss_scaling))
    every = parsed.steps_per_print
    if every and engine.global_rank == 0:
        print_progress(engine.events, every)
    if parsed.wall_clock_breakdown:
        WallClock(engine.events, device, every or 1)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, sharded, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config FILE` to a program's own arguments.

    Source: DeepSpeed API reference 1.1.1, "Argument Parsing".
    """
    group = parser.add_argument_group("DeepSpeed", "training configuration")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine (read by the program)")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    return parser


def _config(args: Any, config: Any, config_params: Any) -> Config:
    places = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in places.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"a configuration comes from one place: got {' and '.join(given)}; pass one of them")
    if not given:
        raise ConfigError(
            "an engine needs a configuration, and got none: pass config= (a dict or a path), or args with "
            "deepspeed_config (--deepspeed_config FILE)"
        )
    (source,) = given.values()
    return source if isinstance(source, Config) else Config.load(source)


def _device() -> torch.device:
    kind = device_type()
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


def _data_parallel(mpu: Any, device: torch.device) -> Communicator:
    if mpu is not None:
        return communicator(mpu.get_data_parallel_group())
    mesh = ParallelDims(get_world_size()).mesh(device.type)
    return communicator(mesh["dp"].get_group())


def _place(model: nn.Module, device: torch.device) -> None:
    """Moves the model to the device; what zero.Init has sharded is there already."""
    if not any(map(is_sharded, model.parameters())):
        model.to(device)
        return
    for parameter in model.parameters():
        if not is_sharded(parameter):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _parameter_dtype(model: nn.Module, config: Config) -> torch.dtype | None:
    """What the configuration gives parameters; None where it leaves them, or they are of several dtypes already."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return config.precision.parameters if len(kinds) == 1 else None


def _cast(model: nn.Module, dtype: torch.dtype, optimizer: torch.optim.Optimizer | None) -> None:
    """Gives the model its low precision, but for what the optimizer trains: masters want those digits first."""
    groups = [] if optimizer is None else optimizer.param_groups
    trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or id(parameter) in trained or parameter.dtype is dtype:
            continue
        if is_sharded(parameter):
            raise ConfigError(
                f"what zero.Init has built has its precision: {name!r} is {parameter.dtype} and the configuration "
                f"asks for {dtype}; give the configuration to zero.Init too: config_dict_or_path="
            )
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _optimizer(
    optimizer: Any, model: nn.Module, model_parameters: Any, config: Config, dtype: torch.dtype | None
) -> torch.optim.Optimizer | None:
    """The client's, or the configured one; `dtype` is what it will update."""
    if optimizer is None and config.optimizer is None:
        return None
    parameters = _parameters(model if model_parameters is None else model_parameters)
    if not parameters and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            "there is something to train: model_parameters is empty; pass model.parameters() (a generator that "
            "was used up before gives nothing)"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if callable(optimizer):
        made = optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"a callable optimizer returns a torch.optim.Optimizer: it returned {type(made).__name__}")
        return made
    if optimizer is not None:
        raise ValueError(
            "optimizer is a torch.optim.Optimizer or a callable that makes one: got "
            f"{type(optimizer).__name__}; leave it out to use the configuration's"
        )
    assert config.optimizer is not None
    return build_optimizer(config.optimizer.type, parameters, dict(config.optimizer.params), dtype)


def _parameters(given: Any) -> list[Any]:
    if isinstance(given, nn.Module):
        return list(given.parameters())
    wrong = given if isinstance(given, torch.Tensor | Mapping) or not isinstance(given, Iterable) else None
    parameters = [] if wrong is not None else list(given)
    wrong = next((each for each in parameters if not isinstance(each, torch.Tensor | dict | tuple)), wrong)
    if wrong is not None:
        raise ValueError(
            "model_parameters lists tensors, or groups as {'params': ...}: got "
            f"{type(wrong).__name__}; pass model.parameters()"
        )
    return parameters


def _scheduler(lr_scheduler: Any, optimizer: ShardedOptimizer | None, config: Config) -> Any:
    if lr_scheduler is None and config.scheduler is None:
        return None
    if optimizer is None:
        raise ValueError("a scheduler changes an optimizer's learning rate, and there is no optimizer; pass one")
    if lr_scheduler is None:
        assert config.scheduler is not None
        return build_scheduler(config.scheduler.type, optimizer, dict(config.scheduler.params))
    if isinstance(lr_scheduler, type) or (callable(lr_scheduler) and not hasattr(lr_scheduler, "step")):
        lr_scheduler = lr_scheduler(optimizer)
    if not hasattr(lr_scheduler, "step"):
        raise ValueError(
            f"lr_scheduler has a step(), or makes an object that has: got {type(lr_scheduler).__name__}; pass a "
            "scheduler, or a callable that returns one"
        )
    return lr_scheduler


def _check_scheduler(lr_scheduler: Any, config: Config) -> None:
    if lr_scheduler is None and config.scheduler is not None:
        check_scheduler(config.scheduler.type, config.scheduler.params)


def _share(model: nn.Module, sharded: ShardedOptimizer | None, comm: Communicator) -> None:
    """Rank 0's buffers, and parameters that no optimizer holds, go to every rank."""
    if comm.world == 1:
        return
    groups = [] if sharded is None else [*sharded.groups, *sharded.frozen_groups]
    held = {id(p) for group in groups for p in group.parameters}
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) in held or not tensor.numel():
                continue
            # An expanded tensor says one value many times.
            told = tensor.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]
            flat = told.contiguous()
            comm.broadcast(flat.view(-1).view(torch.uint8))  # as bytes: backends don't know every dtype
            if flat.data_ptr() != told.data_ptr():
                told.copy_(flat)
