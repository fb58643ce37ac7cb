"""ShardedOptimizer: ZeRO's stages around any torch optimizer.

A step is: gradients reduced into shards → one norm over all ranks → the optimizer updates this rank's
pieces → updated shards gathered into the parameters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_comm import Communicator, ShardSpec
from ds_zero.admission import check_optimizer
from ds_zero.agreement import Agreement, agree
from ds_zero.config import ZeroConfig
from ds_zero.errors import ZeroError
from ds_zero.fetch_plan import plan_units
from ds_zero.fetcher import Fetcher
from ds_zero.intake import Intake, Terms
from ds_zero.layout import Cut
from ds_zero.policy import ShardPolicy
from ds_zero.reducer import Reducer
from ds_zero.shard_group import ReductionOptions, ShardGroup
from ds_zero.state_access import register_owner, release_owner

# Larger groups add nothing on the wire and cost memory; on a CPU, smaller ones stay in the cache.
_MOST_ELEMENTS = {"cpu": 4 << 20}
_MOST_ELEMENTS_ACCELERATOR = 64 << 20


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        applied: False where gradients were not finite and the step was left out.
        grad_norm: 2-norm of the averaged gradient before clipping, over all ranks; a scalar tensor, so that
            nobody waits for a GPU who doesn't read it.
    """

    applied: bool
    grad_norm: torch.Tensor


class ShardedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer` so that its states, and the gradients, are shared out over the data-parallel ranks.

    Use it as an optimizer: after `loss.backward()`, `step()`. Its `param_groups` are the wrapped
    optimizer's, so schedulers work on either; their `params` are this rank's pieces.

    Args:
        optimizer: over the model's parameters; its lists of parameters are replaced by this rank's pieces.
        named_parameters: names for messages and checkpoints, as `model.named_parameters()`.
        comm: the data-parallel ranks. Parameters are copied from its rank 0.
        config: stage and options. Default: stage 0.
        cut: where shards may cut. `Cut.ANYWHERE` where the optimizer's update is elementwise,
            `Cut.BETWEEN` where it must see whole parameters. Default: between.
        parameter_dtype: dtype that the parameters get. Default: the one they have.
        master_dtype: dtype of the values that the optimizer updates, beside parameters of lower precision;
            None updates the parameters themselves. Default: None.
        gradient_dtype: dtype in which micro-batches are added up. Default: the parameters'.
        communication_dtype: dtype of gradients on the wire. Default: the parameters'.
        prescale_gradients: divide by the number of ranks before the sum rather than after. Default: false.
        gradient_predivide_factor: with prescaling off, the part of the division done before. Default: 1.
        average: over ranks; False sums. Default: true.
        module: the model, all of whose parameters are sharded in stage 3, the frozen ones too. Not needed below.

    Raises:
        ValueError: the optimizer has no parameter that requires a gradient, or can't work on shards, or stage 3
            has no module.
        ZeroError: a parameter is complex, shares memory with another, or another ShardedOptimizer holds it; or
            ranks have other parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        comm: Communicator,
        config: ZeroConfig | None = None,
        *,
        cut: Cut = Cut.BETWEEN,
        parameter_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        communication_dtype: torch.dtype | None = None,
        prescale_gradients: bool = False,
        gradient_predivide_factor: float = 1.0,
        average: bool = True,
        module: nn.Module | None = None,
    ):
        check_optimizer(optimizer)
        self.inner = optimizer
        super().__setstate__({})  # the base class's hooks; parameters and states stay the wrapped one's
        self.config = config = config or ZeroConfig()
        self.policy = ShardPolicy.of_stage(config.stage)
        self.comm = comm
        if not self.policy.optimizer_states:
            cut = Cut.NOWHERE
        elif config.round_robin_gradients:
            cut = Cut.ROUND_ROBIN
        predivide = float(comm.world) if prescale_gradients else gradient_predivide_factor
        self._options = ReductionOptions(
            reduce_scatter=config.reduce_scatter,
            all_gather=config.allgather_partitions,
            dtype=communication_dtype,
            accumulate_dtype=gradient_dtype,
            pre_scale=1.0 / predivide,
        )
        self.reduce_now: Callable[[], bool] = lambda: True
        """Asked when a backward begins: is it reduced, or only collected?"""
        self.num_accumulated = 1
        """Micro-batches that one step averages over. The engine sets it."""
        self.loss_scale = 1.0
        """What losses were multiplied by; gradients are divided by it."""
        self.carried_scale: Callable[[], float] = lambda: self.loss_scale
        """Asked when a backward begins: what its own loss was multiplied by. It may be another engine's."""
        self.notify: Callable[[bool], None] = lambda running: None
        """Told when a backward that nobody announced is first seen (True) and has ended (False)."""
        self._divisor = comm.world if average else 1
        self.reducer = Reducer(
            comm,
            bool(config.overlap_comm),
            lambda: self.reduce_now(),
            lambda running: self.loss_scale / (self.carried_scale() if running else 1.0),
            lambda running: self.notify(running),
        )
        if self.policy.gradients:
            self.reducer.most_in_flight = 2
        self.fetcher: Fetcher | None = None
        """Gathers parameters for use, in stage 3."""
        if self.policy.parameters and module is None:
            raise ValueError("stage 3 gathers parameters around their modules' forward: module is None; pass module=")
        if self.policy.parameters and module is not None and comm.world > 1:
            self.fetcher = self._make_fetcher(module)
        me = weakref.ref(self)

        def register(parameter: nn.Parameter, group: int, slot: int) -> None:
            if (alive := me()) is not None:
                register_owner(parameter, alive, group, slot)

        self._intake = Intake(
            optimizer,
            {id(p): name for name, p in named_parameters},
            comm,
            Terms(cut, self._most_elements(), parameter_dtype, master_dtype, self._options),
            self.reducer,
            self.fetcher,
            dict(module.named_parameters()) if module is not None else {},
            register,
        )
        try:
            self._intake.take_over()
        except BaseException:
            if self.fetcher is not None:
                self.fetcher.close()
            raise

    # The wrapped optimizer's own lists: schedulers and users see one set, whichever they hold.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups; `params` are this rank's pieces."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's states, by piece."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.inner.defaults

    @property
    def groups(self) -> list[ShardGroup]:
        """The shard groups, in the order of their reductions."""
        return self.reducer.groups

    @property
    def frozen_groups(self) -> list[ShardGroup]:
        """In stage 3, the groups of what is not trained."""
        return self._intake.frozen

    def specs(self) -> list[ShardSpec]:
        """The pieces of parameters that this rank updates."""
        return [piece.spec for group in self.groups for piece in group.pieces]

    def _make_fetcher(self, module: nn.Module) -> Fetcher:
        config = self.config
        plan = plan_units(
            module,
            max(min(config.prefetch_bucket_size, config.max_live_parameters), 1),
            config.param_persistence_threshold,
            config.model_persistence_threshold,
        )
        self.reducer.paced = True
        fetcher = Fetcher(module, plan, config, self.reducer.complete)
        self.reducer.on_end = fetcher.end_backward
        return fetcher

    def _most_elements(self) -> int:
        """Of a group."""
        if not self.config.contiguous_gradients:
            return 1  # every parameter on its own
        device = next((p.device.type for group in self.inner.param_groups for p in group["params"]), "cpu")
        most = _MOST_ELEMENTS.get(device, _MOST_ELEMENTS_ACCELERATOR)
        return min(self.config.reduce_bucket_size, self.config.allgather_bucket_size, most)

    def prepare(self) -> None:
        """Before a forward pass in training: takes in parameters that were frozen and require a gradient now.

        Every rank unfreezes the same parameters before the same pass. What a backward that was broken off
        by an exception has left is forgotten.
        """
        self.reducer.drop_stale()
        self._intake.admit()

    def watch(self, outputs: Any) -> None:
        """After a forward pass in training: lets a plain backward of what it gave out be known as one."""
        self.reducer.watch(outputs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch's optimizers do: to train layers later, say. Collective.

        Raises:
            ZeroError: a parameter is complex, or an optimizer holds it already.
        """
        params = param_group["params"]
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        index = len(self.inner.param_groups)
        listed: list[tuple[int, Any]] = [(index, p[1] if isinstance(p, tuple) else p) for p in given]
        self._intake.check(listed)
        self.inner.add_param_group({**param_group, "params": given})  # torch checks them, and fills in defaults
        self.inner.param_groups[index]["params"] = []
        self._intake.add(listed)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Of the wrapped optimizer, whose states they are; the same for the three below."""
        return self.inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """See `register_state_dict_pre_hook`."""
        return self.inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """See `register_state_dict_pre_hook`."""
        return self.inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """See `register_state_dict_pre_hook`."""
        return self.inner.register_load_state_dict_post_hook(hook, prepend)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's: the states of this rank's pieces."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave on this rank, in the same world."""
        self.inner.load_state_dict(state_dict)

    @property
    def pre_scale(self) -> float:
        """What gradients are multiplied by before they are summed over ranks."""
        return self._options.pre_scale

    @property
    def scale(self) -> float:
        """What a reduced gradient is multiplied by to be the average of one sample's unscaled gradient."""
        return 1.0 / (self._divisor * self._options.pre_scale * self.num_accumulated * self.loss_scale)

    def step(  # type: ignore[override]
        self, closure: None = None, *, max_norm: float = 0.0, skip_nonfinite: bool = False
    ) -> StepReport:
        """Reduces what is left, clips, updates, and gathers. Collective.

        Args:
            closure: must be None: a closure would run backward again inside the step.
            max_norm: gradients are scaled down to this 2-norm; 0 leaves them. Default: 0.
            skip_nonfinite: leave the step out where a gradient is inf or nan (fp16). Default: false.

        Raises:
            ZeroError: a parameter was not used and the configuration forbids it.
        """
        if closure is not None:
            raise ValueError("step() takes no closure: gradients are reduced during backward; call backward first")
        self.prepare()
        if self.fetcher is not None:
            self.fetcher.end_backward()
        for group in self.groups:
            group.reclaim()
        self.reducer.finish()
        agreement = self._agree()
        norm = agreement.square.sqrt() * self.scale
        applied = not (skip_nonfinite and not math.isfinite(float(norm)))
        if applied:
            self._update(norm, agreement.users, max_norm)
        self.reducer.clear()
        return StepReport(applied, norm.float())

    def _agree(self) -> Agreement:
        try:
            return agree(
                self.reducer,
                self.comm,
                counted_once=not self.policy.optimizer_states,
                unused_allowed=self.config.ignore_unused_parameters,
            )
        except ZeroError:
            self.reducer.clear()
            raise

    @torch.no_grad()
    def _update(self, norm: torch.Tensor, users: torch.Tensor, max_norm: float) -> None:
        known: list[float] | None = None
        first = 0
        for number, group in enumerate(self.groups):

            def used(slot: int, number: int = number, first: int = first) -> bool:
                nonlocal known
                if (number, slot) in self.reducer.used:
                    return True
                if known is None:  # only a rank that missed a parameter has to wait for the answer
                    known = users.tolist()
                return known[first + slot] > 0

            group.hand_gradients(used)
            first += len(group.parameters)
        factor = torch.full_like(norm, self.scale)
        if max_norm > 0:
            factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if hasattr(self.inner, "grad_norm"):  # one that limits the norm itself sees its pieces only
            self.inner.grad_norm = norm * factor / self.scale
        self._scaled_step(factor.float())
        overlap = self.groups[0].device.type != "cpu"  # a CPU has nothing to do meanwhile
        works = [group.publish(async_op=overlap) for group in self.groups]
        for work in works:
            if work is not None:
                work.wait()

    def _scaled_step(self, factor: torch.Tensor) -> None:
        """Updates with gradients times `factor`: in the optimizer's own pass where it can, else before it."""
        if getattr(self.inner, "_step_supports_amp_scaling", False) and all(
            group.get("fused") for group in self.inner.param_groups
        ):
            # torch's fused kernels divide by grad_scale on the way, as for torch.amp.GradScaler.
            self.inner.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
            self.inner.found_inf = torch.zeros_like(factor)  # type: ignore[attr-defined]
            try:
                self.inner.step()
            finally:
                del self.inner.grad_scale, self.inner.found_inf  # type: ignore[attr-defined]
            return
        for group in self.groups:
            if group.reduced is not None:
                group.reduced.mul_(factor.to(group.reduced.dtype) if group.reduced.is_cpu else factor)
        self.inner.step()

    def adopt_values(self) -> None:
        """Takes what was written into the parameters from outside as the new values to update.

        Sharded parameters are gathered then: it stands inside `with GatheredParameters(...)`.
        """
        for group in (*self.groups, *self.frozen_groups):
            group.adopt_gathered()
            if group.master is not group.shard:
                group.master.copy_(group.shard)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, reduced or not. `step` has done it already."""
        self.reducer.clear()

    def close(self) -> None:
        """Takes the hooks off and gives the parameters storage of their own. The wrapped optimizer is spent."""
        self.reducer.close()
        if self.fetcher is not None:
            self.fetcher.close()
        for group in (*self.groups, *self.frozen_groups):
            group.release()
            for parameter in group.parameters:
                release_owner(parameter)
        for each in self.inner.param_groups:
            each["params"] = []
        self.inner.state.clear()
        self.reducer.groups = []
        self._intake.close()
