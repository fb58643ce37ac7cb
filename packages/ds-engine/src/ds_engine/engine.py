"""Engine: a model, its sharded optimizer, its schedule and its precision, behind forward, backward and step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ds_comm import Communicator
from ds_engine.batch import BatchSizes
from ds_engine.config import DTYPES, Config
from ds_engine.dataloader import DistributedLoader
from ds_engine.errors import ConfigError, EngineError
from ds_engine.events import Event, Events
from ds_engine.getters import Getters
from ds_engine.precision import LossScaler
from ds_engine.progress import logger
from ds_engine.scaling import CARRIED
from ds_zero import GatheredParameters, ShardedOptimizer

_LATER = {"save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model", "eigenvalue", "flops_profiler"}
"""Documented names that later versions bring."""


def _closed() -> NoReturn:
    raise EngineError("an engine works until it is destroyed: destroy() was called; call initialize() again")


class Engine(Getters, nn.Module):
    """Trains one model. Made by `initialize`.

    A micro-batch is `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`; every
    `gradient_accumulation_steps`-th step updates the parameters, the others only count. `loss.backward()`
    does the same as `engine.backward(loss)`; in fp16 it leaves out the loss scale, which keeps small gradients
    from becoming zero, and a warning says so.

    Source: DeepSpeed API reference 2.1, "Training API".
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        batch: BatchSizes,
        comm: Communicator,
        device: torch.device,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        loss_scaler: LossScaler,
    ):
        super().__init__()
        self.module = module
        self.config, self._batch, self.comm, self.device = config, batch, comm, device
        self.optimizer, self.lr_scheduler, self.loss_scaler = optimizer, lr_scheduler, loss_scaler
        self.training_dataloader: DistributedLoader | None = None
        self.events = Events()
        self.micro_steps = 0
        """Calls of `step` so far."""
        self.global_steps = 0
        """Boundaries so far, with those left out for overflow."""
        self.global_samples = 0
        """Samples that all ranks have trained on."""
        self.skipped_steps = 0
        """Boundaries left out for overflow."""
        self._grad_norm: torch.Tensor | None = None
        self._applied = False
        self._collected = 0  # micro-batches since the last boundary
        self._boundary: bool | None = None  # what set_gradient_accumulation_boundary says
        self._no_sync = False
        self._warned = False  # of a backward without the loss scale
        self._destroyed = False
        self._inputs_dtype = config.precision.inputs
        self._autocast_dtype = DTYPES[config.torch_autocast.dtype] if config.torch_autocast.enabled else None
        if optimizer is not None:
            optimizer.reduce_now = self._reduces_now
            optimizer.carried_scale = self._carried_scale
            optimizer.notify = self._plain_backward
            optimizer.reducer.on_broken = self._start_over
            optimizer.loss_scale = loss_scaler.scale
            optimizer.num_accumulated = batch.accumulation

    # The micro-batch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass."""
        self._check_alive()
        learns = self.training and torch.is_grad_enabled()
        if learns and self.optimizer is not None:
            self.optimizer.prepare()
        if learns:
            self.events.emit(Event.BEFORE_FORWARD, self)
        if self._inputs_dtype is not None:
            args, kwargs = tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        if self._autocast_dtype is None:
            outputs = self.module(*args, **kwargs)
        else:
            with torch.autocast(self.device.type, self._autocast_dtype):
                outputs = self.module(*args, **kwargs)
        if self.optimizer is not None and torch.is_grad_enabled():
            self.optimizer.watch(outputs)
        if learns:
            self.events.emit(Event.AFTER_FORWARD, self)
        return outputs

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._inputs_dtype) if tensor.is_floating_point() else tensor

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Runs backward, averages over micro-batches, and at the boundary starts the reduction.

        Args:
            loss: a scalar, of one micro-batch.
            retain_graph: keep the graph for another backward. Default: false.
            scale_wrt_gas: divide by the number of micro-batches; False where the loss was divided already.
                Default: true.

        Returns:
            The loss as it was given.

        Where it fails, all gradients of the step are forgotten, those of earlier micro-batches too: the step
        begins anew with the next backward. So it does after a `loss.backward()` that failed.

        Raises:
            EngineError: the loss is not a scalar, or carries no gradient.
        """
        self._check_alive()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise EngineError(f"backward takes one number, the loss: got {got}; take its mean() or sum()")
        if not loss.requires_grad:
            raise EngineError(
                "the loss must depend on parameters that require gradients, and does not; compute it from the "
                "engine's output, outside torch.no_grad()"
            )
        self.events.emit(Event.BEFORE_BACKWARD, self)
        scale = self.loss_scaler.scale
        scaled = loss if scale == 1.0 else loss * scale
        optimizer = self.optimizer
        # What was divided by the micro-batches already carries so much less.
        with CARRIED.set(scale if scale_wrt_gas else scale / self._batch.accumulation):
            if optimizer is None:
                scaled.backward(retain_graph=retain_graph)
            else:
                try:
                    with optimizer.reducer.round():
                        scaled.backward(retain_graph=retain_graph)
                except BaseException:
                    self._start_over()
                    raise
        self.events.emit(Event.AFTER_BACKWARD, self)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Counts a micro-batch; at the accumulation boundary updates the parameters and the learning rate.

        A rank that ran no backward in the whole step counts as a gradient of zero; where none did, parameters
        stay as they are. Backwards that reduce are collective (under stage 2 all of them, else that of the
        boundary), as with several engines every `engine.backward` is: ranks run equally many.

        Args:
            lr_kwargs: arguments for the scheduler's step. Default: none.

        Raises:
            EngineError: there is no optimizer, or it is called inside `no_sync` or after `destroy`.
        """
        self._check_alive()
        if self.optimizer is None:
            raise EngineError(
                "step() needs an optimizer, and initialize() was given none; pass optimizer=, or add an "
                '"optimizer" section to the configuration'
            )
        if self._no_sync:
            raise EngineError("step() averages over ranks, which no_sync() puts off; call it after the with block")
        if self.is_gradient_accumulation_boundary():
            self._step(self.optimizer, lr_kwargs or {})
            self._collected = 0
        else:
            self._collected += 1
        self.micro_steps += 1

    def _step(self, optimizer: ShardedOptimizer, lr_kwargs: dict[str, Any]) -> None:
        self.events.emit(Event.BOUNDARY, self)
        scaler = self.loss_scaler
        report = optimizer.step(max_norm=self.config.gradient_clipping, skip_nonfinite=scaler.active)
        self._grad_norm, self._applied = report.grad_norm, report.applied
        if scaler.active:
            scaler.update(overflow=not report.applied)
            optimizer.loss_scale = scaler.scale
        if report.applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        else:
            self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self._batch.train
        self.events.emit(Event.AFTER_STEP, self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside collect gradients on this rank and reduce nothing, under every stage.

        The first backward outside, or `step`, sends them all. While they wait, they take the memory of
        whole gradients.
        """
        if self._no_sync:
            raise EngineError("no_sync() is already on: blocks don't nest; leave the outer one first")
        self._no_sync = True
        try:
            yield
        finally:
            self._no_sync = False

    def _reduces_now(self) -> bool:
        """Asked when a backward begins: sharded gradients are reduced in each, others at the boundary."""
        assert self.optimizer is not None
        return not self._no_sync and (self.optimizer.policy.gradients or self.is_gradient_accumulation_boundary())

    def _start_over(self) -> None:
        self._collected = 0

    def _plain_backward(self, begins: bool) -> None:
        self.events.emit(Event.BEFORE_BACKWARD if begins else Event.AFTER_BACKWARD, self)

    def _carried_scale(self) -> float:
        """Asked when a backward begins: what its loss was multiplied by."""
        if CARRIED.scale is None and self.loss_scaler.scale != 1.0 and not self._warned:
            self._warned = True
            logger.warning(
                "loss.backward() leaves out the loss scale of fp16: gradients are right, but those too small for "
                "float16 become zero; engine.backward(loss) keeps them"
            )
        return CARRIED.scale or 1.0

    def is_gradient_accumulation_boundary(self) -> bool:
        """The micro-batch under way is the last of its step: `step` will update the parameters."""
        if self._boundary is not None:
            return self._boundary
        return self._collected + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says by hand whether the micro-batch under way is the last of its step; None counts again."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients. `step` has done it already."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        else:
            super().zero_grad(set_to_none)

    def destroy(self) -> None:
        """Takes hooks and sharded storage off the model, which can be used and initialised again."""
        if self.optimizer is not None and not self._destroyed:
            self.optimizer.close()
            # They lead back here: without them the model goes with its last name, and not some time later.
            self.optimizer.reduce_now = self.optimizer.carried_scale = _closed
            self.optimizer.notify = lambda begins: None
            self.optimizer.reducer.on_broken = lambda: None
        self._destroyed = True

    def _check_alive(self) -> None:
        if self._destroyed:
            _closed()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches a step, so that a step takes `train_batch_size` samples.

        Raises:
            ConfigError: it is not a multiple of micro-batch x ranks.
            EngineError: micro-batches of a step are under way.
        """
        if self._collected:
            raise EngineError(
                f"a step keeps its size: {self._collected} of {self._batch.accumulation} micro-batches are done; "
                "change the batch size after the step"
            )
        self._batch = BatchSizes.solve(train_batch_size, self._batch.micro, None, self.dp_world_size)
        if self.optimizer is not None:
            self.optimizer.num_accumulated = self._batch.accumulation

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples of a micro-batch; accumulation stays."""
        self._batch = BatchSizes.solve(None, micro_batch_size, self._batch.accumulation, self.dp_world_size)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool | None = None,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int = 0,
    ) -> DistributedLoader:
        """A loader of this rank's share of `dataset`; see `DistributedLoader`.

        Args:
            dataset: map-style or iterable.
            batch_size: samples a micro-batch. Default: the configuration's.
            route: "train", or "eval" or "predict", which don't shuffle. Default: train.
            pin_memory: page-locked batches. Default: where there is an accelerator.
            data_sampler: which samples this rank takes. Default: its share of all.
            collate_fn: makes a batch of samples. Default: torch's.
            num_local_io_workers: processes that load. Default: none.
        """
        if route not in ("train", "eval", "predict"):
            raise ConfigError(f"a loader's route is train, eval or predict: got {route!r}")
        return DistributedLoader(
            dataset,
            batch_size or self._batch.micro,
            self.comm.rank,
            self.comm.world,
            collate_fn,
            self.config.dataloader_drop_last,
            shuffle=route == "train",
            sampler=data_sampler,
            num_workers=num_local_io_workers,
            pin_memory=self.device.type != "cpu" if pin_memory is None else pin_memory,
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state_dict: the same keys as without an engine.

        In stage 3 collective, and a copy of all values on every rank.
        """
        if self.config.zero_optimization.stage < 3:
            return self.module.state_dict(*args, **kwargs)
        with GatheredParameters(self.module):
            found = self.module.state_dict(*args, **kwargs)
            for name, value in found.items():
                if isinstance(value, torch.Tensor):
                    found[name] = value.detach().clone()
            return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """The model's own, and the masters follow. Every rank loads the same values.

        What is loaded is all there is: digits that a master had beyond its parameter's precision are of the values
        that are gone.

        Raises:
            EngineError: `assign` would put other parameters in the place of those that are trained.
        """
        if assign and self.optimizer is not None:
            raise EngineError(
                "values are copied into the parameters that the engine trains: assign=True would replace them; "
                "leave it out, or load before initialize()"
            )
        with GatheredParameters(self.module):
            result = self.module.load_state_dict(state_dict, strict=strict, assign=assign)
            if self.optimizer is not None:
                self.optimizer.adopt_values()
        return result

    def __getattr__(self, name: str) -> Any:
        """What the engine hasn't, the model may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and hasattr(modules["module"], name):
                return getattr(modules["module"], name)
            if name in _LATER:
                raise AttributeError(f"engine.{name} is documented but not available in this version") from None
            raise AttributeError(
                f"neither the engine nor its model ({type(modules.get('module')).__name__}) has {name!r}"
            ) from None
