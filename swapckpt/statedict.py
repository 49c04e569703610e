"""Optimizer state as a state dict: exported as aliases, checked against what is expected, restored."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from swapckpt._torch import DTensorSpec, StepFunction, local_of, spec_for, spec_of, wrap_local
from swapckpt.absence import is_not_created, mark_not_created
from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.plan import StateId
from swapckpt.precision import MASTER, MASTER_DTYPE, is_low_precision
from swapckpt.state import ineligibility, tensor_spec
from swapckpt.template import describe, home_device, master_template

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from swapckpt.config import SwapConfig
    from swapckpt.fence import Gate
    from swapckpt.foreign import StateBroadcast
    from swapckpt.plan import TensorSpec
    from swapckpt.state import ParamState, StateTable
    from swapckpt.template import StateTemplate

Values = dict[str, object]
"""State of one parameter by key."""

Wanted = tuple["Tensor", str, "TensorSpec", "DTensorSpec | None"]
"""State to reserve memory for: its parameter, key, local geometry and placement."""

Homes = dict[int, tuple["Tensor", str, tuple[int, ...]]]
"""By address: the parameter and key whose state lies there, and with which strides."""


class StateView(ABC):
    """The state of one optimizer by parameter, whatever holds it.

    Call sequence (the training thread, between steps; every rank on its own, no communication):

    1. ``values(param)`` for export: live tensors, or a template where nothing was created yet;
    2. a reader may write into those tensors;
    3. ``problems(incoming)`` before anything is changed, then ``restore(incoming)``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: StepFunction,
        names: dict[Tensor, tuple[str, ...]],
        *,
        master_weights: bool = False,
    ) -> None:
        # Weak: an adopted optimizer owns its view, and a cycle would keep its host memory until a collection.
        self._optimizer = weakref.ref(optimizer)
        self.names = names
        self._step = step
        self._master_weights = master_weights
        self._templates: dict[Tensor, Values] = {}
        self.foreign: StateBroadcast | None = None  # what shares the state, if that is not swapckpt
        self.received: dict[Tensor, Values] = {}  # of other ranks, while a window on the full state is open

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose state this is."""
        optimizer = self._optimizer()
        if optimizer is None:
            msg = "The optimizer of this state view no longer exists."
            raise ReferenceError(msg)
        return optimizer

    @abstractmethod
    def _reserve(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Memory for state to come, as the optimizer would bind it. Not bound yet."""

    @abstractmethod
    def _bind(self, incoming: Mapping[Tensor, Values]) -> None:
        """Make ``incoming`` the live state, in place where memory for it exists."""

    @abstractmethod
    def _unbind(self, param: Tensor) -> None:
        """Make the state of ``param`` absent."""

    def _keeps(self, param: Tensor) -> bool:
        return self.foreign is None or self.foreign.owns_state(param)

    def everything(self) -> Iterator[tuple[int, Tensor]]:
        """Group index and parameter, in the order of ``param_groups``: the same on every rank."""
        for index, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                yield index, param

    def params(self) -> Iterator[tuple[int, Tensor]]:
        """Group index and parameter of those whose state this rank keeps."""
        return ((group, param) for group, param in self.everything() if self._keeps(param))

    def elsewhere(self) -> Iterator[tuple[int, Tensor]]:
        """Group index and parameter of those whose state other ranks keep."""
        return ((group, param) for group, param in self.everything() if not self._keeps(param))

    def name(self, param: Tensor) -> str:
        """The name a parameter is saved under."""
        return self.names[param][0]

    def rebind(self, new_of: Mapping[Tensor, Tensor]) -> None:
        """Let new parameters take the place of old ones. Templates that were handed out stay valid."""
        self._templates = {new_of.get(param, param): each for param, each in self._templates.items()}

    def values(self, param: Tensor) -> Values:
        """State of ``param`` by key: the live tensors themselves, or a template (see absence.py)."""
        live: Values | None = self.optimizer.state.get(param)
        if live or not param.requires_grad:  # like stock, which gives a frozen parameter no fresh state
            return live or {}
        if param not in self._templates:
            self._prepare_templates()
        values = self._template(param)
        for value in values.values():
            if isinstance(value, torch.Tensor):
                mark_not_created(local_of(value))
        return values

    def _template(self, param: Tensor) -> Values:
        """The values that stand for state of ``param`` that was not created yet."""
        return self._templates[param]

    def _prepare_templates(self, frozen: Collection[Tensor] = ()) -> None:
        """Reserve memory for every parameter without state, so that each batch gets one packed segment.

        Parameters that are frozen get none unless they are in ``frozen``.
        """
        missing = [
            (group, param)
            for group, param in self.params()
            if (param.requires_grad or param in frozen)
            and not self.optimizer.state.get(param)
            and param not in self._templates
        ]
        if not missing:
            return
        if self.foreign is not None:  # a dry step would communicate
            raise UnsupportedOptimizerError("State that is broadcast is not known before its first step.")
        described = describe(self.optimizer, self._step, missing, master_weights=self._master_weights)
        wanted = [
            (param, key, template.spec, template.placement)
            for param, templates in described.items()
            for key, template in templates.items()
            if template.spec is not None
        ]
        for _, param in missing:
            self._templates[param] = {
                key: template.value for key, template in described[param].items() if template.spec is None
            }
        for (param, key, _, _), tensor in zip(wanted, self._reserve(wanted), strict=True):
            self._templates[param][key] = tensor

    def expected(self, param: Tensor) -> dict[str, tuple[TensorSpec, DTensorSpec | None] | None] | None:
        """Per key the geometry the optimizer expects (None for values that are not tensors).

        None altogether where it cannot be told before the first step: then anything is accepted.
        """
        live = self.optimizer.state.get(param)
        if not live:
            if param.requires_grad and param not in self._templates:
                with suppress(UnsupportedOptimizerError):
                    self._prepare_templates()
            live = self._templates.get(param)
            if live is None:
                return None
        forms = {
            key: (tensor_spec(local_of(value)), spec_of(value)) if isinstance(value, torch.Tensor) else None
            for key, value in live.items()
        }
        if self._has_master(param) and MASTER not in forms:
            template = master_template(param)
            forms[MASTER] = (template.spec, template.placement) if template.spec is not None else None
        return forms

    def _has_master(self, param: Tensor) -> bool:
        return self._master_weights and is_low_precision(param)

    # ------------------------------------------------------------------ checking and restoring

    def _homes(self) -> Homes:
        """Whose memory is where: what a restore is going to overwrite."""
        homes: Homes = {}
        for _, param in self.params():
            for key, value in (self.optimizer.state.get(param) or self._templates.get(param, {})).items():
                if isinstance(value, torch.Tensor):
                    local = local_of(value)
                    homes[local.data_ptr()] = (param, key, local.stride())
        return homes

    def problems(self, incoming: Mapping[Tensor, Values], *, allow_missing: bool = False) -> list[str]:
        """Everything about ``incoming`` that does not fit. Changes nothing."""
        found = []
        with suppress(UnsupportedOptimizerError):
            self._prepare_templates(frozen=incoming.keys())
        for _, param in self.params():
            expected, values = self.expected(param), incoming.get(param)
            if values is None:
                if expected and not allow_missing:
                    found.append(f"{self.name(param)}: no state, expected {sorted(expected)}")
            elif expected is not None:
                found += self._mismatches(param, expected, values)
        return found

    def _mismatches(
        self,
        param: Tensor,
        expected: Mapping[str, tuple[TensorSpec, DTensorSpec | None] | None],
        values: Values,
    ) -> Iterator[str]:
        name = self.name(param)
        for key in expected.keys() | values.keys():
            if key not in values:
                if key != MASTER:  # a restore starts it from the parameter
                    yield f"{name}.{key}: missing"
            elif key not in expected:
                yield f"{name}.{key}: unexpected, the optimizer has {sorted(expected)}"
            else:
                problem = _mismatch(expected[key], values[key])
                if problem is not None:
                    yield f"{name}.{key}: {problem}"

    def restore(self, incoming: Mapping[Tensor, Values]) -> None:
        """Make ``incoming`` the state; parameters that are absent or marked as not created have none after
        it.

        ``incoming`` has passed ``problems``. Tensors that ``values`` handed out are recognised and not
        copied.
        """
        homes = self._homes()
        created = {param: values for param, values in incoming.items() if not is_not_created(values)}
        for _, param in self.params():
            if param not in created:
                self._unbind(param)
        self._bind(_unentangled({param: each for param, each in created.items() if each}, homes))
        for param in created:
            self._templates.pop(param, None)


def _mismatch(expected: tuple[TensorSpec, DTensorSpec | None] | None, value: object) -> str | None:
    """What is wrong with one value; None when it fits."""
    if expected is None:
        return None if not isinstance(value, torch.Tensor) else "expected a plain value, found a tensor"
    if not isinstance(value, torch.Tensor):
        return f"expected a tensor, found {type(value).__name__}"
    spec, placement = expected
    shape = spec.shape if placement is None else tuple(placement.shape)
    if (problem := _misplaced(placement, value)) is not None:
        return problem
    if tuple(value.shape) != shape:
        return f"expected shape {list(shape)}, found {list(value.shape)}"
    return None if value.dtype == spec.dtype else f"expected {spec.dtype}, found {value.dtype}"


def _misplaced(placement: DTensorSpec | None, value: Tensor) -> str | None:
    found = spec_of(value)
    if placement is None:
        return (
            None if found is None else f"expected a plain tensor, found a DTensor placed {found.placements}"
        )
    if found is None:
        return (
            f"expected a DTensor placed {placement.placements}, found a plain tensor of {list(value.shape)}: "
            "without its placement one rank's shard would stand for all"
        )
    if found.mesh != placement.mesh or found.placements != placement.placements:
        return f"expected placements {placement.placements}, found {found.placements}"
    return None


class LiveState(StateView):
    """State of an optimizer that is not swapped: it lives with the parameters."""

    def _reserve(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        groups = {param: group for group, param in self.params()}
        fields = self.optimizer.param_groups
        return [
            _empty(spec, placement, home_device(fields[groups[param]], param, key))
            for param, key, spec, placement in wanted
        ]

    def _bind(self, incoming: Mapping[Tensor, Values]) -> None:
        for index, param in self.params():
            if param in incoming:
                fields = self.optimizer.param_groups[index]
                live = self.optimizer.state.get(param) or self._templates.get(param, {})
                self.optimizer.state[param] = {
                    key: overwrite(live.get(key), value, home=home_device(fields, param, key))
                    for key, value in incoming[param].items()
                }

    def _unbind(self, param: Tensor) -> None:
        self.optimizer.state.pop(param, None)


class SwappedState(StateView):
    """State of an adopted optimizer: swapped tensors are written into their mirrors."""

    def __init__(
        self,
        optimizer: Optimizer,
        step: StepFunction,
        *,
        names: dict[Tensor, tuple[str, ...]],
        table: StateTable,
        config: SwapConfig,
        gate: Gate,
    ) -> None:
        super().__init__(optimizer, step, names, master_weights=config.master_weights)
        self._table, self._config, self.gate = table, config, gate
        self.templates_bound = False

    def _keeps(self, param: Tensor) -> bool:
        return param in self._table.entries and super()._keeps(param)

    def params(self) -> Iterator[tuple[int, Tensor]]:
        entries = (entry for batch in self._table.batches for entry in batch.params)
        return ((entry.group, entry.param) for entry in entries if self._keeps(entry.param))

    def _reserve(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        reserved: dict[tuple[Tensor, str], Tensor] = {}
        for batch in self._table.batches:
            swapped = []
            for param, key, spec, placement in wanted:
                entry = self._table.entries[param]
                if entry.batch != batch.index:
                    continue
                pending = entry.pending.get(key)
                if pending is not None and pending.spec == spec:
                    reserved[param, key] = pending.mirror
                elif self._is_swapped(key, spec):
                    swapped.append((entry, key, spec, placement))
                else:  # on the host wherever its home is: a template must not touch the device
                    reserved[param, key] = _empty(spec, placement, torch.device("cpu"))
            for (entry, key, _, _), tensor in zip(swapped, self._table.reserve(batch, swapped), strict=True):
                entry.pending[key] = tensor
                reserved[entry.param, key] = tensor.mirror
        return [reserved[param, key] for param, key, _, _ in wanted]

    def _template(self, param: Tensor) -> Values:
        values = self._templates[param]
        for key, tensor in self._table.entries[param].pending.items():
            if key in values:  # a redirect may have moved the mirror since, and its old place is used again
                values[key] = tensor.mirror
        return values

    def _is_swapped(self, key: str, spec: TensorSpec) -> bool:
        if not spec.shape and not self._table.is_host:
            return False
        standin = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        reason = ineligibility(standin, key=key, config=self._config, device=standin.device)
        return reason is None

    def _bind(self, incoming: Mapping[Tensor, Values]) -> None:
        for param, values in incoming.items():
            self._release_other_keys(self._table.entries[param], values)
        self._reserve_missing(incoming)
        for param, values in incoming.items():
            entry = self._table.entries[param]
            live = self.optimizer.state.get(param) or self._templates.get(param, {})
            bound: Values = {}
            for key, value in values.items():
                tensor = entry.tensors.get(key)
                if tensor is None:
                    bound[key] = self._small(entry, key, live=live.get(key), value=value)
                    continue
                if isinstance(value, torch.Tensor) and not _is_same(local_of(value), tensor.host):
                    self._pass_gate(entry)
                    tensor.host.copy_(local_of(value))
                bound[key] = tensor.mirror
            self.optimizer.state[param] = bound

    def _small(self, entry: ParamState, key: str, *, live: object, value: object) -> object:
        """State that is not swapped: in place on a host device, else parked on the host until the next
        step."""
        home = home_device(self.optimizer.param_groups[entry.group], entry.param, key)
        if home.type == "cpu" or not isinstance(value, torch.Tensor):
            return overwrite(live, value, home=home)
        entry.parked.add(key)
        return overwrite(None, value, home=torch.device("cpu"))

    def values(self, param: Tensor) -> Values:
        """As the base class; small state that lives on the device is shown by its host shadow."""
        entry = self._table.entries[param]
        live: Values = self.optimizer.state.get(param, {})
        if self._is_changed(entry, live):
            self._follow(entry, live)
        values = live or super().values(param)
        if self._table.is_host:
            return values
        shadow, shown = self._table.batches[entry.batch].shadow, dict(values)
        for key, value in values.items():
            mirror = shadow.mirror(StateId(entry.name, key))
            if mirror is not None and isinstance(value, torch.Tensor) and value.device.type != "cpu":
                shown[key] = mirror
        return shown

    def restore(self, incoming: Mapping[Tensor, Values]) -> None:
        """As the base class; masters that ``incoming`` does not have start from the parameters."""
        if not self._master_weights:
            super().restore(incoming)
            return
        lacking: dict[Tensor, Values] = {}
        given: dict[Tensor, Values] = {}
        for param, values in incoming.items():
            given[param] = values
            if self._has_master(param) and values and not is_not_created(values):
                master = values.get(MASTER)
                if not isinstance(master, torch.Tensor) or is_not_created({MASTER: master}):
                    given[param] = {key: value for key, value in values.items() if key != MASTER}
                    lacking[param] = {MASTER: _meta(master_template(param))}
        super().restore(given)
        if lacking:
            self._start_masters(lacking)

    def _start_masters(self, lacking: Mapping[Tensor, Values]) -> None:
        first, *_ = names = sorted(map(self.name, lacking))
        msg = (
            f"What is loaded has no fp32 masters for {len(names)} parameters ({first}, ...): they start from "
            "the parameters, as after the first step of a new run."
        )
        warnings.warn(msg, stacklevel=2)
        self._reserve_missing(lacking)
        for param in lacking:
            entry = self._table.entries[param]
            tensor = entry.tensors.get(MASTER)
            if tensor is None:
                local = local_of(param.detach()).to("cpu", MASTER_DTYPE, copy=True)
                value = wrap_local(local, spec_for(param, MASTER_DTYPE))
                self.optimizer.state[param][MASTER] = self._small(entry, MASTER, live=None, value=value)
                continue
            self._pass_gate(entry)
            tensor.host.copy_(local_of(param.detach()))
            self.optimizer.state[param][MASTER] = tensor.mirror

    def _release_other_keys(self, entry: ParamState, values: Values) -> None:
        kept = {*values, MASTER} if entry.has_master else values.keys()  # a master is only started again
        for key in [key for key in entry.tensors if key not in kept]:
            self._table.forget(entry, key)

    def _reserve_missing(self, incoming: Mapping[Tensor, Values]) -> None:
        """Register a mirror for every incoming tensor that is swapped: pending ones first, then new
        memory."""
        for batch in self._table.batches:
            wanted = []
            for entry in batch.params:
                for key, value in incoming.get(entry.param, {}).items():
                    if key in entry.tensors or not isinstance(value, torch.Tensor):
                        continue
                    spec = tensor_spec(local_of(value))
                    pending = entry.pending.get(key)
                    # Strides are ours: files hold every tensor contiguously, whatever the parameter's are.
                    if pending is not None and pending.spec.same_values(spec):
                        entry.tensors[key] = entry.pending.pop(key)
                    elif self._is_swapped(key, spec):
                        wanted.append((entry, key, spec, spec_of(value)))
            for (entry, key, _, _), tensor in zip(wanted, self._table.reserve(batch, wanted), strict=True):
                entry.tensors[key] = tensor

    def _pass_gate(self, entry: ParamState) -> None:
        batch = self._table.batches[entry.batch]
        for segment in list(batch.segments):
            target = self.gate.before_overwrite(segment)
            if target is not segment:
                for tensor in batch.tensors:
                    if tensor.segment is segment:
                        target.bytes(tensor.region).copy_(segment.bytes(tensor.region))
                self._table.redirect(batch, segment, target, state=self.optimizer.state)

    def _unbind(self, param: Tensor) -> None:
        entry = self._table.entries[param]
        entry.pending.update(entry.tensors)
        entry.tensors.clear()
        self.optimizer.state.pop(param, None)

    def follow(self) -> None:
        """Take over what others put into ``optimizer.state`` in place of mirrors since the last step."""
        state = self.optimizer.state
        entries = self._table.entries.values()
        changed = [each for each in entries if self._is_changed(each, state.get(each.param, {}))]
        # By get: asking torch's state for what it does not have creates an empty entry.
        present = {e.param: values for e in changed if (values := state.get(e.param)) is not None}
        for param, values in _unentangled(present, self._homes()).items() if present else ():
            state[param].update(values)
        for entry in changed:
            self._follow(entry, state.get(entry.param, {}))

    @staticmethod
    def _is_changed(entry: ParamState, values: Values) -> bool:
        for key, tensor in entry.tensors.items():  # no any(): it costs as much again, in every step
            if values.get(key) is not tensor.mirror or not tensor.is_intact:
                return True
        return False

    def _homes(self) -> Homes:
        homes = super()._homes()
        for batch in self._table.batches:
            for tensor in batch.tensors:
                homes[tensor.host.data_ptr()] = (tensor.param, tensor.id.key, tensor.host.stride())
        return homes

    def _follow(self, entry: ParamState, values: Values) -> None:
        for key, tensor in list(entry.tensors.items()):
            value = values.get(key)
            if not tensor.is_intact:
                tensor.renew()
            if value is tensor.mirror:
                continue
            if not tensor.fits(value):
                self._table.set_aside(entry, key)
                continue
            if not _is_same(local_of(value), tensor.host):
                self._pass_gate(entry)
                tensor.host.copy_(local_of(value))
            values[key] = tensor.mirror

    # ------------------------------------------------------------------ templates as live state

    def bind_templates(self) -> None:
        """Let templates stand in ``optimizer.state``, for stock code that insists on state before it loads.

        ``settle_templates`` decides later: what was loaded into is created, what still carries the mark is
        not.
        """
        for _, param in self.params():
            values = self.values(param)
            if values and not self.optimizer.state.get(param):
                self.optimizer.state[param] = dict(values)
        self.templates_bound = True

    def settle_templates(self) -> None:
        """Turn bound templates into created state, or back into absent state."""
        if self.templates_bound:
            self.templates_bound = False
            self.restore(dict(self.optimizer.state))


def _meta(template: StateTemplate) -> Tensor:
    assert template.spec is not None
    return _empty(template.spec, template.placement, torch.device("meta"))


def _empty(spec: TensorSpec, placement: DTensorSpec | None, device: torch.device) -> Tensor:
    local = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    return wrap_local(local, placement)


def _is_same(first: Tensor, second: Tensor) -> bool:
    """True when two local tensors are the same elements of the same memory."""
    where = (first.data_ptr(), first.stride(), first.device)
    return where == (second.data_ptr(), second.stride(), second.device)


def _unentangled(incoming: Mapping[Tensor, Values], homes: Homes) -> dict[Tensor, Values]:
    """``incoming`` with a copy of everything that lies in the memory of another value.

    State that is handed round among parameters (experts or layers that change places) would otherwise be
    overwritten by the first copy before the second one reads it. What lies in its own place needs no copy.
    """

    def apart(param: Tensor, key: str, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        local = local_of(value)
        home = homes.get(local.data_ptr())
        if home is None or local.numel() == 0:
            return value
        owner, *place = home
        if owner is param and place == [key, local.stride()]:
            return value
        return wrap_local(local.clone(), spec_of(value))

    return {
        param: {key: apart(param, key, value) for key, value in values.items()}
        for param, values in incoming.items()
    }


def overwrite(live: object, value: object, *, home: torch.device | None = None) -> object:
    """``value`` written into ``live`` if both are tensors of one form; else a copy of it, at ``home``."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(live, torch.Tensor):
        target, source = local_of(live), local_of(value)
        if target.shape == source.shape and target.dtype == source.dtype:
            if not _is_same(target, source):
                target.copy_(source)
            return live
    copied = local_of(value).detach().to(home, copy=True)
    return wrap_local(copied, spec_of(value))
