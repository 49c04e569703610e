"""What swapping adds to one optimizer: its table, pipeline and phase, and the step that uses them."""

from __future__ import annotations

import operator
import os
from contextlib import ExitStack, nullcontext
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from swapckpt._torch import called_by_fake_step, disable_dynamo, local_of, spec_of, without_step_hooks
from swapckpt.broadcast import ParameterBroadcast
from swapckpt.errors import AdoptionError, GradientError, PhaseError, StateFailedError, StepError, listing
from swapckpt.fence import Gate, LeasingGate
from swapckpt.gathering import Gathering
from swapckpt.masters import masters_of
from swapckpt.memory import HostArena
from swapckpt.pipeline import Pipeline
from swapckpt.plan import Cut, Item, cut_batches, cut_nbytes
from swapckpt.replicas import Replicas
from swapckpt.slices import SlicedParam
from swapckpt.state import Slice, StateTable
from swapckpt.submesh import Submeshes, largest_shard_numel
from swapckpt.update import BatchedUpdate, is_local, refuse_flags, unhooked_step, why_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from swapckpt.config import SwapConfig
    from swapckpt.device import Device
    from swapckpt.gathering import MatrixOwner
    from swapckpt.layouts import Incoming
    from swapckpt.state import Batch
    from swapckpt.statedict import SwappedState


class Phase(Enum):
    """What may be called now."""

    IDLE = "idle"  # everything; the device holds no swapped state
    STEPPING = "stepping"  # nothing; state is travelling
    READING = "being read into"  # only the end of that load; whatever else comes finds that it failed
    LOADING = "loading"  # nothing; a state dict is being written into the mirrors
    REBINDING = "being rebound"  # nothing; new parameters are taking the place of old ones
    SHOWING = "showing the state of all ranks"  # exports; leave the window first
    FAILED = "failed"  # only a load inside recovery(); parameters and state may be torn


class Swap:
    """Everything swapping adds to one optimizer. Owned by the optimizer, holds no reference back to it."""

    def __init__(
        self,
        optimizer: Optimizer,
        config: SwapConfig,
        *,
        device: Device,
        names: Mapping[Tensor, str],
        replica_groups: Mapping[Tensor, ProcessGroup],
    ) -> None:
        self.config = config
        self.device = device
        self.original_class = type(optimizer)
        self.original_step = unhooked_step(optimizer)
        self.phase = Phase.IDLE
        self.failure: BaseException | None = None
        self.recovering = False
        self.names: dict[Tensor, tuple[str, ...]] = {param: (name,) for param, name in names.items()}
        self.arena = HostArena(device)
        self.table = StateTable(config, self.arena, device.device)
        self.gate: Gate = LeasingGate(
            partial(self.arena.allocate, own_slab=True),
            spare_nbytes=partial(_spare_budget_nbytes, config, self.table),
            timeout_secs=config.timeout_secs,
        )
        self.pipeline = Pipeline(self.table, device, config=config, gate=self.gate)
        self.sharing = _sharing(config, device, replica_groups) if config.shard_replicas else None
        self.incoming: Incoming | None = None
        self.hooks: list[RemovableHandle] = []
        self.load_hooks: list[RemovableHandle] = []
        self._subsets: list[list[tuple[int, list[Tensor]]]] = []
        self._known_groups: list[list[Tensor]] = []
        self._gathering: Gathering | None = None
        if config.gather_matrices and Gathering.concerns(self.original_class):
            self._gathering = Gathering(
                device, over_replicas=not config.shard_replicas, timeout_secs=config.timeout_secs
            )
        self._submeshes: Submeshes | None = None
        if config.shard_replicas and not is_local(self.original_class, config):
            self._submeshes = Submeshes(timeout_secs=config.timeout_secs)
        self._is_joint = False  # ranks that hold shards of one parameter communicate inside an update
        self._sliced: dict[int, SlicedParam] = {}  # by the index of their batch
        self._budget_nbytes = 0
        self._pid = os.getpid()

    # ------------------------------------------------------------------ phases

    def require_idle(self, action: str) -> None:
        """Raise unless ``action`` is legal now.

        Raises:
            StateFailedError: The state is torn and no recovery is under way.
            PhaseError: A step, load or rebind is running.
        """
        if self.phase is Phase.READING:
            self.fail(StateFailedError("a checkpoint was read into the state, and the load did not finish"))
        if self.phase is Phase.FAILED and not self.recovering:
            msg = (
                f"Cannot {action}: an earlier step or load failed midway ({self.failure}). Parameters and "
                "state may be torn. Restore both from a checkpoint: by `load()` of a Checkpointer that has "
                "both, or by other means inside `with swapckpt.recovery(...)`."
            )
            raise StateFailedError(msg) from self.failure
        if self.phase in (Phase.STEPPING, Phase.LOADING, Phase.REBINDING, Phase.SHOWING):
            msg = f"Cannot {action} while the optimizer is {self.phase.value}. Call it between steps."
            raise PhaseError(msg)

    def require_readable(self, action: str) -> None:
        """As ``require_idle``, for actions that change nothing: a window on the full state may be open."""
        if self.phase is not Phase.SHOWING:
            self.require_idle(action)

    def require_own_mirrors(self, action: str) -> None:
        """Raise in a forked child: mirrors are shared memory, and what it writes changes its parent's state.

        Raises:
            PhaseError: The optimizer had mirrors when the process was forked.
        """
        if self._pid == os.getpid():
            return
        if self.arena.reserved_nbytes:
            msg = (
                f"Cannot {action} in a forked process: the optimizer's mirrors are those of the parent. Call "
                "swapckpt.release(optimizer) and then swapckpt.swap_optimizer(optimizer) in this process."
            )
            raise PhaseError(msg)
        self._pid = os.getpid()

    def fail(self, error: BaseException) -> None:
        """Parameters or state are torn; the first cause is kept."""
        self.failure = self.failure or error
        self.phase = Phase.FAILED

    # ------------------------------------------------------------------ parameters

    def sync_params(self, optimizer: Optimizer) -> None:
        """Follow changes of ``param_groups``: new parameters become new batches, removed ones are not
        stepped."""
        groups = [group["params"] for group in optimizer.param_groups]
        if _same_params(groups, self._known_groups):
            return
        live = {param: index for index, params in enumerate(groups) for param in params}
        self._name_all(optimizer)
        everything = list(live)
        if self._gathering is not None or self._submeshes is not None:
            self._is_joint = any(spec_of(param) is not None for param in everything)
        if self.sharing is not None:
            replicas = self.sharing.replicas
            replicas.follow(everything)
            live = {param: group for param, group in live.items() if replicas.owns(param)}
        if self._gathering is not None:
            self._gathering.follow(live)
        known = self.table.entries
        fresh = [param for param in live if param not in known]
        self.table.keep(live, optimizer.state)
        self._add(fresh, live)
        self._subsets = self._group_subsets(optimizer)
        self._known_groups = [list(params) for params in groups]  # last: what failed is tried again
        kept = self.table.entries.keys() | set(everything)
        for param in [param for param in self.names if param not in kept]:
            del self.names[param]  # a name must not keep a parameter that is gone

    def _add(self, fresh: list[Tensor], groups: dict[Tensor, int]) -> None:
        items = [self._item(param) for param in fresh]
        if self._budget_nbytes == 0:
            max_batches = self.config.swap_times
        else:  # later additions: as many batches as keep them no larger than the first ones
            max_batches = max(1, -(-sum(item.nbytes for item in items) // self._budget_nbytes))
        cuts = cut_batches(items, max_batches, min_slice_numel=self.config.smallest_slice_numel)
        named = [(self.names[param][0], param, groups[param]) for param in fresh]
        for cut, batch in zip(cuts, self.table.add(named, [cut.items for cut in cuts]), strict=True):
            if cut.slices:
                self._sliced[batch.index] = SlicedParam(self.table, batch, cut.slices, config=self.config)
        largest = max((cut_nbytes(cut, items) for cut in cuts), default=0)
        self._budget_nbytes = max(self._budget_nbytes, largest)

    def _item(self, param: Tensor) -> Item:
        if self._is_joint:  # what ranks exchange follows the batches: the same cut on all of them
            numel = largest_shard_numel(param)
            return Item(numel, numel * param.element_size())
        local = local_of(param)
        return Item(local.numel(), local.nbytes, why_whole(self.original_class, local, self.config) is None)

    def cuts(self) -> Iterator[Cut]:
        """The batches that there are, as ranges over the parameters one after the other."""
        end = 0
        for batch in self.table.batches:
            items = range(end, end + len(batch.params))
            sliced = self._sliced.get(batch.index)
            yield Cut(items, sliced.ranges if sliced is not None and batch.params else ())
            end = items.stop

    def rebind(self, optimizer: Optimizer, new_of: Mapping[Tensor, Tensor]) -> None:
        """Let new parameters take the place of old ones, whose groups they are in already."""
        names = replace_keys(self.names, new_of)
        self.names.clear()  # in place: the state view shares it
        self.names.update(names)
        self.table.rebind(new_of)
        if self.sharing is not None:
            self.sharing.replicas.rebind(new_of)
        if self._gathering is not None:
            self._gathering.rebind(new_of)
        self._known_groups = [[new_of.get(param, param) for param in known] for known in self._known_groups]
        self._subsets = self._group_subsets(optimizer)

    def rename(self, names: Mapping[Tensor, tuple[str, ...]]) -> None:
        """Take the names (first one and aliases) of a model's parameters."""
        for param, known in self.names.items():
            self.names[param] = names.get(param, known)
        for param, entry in self.table.entries.items():
            entry.name = self.names[param][0]

    def matrix_owner(self, param: Tensor) -> MatrixOwner | None:
        """Who gathers ``param`` for its update; None where nobody does."""
        return None if self._gathering is None else self._gathering.owner_of(param)

    def _name_all(self, optimizer: Optimizer) -> None:
        """Give parameters a name that have none yet."""
        for group, fields in enumerate(optimizer.param_groups):
            named = fields.get("param_names")
            for position, param in enumerate(fields["params"]):
                if param not in self.names:
                    name = str(named[position]) if named else f"group{group}.param{position}"
                    self.names[param] = (name,)

    def _group_subsets(self, optimizer: Optimizer) -> list[list[tuple[int, list[Tensor]]]]:
        """Per batch the groups to narrow. Groups without parameters go along with the first batch."""
        subsets: list[dict[int, list[Tensor]]] = []
        for batch in self.table.batches:
            subset: dict[int, list[Tensor]] = {}
            for entry in batch.params:
                subset.setdefault(entry.group, []).append(entry.param)
            subsets.append(subset)
        used = {group for subset in subsets for group in subset}
        if subsets:
            subsets[0] |= {group: [] for group in range(len(optimizer.param_groups)) if group not in used}
        return [sorted(subset.items()) for subset in subsets]

    # ------------------------------------------------------------------ the step

    @disable_dynamo
    def step(self, optimizer: Optimizer, view: SwappedState, closure: Callable[[], object] | None) -> object:
        """One optimizer step through the pipeline. Returns the closure's loss."""
        self.require_idle("step")
        self.require_own_mirrors("step")
        if self.phase is Phase.FAILED:
            msg = "Cannot step inside recovery(): restore parameters and state first, then leave it."
            raise PhaseError(msg)
        if self.device.is_capturing():
            msg = "Cannot step while a graph is captured: replaying it would not swap. Step outside of it."
            raise PhaseError(msg)
        refuse_flags(optimizer)  # a load may have set one
        if self._is_fake_step(optimizer):
            view.bind_templates()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.sharing.all_or_none() if self.sharing is not None else nullcontext():
            view.settle_templates()
            view.follow()
            self.sync_params(optimizer)
            self._activate_gradients()
            if self.sharing is not None:
                self.sharing.begin([param for params in self._known_groups for param in params])
        self._run(optimizer)
        return loss

    def _is_fake_step(self, optimizer: Optimizer) -> bool:
        never_stepped = not optimizer.state
        return (
            never_stepped
            and all(not group.get("lr") for group in optimizer.param_groups)
            and called_by_fake_step()
        )

    def _activate_gradients(self) -> None:
        """Note which parameters have gradients, after checking all of them: an error here changes nothing.

        Raises:
            GradientError: Lists every parameter whose gradient is sparse or on another device or dtype.
        """
        offenders = []
        for batch in self.table.batches:
            batch.active = [entry for entry in batch.params if entry.param.grad is not None]
            for entry in batch.active:
                param, grad = entry.param, entry.param.grad
                if grad is None:
                    continue
                if grad.layout != torch.strided:
                    offenders.append(f"{entry.name}: {grad.layout}, expected a dense gradient")
                elif grad.device != param.device or grad.dtype != param.dtype:
                    expected = f"{param.dtype} on {param.device}"
                    offenders.append(f"{entry.name}: {grad.dtype} on {grad.device}, expected {expected}")
        if offenders:
            msg = f"{len(offenders)} gradients cannot be used; nothing was updated:{listing(offenders)}"
            raise GradientError(msg)

    def _update(self, optimizer: Optimizer, update: BatchedUpdate, batch: Batch) -> None:
        subset = self._subset(batch)
        if not self.config.master_weights and not self._is_joint:
            update.run(subset)
            return
        state = optimizer.state
        with ExitStack() as stack:
            stepped: dict[Tensor, Tensor | None] = {entry.param: entry.param for entry in batch.active}
            if self.config.master_weights:
                stepped |= stack.enter_context(masters_of(batch, state, self.device))
            if self._gathering is not None:
                stepped |= stack.enter_context(self._gathering.whole(stepped, state))
            if self._submeshes is not None:
                stepped |= stack.enter_context(self._submeshes.alone(stepped, state))
            update.run((group, list(_stood_in(params, stepped))) for group, params in subset)

    def _run(self, optimizer: Optimizer) -> None:
        self.phase = Phase.STEPPING
        sharing = self.sharing
        self.pipeline.updates_started = sharing is not None
        try:
            with (
                sharing.together(is_joint=self._is_joint) if sharing is not None else nullcontext(),
                without_step_hooks(optimizer),
                BatchedUpdate(optimizer, self.original_step) as update,
            ):

                def step_batch(batch: Batch) -> None:
                    self._update(optimizer, update, batch)
                    if sharing is not None:
                        sharing.advance(batch.completes)

                batches = self._batches(optimizer)
                self.pipeline.run(
                    optimizer.state, step_batch, batches=batches, with_others=sharing is not None
                )
                for sliced in self._sliced.values():
                    sliced.finish(optimizer.state)
                if sharing is not None and not self.table.batches:  # group fields advance here too
                    update.run([(group, []) for group in range(len(optimizer.param_groups))])
        except BaseException as error:
            for sliced in self._sliced.values():
                sliced.abandon(optimizer.state)
            self.phase = Phase.IDLE
            if self.pipeline.updates_started:
                self.fail(error)
            raise
        self.phase = Phase.IDLE

    def _batches(self, optimizer: Optimizer) -> list[Batch]:
        """What to run in this step: the table's batches, slices in the place of oversized parameters."""
        if not self._sliced:
            return self.table.batches
        batches: list[Batch] = []
        for batch in self.table.batches:
            sliced = self._sliced.get(batch.index)
            batches += [batch] if sliced is None else sliced.begin(optimizer, self.original_step)
        return batches

    def _subset(self, batch: Batch) -> list[tuple[int, list[Tensor]]]:
        """The groups to narrow, and to which parameters."""
        subset = self._subsets[batch.index]
        if not isinstance(batch, Slice):
            return subset
        (entry,) = batch.params
        return [(group, [entry.param] if group == entry.group else []) for group, _ in subset]

    def offload_existing(self, optimizer: Optimizer) -> None:
        """Move state that exists already into mirrors. On failure the bindings are as before."""
        before = {
            key: dict(values) if isinstance(values, dict) else values
            for key, values in optimizer.state.items()
        }
        for batch in self.table.batches:
            batch.active = [entry for entry in batch.params if optimizer.state.get(entry.param)]
        try:
            self.pipeline.run(optimizer.state, _no_update)
        except BaseException as error:
            optimizer.state.clear()  # update() alone would put what was dropped at the end
            optimizer.state.update(before)
            if not isinstance(error, StepError):
                raise
            msg = f"The optimizer's existing state could not be moved to the host: {error.__cause__}"
            raise AdoptionError(msg) from error


def _stood_in(params: Iterable[Tensor], standins: Mapping[Tensor, Tensor | None]) -> Iterator[Tensor]:
    """What to step in the place of ``params``: None stands for what another rank steps."""
    for param in params:
        standin = standins.get(param, param)
        if standin is not None:
            yield standin


def _sharing(config: SwapConfig, device: Device, groups: Mapping[Tensor, ProcessGroup]) -> ParameterBroadcast:
    replicas = Replicas(group_size=config.replica_group_size, groups=groups, timeout_secs=config.timeout_secs)
    return ParameterBroadcast(
        replicas, device, bucket_nbytes=config.replica_bucket_nbytes, timeout_secs=config.timeout_secs
    )


Value = TypeVar("Value")


def replace_keys(values: Mapping[Tensor, Value], new_of: Mapping[Tensor, Tensor]) -> dict[Tensor, Value]:
    """The same values in the same order, under the new parameters."""
    return {new_of.get(param, param): value for param, value in values.items()}


def _same_params(groups: list[list[Tensor]], known: list[list[Tensor]]) -> bool:
    """True when both hold the same parameters in the same places. Runs in every step: identity, no
    hashing."""
    return [len(params) for params in groups] == [len(params) for params in known] and all(
        all(map(operator.is_, params, others)) for params, others in zip(groups, known, strict=True)
    )


def _spare_budget_nbytes(config: SwapConfig, table: StateTable) -> int:
    return config.spare_nbytes if config.spare_nbytes is not None else 2 * table.largest_batch_nbytes


def _no_update(batch: Batch) -> None:
    """Adoption moves existing state through the pipeline without updating anything."""


def load_into(swaps: Sequence[Swap], restore: Callable[[], None]) -> None:
    """Run ``restore`` in Phase LOADING: IDLE after it, FAILED if it raises."""
    for swap in swaps:
        swap.require_own_mirrors("load")
    for swap in swaps:
        swap.phase = Phase.LOADING
    try:
        restore()
    except BaseException as error:
        for swap in swaps:
            swap.failure = None
            swap.fail(error)
        raise
    for swap in swaps:
        swap.phase, swap.failure = Phase.IDLE, None
