"""StateManager: the DCP Stateful of a model's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from swapckpt._torch import local_of
from swapckpt.config import SwapConfig, require_bool, require_instance, require_int, require_positive
from swapckpt.device import device_for
from swapckpt.errors import ConfigError, FqnError, listing
from swapckpt.foreign import FusedBroadcast, StateBroadcast, published
from swapckpt.fqn import named_parameters
from swapckpt.fullstate import shown_in_full, stream
from swapckpt.layouts import Incoming, flat_layout, nested_layout
from swapckpt.optimizer import (
    abandon,
    adopt,
    drop_elsewhere,
    is_swapped,
    recovery,
    swap_of,
    swapped_state,
)
from swapckpt.plan import Cut
from swapckpt.rebinding import Replacement
from swapckpt.replicas import data_parallel_groups
from swapckpt.report import SwapReport, WholeMatrix, build_report, footprint, measure_gbps
from swapckpt.snapshot import Snapshot, host_copy
from swapckpt.statedict import LiveState, StateView
from swapckpt.swap import Phase, Swap, load_into
from swapckpt.trace import Timeline
from swapckpt.update import unhooked_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from swapckpt.device import Device


FULL_STATE_BUFFER_NBYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Accounted bytes of swapped state, now and at the peak since the last ``reset_peak_memory``."""

    device_nbytes: int
    device_peak_nbytes: int
    host_nbytes: int
    host_peak_nbytes: int


class StateManager:
    """Owns the state of one or several optimizers over one model and speaks ``Stateful`` to DCP.

    ``manager`` can be registered wherever DCP takes a ``Stateful``: ``dcp.save({"optimizer": manager},
    ...)``. What DCP saves are the mirrors themselves; what it loads goes straight into them. Nothing is
    copied, no device is touched, and no optimizer is ever stepped to find out what its state looks like.

    Args:
        model: The module that gives parameters their names (FQNs), wrapped or not.
        optimizer: One optimizer, or a mapping of name to optimizer over disjoint parameters.
        config: How to swap; None leaves the optimizers unadopted: same export and load, no step overhead.
        flat: Export stock's flattened layout instead of the nested one. Loading accepts both.
        device: Device to swap through; default the parameters' own.
        state_broadcasts: By name of an optimizer that shares its state among ranks itself: how. Optimizers
            with ``_broadcast_state_fused_for_ckpt`` are recognised.

    Raises:
        AdoptionError: An optimizer cannot be adopted; none is then.
        FqnError: A parameter is not in ``model``, or two optimizers hold the same one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        config: SwapConfig | None = None,
        *,
        flat: bool = False,
        device: Device | None = None,
        state_broadcasts: Mapping[str, StateBroadcast] | None = None,
    ) -> None:
        require_instance("model", model, nn.Module)
        self.model = model
        self.optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
        if not self.optimizers:
            msg = "optimizer must be an optimizer or a mapping of at least one name to an optimizer, got {}."
            raise ConfigError(msg)
        for name, each in self.optimizers.items():
            require_instance(f"optimizer {name!r}", each, Optimizer)
        require_bool("flat", flat)
        if config is not None:
            require_instance("config", config, SwapConfig)
        self.flat = flat
        self._config = config if config is not None else SwapConfig()
        self._names = named_parameters(model)
        self._check_ownership(self._names)
        self._unswapped: dict[Optimizer, LiveState] = {}
        self._broadcasts = self._foreign(state_broadcasts or {})
        adopted: list[Optimizer] = []
        groups = data_parallel_groups(model) if self._config.shard_replicas else {}
        try:
            for each in self.optimizers.values():
                if config is not None:
                    adopt(each, config, device=device, replica_groups=groups)
                    adopted.append(each)
                self._view(each)
        except BaseException:
            for each in adopted:  # all or none
                abandon(each)
            raise
        for each in adopted:
            drop_elsewhere(each)

    def _foreign(self, given: Mapping[str, StateBroadcast]) -> dict[Optimizer, StateBroadcast]:
        unknown = sorted(given.keys() - self.optimizers.keys())
        if unknown:
            msg = f"state_broadcasts names {unknown}; the optimizers are {sorted(self.optimizers)}."
            raise ConfigError(msg)
        known: dict[Optimizer, StateBroadcast] = {
            each: FusedBroadcast(each) for each in self.optimizers.values() if FusedBroadcast.fits(each)
        }
        return known | {self.optimizers[name]: each for name, each in given.items()}

    def _view(self, optimizer: Optimizer) -> StateView:
        view = self._own_view(optimizer)
        view.foreign = self._broadcasts.get(optimizer)
        return view

    def _own_view(self, optimizer: Optimizer) -> StateView:
        if is_swapped(optimizer):
            swap_of(optimizer).rename(self._names)
            return swapped_state(optimizer)
        if optimizer not in self._unswapped:
            self._unswapped[optimizer] = LiveState(optimizer, unhooked_step(optimizer), self._names)
        return self._unswapped[optimizer]

    @property
    def _views(self) -> list[StateView]:
        # Asked anew each time: an optimizer may have been adopted or released since the last call.
        return [self._view(each) for each in self.optimizers.values()]

    def _check_ownership(self, names: Mapping[Tensor, tuple[str, ...]]) -> None:
        """Every parameter has a name, and one owner.

        Raises:
            FqnError: Lists all offenders.
        """
        owners: dict[Tensor, str] = {}
        problems = []
        for owner, optimizer in self.optimizers.items():
            for index, group in enumerate(optimizer.param_groups):
                for position, param in enumerate(group["params"]):
                    if param not in names:
                        where = f"optimizer {owner!r}, group {index}, parameter {position}"
                        problems.append(f"{where}, shape {list(param.shape)}: not a parameter of the model")
                    elif param in owners:
                        name = names[param][0]
                        problems.append(f"{name}: held by optimizers {owners[param]!r} and {owner!r}")
                    owners[param] = owner
        if problems:
            msg = f"{len(problems)} parameters cannot be named:{listing(problems)}"
            raise FqnError(msg)

    def swaps(self) -> list[Swap]:
        """What swapping adds to each optimizer that is adopted now."""
        return [swap_of(each) for each in self.optimizers.values() if is_swapped(each)]

    def _require_idle(self, action: str) -> None:
        for swap in self.swaps():
            swap.require_idle(action)

    def _sync(self) -> None:
        """Follow parameters and groups that were added since the last call."""
        names = named_parameters(self.model)
        self._check_ownership(names)
        self._rename(names)
        for optimizer in self.optimizers.values():
            if is_swapped(optimizer):
                swap_of(optimizer).sync_params(optimizer)

    def _rename(self, names: Mapping[Tensor, tuple[str, ...]]) -> None:
        self._names.clear()  # in place: views share it, and a parameter that was replaced must lose its name
        self._names.update(names)

    def rebind(self, new_to_old: Mapping[Tensor, Tensor], *, model: nn.Module | None = None) -> None:
        """Let new parameter objects take the place of old ones, in all optimizers and their state.

        For use after the model's parameters were replaced, for example by wrapping it anew. Call it between
        steps. State, mirrors, group settings, batches and the order of everything stay as they are, and no
        value is copied: the new parameters hold the right values already. Either all of ``new_to_old`` is
        done or nothing; after an error it can be called again.

        Args:
            new_to_old: Every replaced parameter: the new object and the one whose place it takes. Both have
                the same shape, strides, dtype, device and placements.
            model: The module that names the parameters from now on; default the same as before.

        Raises:
            RebindError: Lists all pairs that do not fit, and all parameters that left the model without being
                in the map.
            PhaseError: A step or load is running, or an earlier one failed.
        """
        require_instance("new_to_old", new_to_old, Mapping)
        for param in (*new_to_old.keys(), *new_to_old.values()):
            require_instance("a parameter of new_to_old", param, torch.Tensor)
        model = model if model is not None else self.model
        require_instance("model", model, nn.Module)
        self._require_idle("rebind parameters")
        names = named_parameters(model)
        replacement = Replacement(new_to_old, self.optimizers, old_names=dict(self._names), new_names=names)
        replacement.apply(self._views)
        self.model = model
        self._rename(names)

    # ------------------------------------------------------------------ Stateful

    def state_dict(self, *, flat: bool | None = None) -> dict[str, object]:
        """The state of all optimizers by FQN, as aliases: no copy, no device traffic.

        State that does not exist yet is exported as a template that DCP can load into; it does not change the
        optimizer. The tensors are valid until the next ``step()``.

        Args:
            flat: The layout; default that of the manager.

        Raises:
            PhaseError: A step is running, or an earlier one failed (outside ``recovery()``).
            UnsupportedOptimizerError: A never-stepped optimizer whose state cannot be told beforehand.
        """
        for swap in self.swaps():
            swap.require_readable("export state")
        self._sync()
        is_flat = self.flat if flat is None else flat
        return flat_layout(self._views) if is_flat else nested_layout(self._views)

    def load_state_dict(
        self,
        state_dict: Mapping[str, object],
        *,
        allow_missing: bool = False,
        accept_parameters: bool = False,
    ) -> None:
        """Restore from a state dict of either layout, ours or stock's. Never steps, never touches the device.

        Tensors that ``state_dict()`` handed out and DCP read into are recognised and not copied again.

        Args:
            state_dict: Nested (``state``, ``param_groups``) or flat (``state.{fqn}.{key}``).
            allow_missing: Parameters without an entry have no state afterwards, instead of an error.
            accept_parameters: The parameters were restored too: clear the failure of an earlier step.

        Raises:
            SchemaError: Lists everything that is missing, unexpected, misshaped or wrongly typed. Nothing was
                changed.
            StateFailedError: An earlier step failed, and ``accept_parameters`` is False.
        """
        with ExitStack() as stack:
            if accept_parameters:
                stack.enter_context(self.recovery())
            for swap in self.swaps():
                if swap.phase is not Phase.READING:
                    swap.require_idle("load a state dict")
            self._sync()
            incoming = Incoming.from_layout(state_dict, self._views)
            incoming.check(allow_missing=allow_missing)
            load_into(self.swaps(), incoming.restore)

    def begin_load(self) -> None:
        """DCP is about to overwrite what ``state_dict()`` handed out. Called by ``StrictLoadPlanner``.

        Until ``load_state_dict()`` ends the load, the state counts as torn: any other call finds that the
        load did not finish, and everything refuses until ``recovery()``.

        Raises:
            StateFailedError: An earlier step or load failed (outside ``recovery()``).
        """
        self._require_idle("read a checkpoint")
        for swap in self.swaps():
            swap.require_own_mirrors("read a checkpoint")
        for swap in self.swaps():
            swap.phase = Phase.READING

    def snapshot(self, *, copy_tensor: Callable[[Tensor], Tensor] = host_copy) -> Snapshot:
        """The state of this moment, leased rather than copied: it stays as it is while training goes on.

        Use it as a context manager and read ``snapshot.state_dict`` from any thread.

        Args:
            copy_tensor: Makes the copy of a tensor that is no mirror: small state, and all state of an
                optimizer that is not swapped.

        Raises:
            PhaseError: A step is running, or an earlier one failed.
        """
        return Snapshot(self.state_dict(), self.swaps(), copy_tensor=copy_tensor)

    @contextmanager
    def full_state(self, *, buffer_nbytes: int = FULL_STATE_BUFFER_NBYTES) -> Iterator[dict[str, object]]:
        """The state of all parameters on every rank, where ranks share it. (all ranks, between steps)

        For consumers that need all of it; checkpoints do not. Inside the block ``optimizer.state`` and
        ``state_dict()`` have it too, and steps and loads are refused. What others own lies in host memory of
        its own, in the owner's dtype, and is freed when the block is left: for all state of a model that may
        not be there; see ``iter_full_state``. Everything travels once, through one device buffer.

        Args:
            buffer_nbytes: Size of the device buffer, at most (>= 512).

        Raises:
            ReplicaError: Another rank failed. Nothing was changed.
            HostMemoryError: There is no room for the state of others. Nothing was changed.
            PhaseError: A step is running, an earlier one failed, or such a block is open.
        """
        require_int("buffer_nbytes", buffer_nbytes, minimum=512)
        self._require_idle("show the full state")
        self._sync()
        with ExitStack() as stack:
            for optimizer in self.optimizers.values():
                stack.enter_context(self._window(optimizer, buffer_nbytes))
            yield self.state_dict()

    @contextmanager
    def _window(self, optimizer: Optimizer, buffer_nbytes: int) -> Iterator[None]:
        view = self._view(optimizer)
        with ExitStack() as stack:
            if is_swapped(optimizer):
                stack.enter_context(shown_in_full(swap_of(optimizer), view, max_nbytes=buffer_nbytes))
            if view.foreign is not None:
                stack.callback(view.received.clear)
                view.received.update(stack.enter_context(published(optimizer, view.foreign)))
            yield

    def iter_full_state(
        self, *, buffer_nbytes: int = FULL_STATE_BUFFER_NBYTES
    ) -> Iterator[dict[str, dict[str, object]]]:
        """The state of all parameters on every rank, a part at a time: by FQN and key. (all ranks)

        A part is what fits into the buffer, or one larger tensor; the parts of all replicas of a parameter
        are the same. Its tensors are valid until the next part: a rank that does not keep them holds two
        parts of the state of others at most. Iterate to the end on every rank; who stops early still takes
        part in what the others wait for.

        Args:
            buffer_nbytes: Size of the device buffer, at most (>= 512).

        Raises:
            ReplicaError: Another rank failed. Nothing was changed.
            PhaseError: As for ``full_state``.
        """
        require_int("buffer_nbytes", buffer_nbytes, minimum=512)
        self._require_idle("show the full state")
        self._sync()
        for optimizer in self.optimizers.values():
            view = self._view(optimizer)
            if is_swapped(optimizer) and view.foreign is None:
                for part in stream(swap_of(optimizer), view, max_nbytes=buffer_nbytes):
                    named = {view.name(param): values for param, values in part.items()}
                    yield named
                    named.clear()  # whoever still holds it must not keep what it held from being freed
            else:
                with self._window(optimizer, buffer_nbytes):
                    for _, param in view.everything():
                        yield {view.name(param): dict(view.received.get(param) or view.values(param))}

    @contextmanager
    def recovery(self) -> Iterator[None]:
        """Let a failed optimizer be loaded: restore parameters and optimizer together inside, for example by
        one ``dcp.load({"model": ..., "optimizer": manager})``."""
        with recovery(*(each for each in self.optimizers.values() if is_swapped(each))):
            yield

    # ------------------------------------------------------------------ figures

    def memory(self) -> MemoryStats:
        """Accounted bytes of swapped state over all optimizers."""
        ledgers = [swap.device.ledger for swap in self.swaps()]
        return MemoryStats(
            device_nbytes=sum(ledger.device_nbytes for ledger in ledgers),
            device_peak_nbytes=sum(ledger.device_peak_nbytes for ledger in ledgers),
            host_nbytes=sum(ledger.host_nbytes for ledger in ledgers),
            host_peak_nbytes=sum(ledger.host_peak_nbytes for ledger in ledgers),
        )

    def reset_peak_memory(self) -> None:
        """Start new peaks from the current figures."""
        for swap in self.swaps():
            swap.device.ledger.reset_peak()

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record load, update and offload of every batch of the steps taken inside."""
        timeline = Timeline()
        devices = [swap.device for swap in self.swaps()]
        for device in devices:
            device.timeline = timeline
        try:
            yield timeline
        finally:
            for device in devices:
                device.timeline = None

    def report(self, *, gbps: float | None = None) -> SwapReport:
        """What adoption gives and costs, before or after training has begun.

        Args:
            gbps: Bandwidth of the link in GB/s, each direction. None measures it with one pinned copy.
        """
        if gbps is not None:
            require_positive("gbps", gbps)
        self._sync()
        swaps = self.swaps()
        device = swaps[0].device if swaps else device_for(self._torch_device(), timeout_secs=60.0)
        config = swaps[0].config if swaps else self._config  # it may have been adopted before the manager
        footprints = [
            footprint(
                local_of(param),
                ((key, spec[0]) for key, spec in (view.expected(param) or {}).items() if spec is not None),
                name=view.name(param),
                optimizer=_original_class(view.optimizer),
                config=config,
                matrix=_whole_matrix(view.optimizer, param),
            )
            for view in self._views
            for _, param in view.params()
        ]
        return build_report(
            footprints,
            config,
            gbps=gbps if gbps is not None else measure_gbps(device),
            cuts=self._cuts(),
        )

    def _cuts(self) -> list[Cut]:
        """Batches of all adopted optimizers, as ranges over their parameters one after the other."""
        cuts: list[Cut] = []
        for swap in self.swaps():
            start = cuts[-1].items.stop if cuts else 0
            cuts += [
                Cut(range(start + cut.items.start, start + cut.items.stop), cut.slices) for cut in swap.cuts()
            ]
        return cuts

    def _torch_device(self) -> torch.device:
        return next((param.device for param in self.model.parameters()), torch.device("cpu"))


def _whole_matrix(optimizer: Optimizer, param: Tensor) -> WholeMatrix | None:
    owner = swap_of(optimizer).matrix_owner(param) if is_swapped(optimizer) else None
    return None if owner is None else WholeMatrix(param.numel(), owner.is_here)


def _original_class(optimizer: Optimizer) -> type[Optimizer]:
    return swap_of(optimizer).original_class if is_swapped(optimizer) else type(optimizer)
