"""Step an oversized parameter slice by slice: staging is as large as a batch, not as the parameter.

[Note: own scalars] Every slice is stepped like a parameter of its own, with its own copies of all scalar
state, taken before the step. With shared ones AdamW would count five steps in three updates of a parameter in
two slices. After the step one copy is kept, and all have to be equal.

[Note: same kernels] Slices give the bits of the whole parameter where the update of an element depends on
that element and on scalars alone, and where slices begin at multiples of ``SLICE_ALIGNMENT``.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from swapckpt._torch import local_of, spec_of
from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.plan import Region, TensorSpec
from swapckpt.precision import MASTER
from swapckpt.state import ParamState, Slice, StateTensor, ineligibility, tensor_spec
from swapckpt.template import describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from swapckpt._torch import StepFunction
    from swapckpt.config import SwapConfig
    from swapckpt.state import Batch, OptimizerState, StateTable


class SlicedParam:
    """One oversized parameter, and its slices while a step runs.

    Call sequence (per step, by the thread that steps):

    1. ``begin``: the batches to run in the place of the parameter's own;
    2. ``finish`` after the last one is on the host, or ``abandon`` after a failure.

    Args:
        batch: The batch of the whole parameter, which holds nothing else.
        ranges: Of elements, one for each slice.
    """

    def __init__(
        self, table: StateTable, batch: Batch, ranges: Sequence[range], *, config: SwapConfig
    ) -> None:
        self._table, self._batch, self._config = table, batch, config
        self.ranges = tuple(ranges)
        self._slices: list[Slice] = []

    @property
    def _entry(self) -> ParamState:
        (entry,) = self._batch.params
        return entry

    def begin(self, optimizer: Optimizer, step: StepFunction) -> Sequence[Batch]:
        """Slices with their state, or the whole batch where slices cannot be used in this step."""
        if (
            not self._batch.params
            or self._entry.param.grad is None
            or not self._is_divisible(optimizer, step)
        ):
            return [self._batch]
        entry, state = self._entry, optimizer.state
        param, grad = local_of(entry.param.detach()).view(-1), local_of(_grad(entry)).view(-1)
        values = state.get(entry.param)
        family: list[Batch] = [self._batch]
        for elements in self.ranges:
            part = param[elements.start : elements.stop]
            part.grad = grad[elements.start : elements.stop]
            each = self._slice(part, elements, family)
            if values:
                (standin,) = each.params
                state[part] = {
                    key: standin.tensors[key].mirror if key in standin.tensors else _own(value)
                    for key, value in values.items()
                }
            self._slices.append(each)
        family += self._slices
        return self._slices

    def _slice(self, part: Tensor, elements: range, family: list[Batch]) -> Slice:
        whole = self._entry
        entry = ParamState(whole.name, part, whole.group, whole.batch, whole.has_master)
        for mine, theirs in ((entry.tensors, whole.tensors), (entry.pending, whole.pending)):
            mine.update({key: _part_of(tensor, part, elements) for key, tensor in theirs.items()})
        return Slice(
            self._batch.index,
            [entry],
            self._batch.shadow,
            segments=list(self._batch.segments),
            tensors=[*entry.tensors.values(), *entry.pending.values()],
            active=[entry],
            family=family,
        )

    # ------------------------------------------------------------------ whether

    def _is_divisible(self, optimizer: Optimizer, step: StepFunction) -> bool:
        entry = self._entry
        param, grad = entry.param, _grad(entry)
        local, local_grad = local_of(param), local_of(grad)
        placed, grad_placed = spec_of(param), spec_of(grad)
        if (placed is None) != (grad_placed is None) or not local_grad.is_contiguous():
            return False
        if placed is not None and grad_placed is not None and placed.placements != grad_placed.placements:
            return False
        values = optimizer.state.get(param)
        if not values:
            return self._prepare(optimizer, step)
        form = TensorSpec(tuple(local.shape), tuple(local.stride()), local.dtype)
        whole = [each.spec.shape == form.shape and each.spec.stride == form.stride for each in _all(entry)]
        rest = [value for key, value in values.items() if key not in entry.tensors]
        missing = entry.has_master and MASTER not in entry.tensors and MASTER not in entry.pending
        return bool(whole) and all(whole) and all(map(_is_scalar, rest)) and not missing

    def _prepare(self, optimizer: Optimizer, step: StepFunction) -> bool:
        """Reserve the mirrors of state that the slices will create, if all of it can be divided."""
        entry = self._entry
        local = local_of(entry.param)
        try:
            templates = describe(
                optimizer, step, [(entry.group, entry.param)], master_weights=self._config.master_weights
            )[entry.param]
        except UnsupportedOptimizerError:
            return False
        wanted = []
        for key, template in templates.items():
            spec = template.spec
            if spec is None:
                continue
            standin = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            reason = ineligibility(standin, key=key, config=self._config, device=standin.device)
            if spec.numel <= 1:
                if reason is None and self._table.is_host:  # swapped, but not a part of each slice
                    return False
                continue
            whole = spec.shape == tuple(local.shape) and spec.stride == tuple(local.stride())
            if not whole or reason is not None:
                return False
            if key not in entry.pending:
                wanted.append((entry, key, spec, template.placement))
        for (_, key, _, _), tensor in zip(wanted, self._table.reserve(self._batch, wanted), strict=True):
            entry.pending[key] = tensor
        return bool(entry.pending)

    # ------------------------------------------------------------------ afterwards

    def finish(self, state: OptimizerState) -> None:
        """Put the state of the slices together: mirrors are whole already, of the scalars one is kept.

        Raises:
            UnsupportedOptimizerError: The slices disagree about what state there is, or about a scalar.
        """
        slices, self._slices = self._slices, []
        if not slices:
            return
        parts = [state.pop(each.params[0].param, {}) for each in slices]
        entry, first = self._entry, parts[0]
        for each, values in zip(slices, parts, strict=True):
            standin = each.params[0]
            rest = {key: value for key, value in values.items() if key not in standin.tensors}
            known = entry.tensors.keys() | entry.pending.keys()
            same = values.keys() == first.keys() and all(_equal(rest[key], first[key]) for key in rest)
            if not same or not standin.tensors.keys() <= known or not all(map(_is_scalar, rest.values())):
                msg = (
                    f"The optimizer does not step each element of {entry.name} on its own: its slices have "
                    f"different state ({sorted(first)} and {sorted(values)}). Set split_oversized=False."
                )
                raise UnsupportedOptimizerError(msg)
        self._keep(state, first, slices[0].params[0].tensors)

    def _keep(
        self, state: OptimizerState, values: Mapping[str, object], swapped: Mapping[str, StateTensor]
    ) -> None:
        entry = self._entry
        before = state.get(entry.param, {})
        for key in swapped:
            if key not in entry.tensors:
                entry.tensors[key] = entry.pending.pop(key)
        for key in [key for key in entry.tensors if key not in values]:
            self._table.set_aside(entry, key)
        kept: dict[str, object] = {}
        for key, value in values.items():
            known = before.get(key)
            if key in swapped:
                kept[key] = entry.tensors[key].mirror
            elif isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
                kept[key] = known.copy_(value)  # torch advances it in place, and others may hold it
            else:
                kept[key] = value
        before.clear()
        before.update(kept)
        state[entry.param] = before

    def abandon(self, state: OptimizerState) -> None:
        """Forget the slices of a step that failed."""
        for each in self._slices:
            state.pop(each.params[0].param, None)
        self._slices = []


def _grad(entry: ParamState) -> Tensor:
    assert entry.param.grad is not None
    return entry.param.grad


def _all(entry: ParamState) -> list[StateTensor]:
    return [*entry.tensors.values(), *entry.pending.values()]


def _part_of(tensor: StateTensor, part: Tensor, elements: range) -> StateTensor:
    itemsize = tensor.spec.dtype.itemsize
    region = Region(tensor.region.offset_nbytes + elements.start * itemsize, len(elements) * itemsize)
    spec = TensorSpec((len(elements),), (1,), tensor.spec.dtype)
    mirror = tensor.segment.mirror(region, spec)
    return StateTensor(tensor.id, part, spec, None, tensor.segment, region, mirror)


def _is_scalar(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() <= 1


def _own(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return tensor_spec(first) == tensor_spec(second) and torch.equal(first, second)
    return type(first) is type(second) and first == second
