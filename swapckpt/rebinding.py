"""Parameters that took the place of others: the optimizers follow, and no value moves.

Wrapping a model anew (another sharding library, a precision wrapper) gives it new parameter objects, while
optimizers, their state and swapckpt know the old ones. A rebind exchanges the objects everywhere: groups,
state, batches and names. Mirrors stay what they are.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

import torch

from swapckpt._torch import local_of, spec_of
from swapckpt.errors import RebindError, listing
from swapckpt.optimizer import is_swapped, swap_of
from swapckpt.state import tensor_spec
from swapckpt.swap import Phase, replace_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from swapckpt.statedict import StateView

    Names = Mapping[Tensor, tuple[str, ...]]


class Replacement:
    """A checked map of new parameters to the old ones whose place they take.

    Args:
        new_to_old: Every parameter that was replaced.
        optimizers: Those that hold the old ones, by name.
        old_names: Names of the old parameters, for messages.
        new_names: Names of the model's parameters now.

    Raises:
        RebindError: Lists everything that does not fit. Nothing was changed.
    """

    def __init__(
        self,
        new_to_old: Mapping[Tensor, Tensor],
        optimizers: Mapping[str, Optimizer],
        *,
        old_names: Names,
        new_names: Names,
    ) -> None:
        self._new_to_old = dict(new_to_old)
        self._optimizers = optimizers
        self._old_names, self._new_names = old_names, new_names
        self._new_of = {old: new for new, old in self._new_to_old.items()}
        problems = [*self._pair_problems(), *self._place_problems()]
        if problems:
            msg = f"The parameters cannot be rebound ({len(problems)} problems); nothing changed:"
            raise RebindError(f"{msg}{listing(problems)}")

    def _label(self, param: Tensor) -> str:
        names = self._new_names.get(param) or self._old_names.get(param)
        return names[0] if names else f"a parameter of shape {list(param.shape)}"

    def _pair_problems(self) -> Iterator[str]:
        """What is wrong with single pairs."""
        held = [set(_held(optimizer)) for optimizer in self._optimizers.values()]
        uses = Counter(self._new_to_old.values())
        for new, old in self._new_to_old.items():
            label = self._label(new)
            if new not in self._new_names:
                yield f"{label}: the new parameter is not in the model"
            if uses[old] > 1:
                yield f"{label}: {uses[old]} new parameters claim the place of {self._label(old)}"
            if not any(old in each or new in each for each in held):
                yield f"{label}: no optimizer holds the old parameter"
            mismatch = _mismatch(new, old)
            if mismatch is not None:
                yield f"{label}: {mismatch}"

    def _place_problems(self) -> Iterator[str]:
        """What is wrong with the optimizers as they would be."""
        places = Counter(
            self._new_of.get(param, param)
            for optimizer in self._optimizers.values()
            for group in optimizer.param_groups
            for param in group["params"]
        )
        for param, count in places.items():
            if count > 1:
                yield f"{self._label(param)}: would be held {count} times"
            if param not in self._new_names and param not in self._new_to_old:  # else it is told above
                yield f"{self._label(param)}: no longer in the model, and not in the map"
        for optimizer in self._optimizers.values():
            for param in _known(optimizer):
                if param in self._new_to_old and param not in self._new_of:
                    yield f"{self._label(param)}: the new parameter has state or a batch of its own already"

    def apply(self, views: Iterable[StateView]) -> None:
        """Exchange the objects. ``views`` are those of the optimizers, in any order."""
        swaps = [swap_of(each) for each in self._optimizers.values() if is_swapped(each)]
        phases = [swap.phase for swap in swaps]
        for swap in swaps:
            swap.phase = Phase.REBINDING
        try:
            for optimizer in self._optimizers.values():
                self._rebind_groups(optimizer)
                if is_swapped(optimizer):
                    swap_of(optimizer).rebind(optimizer, self._new_of)
            for view in views:
                view.rebind(self._new_of)
        except BaseException as error:  # an interrupt: it may be half done
            for swap in swaps:
                swap.fail(error)
            raise
        for swap, phase in zip(swaps, phases, strict=True):
            swap.phase = phase

    def _rebind_groups(self, optimizer: Optimizer) -> None:
        state = replace_keys(optimizer.state, self._new_of)
        optimizer.state.clear()  # the same object: torch's is a defaultdict, a user's may be more
        optimizer.state.update(state)
        for group in optimizer.param_groups:
            group["params"][:] = [self._new_of.get(param, param) for param in group["params"]]


def _held(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    yield from _known(optimizer)


def _known(optimizer: Optimizer) -> Iterator[Tensor]:
    state = cast("Mapping[object, object]", optimizer.state)  # a user's may hold more than parameters
    yield from (key for key, values in state.items() if isinstance(key, torch.Tensor) and values)
    if is_swapped(optimizer):
        yield from swap_of(optimizer).table.entries


def _mismatch(new: Tensor, old: Tensor) -> str | None:
    """Why ``new`` cannot take the place of ``old``; None if it can."""
    found, expected = spec_of(new), spec_of(old)
    if found is None or expected is None:
        if found is not expected:
            kinds = ("a plain tensor", "a DTensor")
            return f"expected {kinds[expected is not None]}, found {kinds[found is not None]}"
    else:
        here, there = (found.mesh, found.placements), (expected.mesh, expected.placements)
        if here != there or new.shape != old.shape:
            return f"expected {list(old.shape)} placed {there[1]}, found {list(new.shape)} placed {here[1]}"
    geometry, wanted = tensor_spec(local_of(new)), tensor_spec(local_of(old))
    if geometry != wanted:
        strides = f" with strides {geometry.stride}" if geometry.same_values(wanted) else ""
        return f"expected {wanted}, found {geometry}{strides}"
    return None if new.device == old.device else f"expected on {old.device}, found on {new.device}"
