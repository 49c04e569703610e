"""Step any ``torch.optim`` optimizer on a subset of its parameters, with the numbers of one whole step.

[Note: same numbers] Stepping is per parameter in every supported optimizer, so calling the optimizer's own
step with ``param_groups`` narrowed to a batch gives the bits of one call over everything (measured for the
thirteen per-parameter optimizers of torch, foreach and fused included). What an optimizer advances once per
call in a *group* (a step counter) must still advance once per step: group fields are put back between
batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch

from swapckpt._torch import StepFunction, version_of
from swapckpt.errors import UnsupportedOptimizerError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from torch import Tensor
    from torch.optim import Optimizer

Group = dict[str, object]


class _HookedStep(Protocol):
    __wrapped__: StepFunction


_REFUSED = {
    "LBFGS": "it updates all parameters from one global line search",
    "SparseAdam": "it takes sparse gradients, whose state is not touched densely",
}
_REFUSED_FLAGS = {
    "differentiable": "autograd would keep references to staging buffers that are reused",
    "capturable": "a captured graph replays fixed addresses, and swapping changes them",
}


def unhooked_step(optimizer: Optimizer) -> StepFunction:
    """The class's own ``step`` without torch's hook wrapper, so that hooks fire once per step.

    Raises:
        UnsupportedOptimizerError: The class or one of its flags rules out stepping in batches.
    """
    cls = type(optimizer)
    for base in cls.__mro__:
        if base.__name__ in _REFUSED and base.__module__.startswith("torch.optim"):
            msg = f"{cls.__name__} cannot be swapped: {_REFUSED[base.__name__]}."
            raise UnsupportedOptimizerError(msg)
    for index, group in enumerate(optimizer.param_groups):
        for flag, reason in _REFUSED_FLAGS.items():
            if group.get(flag):
                msg = f"{cls.__name__} with {flag}=True (group {index}) cannot be swapped: {reason}."
                raise UnsupportedOptimizerError(msg)
    # Torch wraps the step of every class it constructs; one level is its hook wrapper.
    step = cast("StepFunction", cls.step)
    return cast("_HookedStep", step).__wrapped__ if hasattr(step, "hooked") else step


class BatchedUpdate:
    """One optimizer step, taken batch by batch. A context manager: leaving it restores ``param_groups``."""

    def __init__(self, optimizer: Optimizer, step: StepFunction) -> None:
        self._optimizer = optimizer
        self._step = step
        self._groups: list[Group] = optimizer.param_groups
        self._params = [group["params"] for group in self._groups]
        self._before = [_fields(group) for group in self._groups]
        self._pristine = [
            {key: private_copy(value) for key, (value, _) in fields.items()} for fields in self._before
        ]
        self._advanced: dict[int, dict[str, object]] = {}

    def __enter__(self) -> BatchedUpdate:  # noqa: PYI034 - typing.Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._optimizer.param_groups = self._groups
        for group, params in zip(self._groups, self._params, strict=True):
            group["params"] = params
        for index, fields in self._advanced.items():
            self._groups[index].update(fields)

    def run(self, subset: Iterable[tuple[int, list[Tensor]]]) -> None:
        """Step the parameters of ``subset``: pairs of group index and parameters, each group at most once.

        A group may appear with no parameters, so that fields it advances itself advance.
        """
        chosen = list(subset)
        for index, params in chosen:
            self._groups[index]["params"] = params
            self._put_back(index)
        self._optimizer.param_groups = [self._groups[index] for index, _ in chosen]
        self._step(self._optimizer)
        for index, params in chosen:
            self._note_advance(index, idle=all(param.grad is None for param in params))

    def _put_back(self, index: int) -> None:
        """Undo what an earlier batch advanced, on copies: the group's own tensors keep what they advanced
        to."""
        group, pristine = self._groups[index], self._pristine[index]
        for key in self._advanced.get(index, ()):
            if key in pristine:
                group[key] = private_copy(pristine[key])
                self._before[index][key] = (group[key], _version(group[key]))
            else:
                group.pop(key, None)

    def _note_advance(self, index: int, *, idle: bool) -> None:
        """Remember what the first batch of a group advanced, and hold later ones to it.

        A batch without gradients (``idle``) may leave the group as it is.
        """
        before = self._before[index]
        changed = {
            key: value
            for key, value in self._groups[index].items()
            if key != "params" and (key not in before or _touched(value, *before[key]))
        }
        earlier = self._advanced.get(index)
        if idle and not changed:
            return
        if earlier is None:
            self._advanced[index] = changed
        elif not _same(earlier, changed):
            msg = (
                f"{type(self._optimizer).__name__} advances group fields {sorted(earlier.keys() | changed)} "
                "by the parameters it steps, so stepping in batches would change its result. It cannot be "
                "swapped."
            )
            raise UnsupportedOptimizerError(msg)


def _fields(group: Group) -> dict[str, tuple[object, int]]:
    """Per field: the object itself, and its version if it is a tensor."""
    return {key: (value, _version(value)) for key, value in group.items() if key != "params"}


def _version(value: object) -> int:
    return version_of(value) if isinstance(value, torch.Tensor) else 0


def _touched(value: object, original: object, version: int) -> bool:
    return value is not original or _version(value) != version


def private_copy(value: object) -> object:
    """A tensor of the same values that nobody else holds; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(first: dict[str, object], second: dict[str, object]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(
        torch.equal(value, other)
        if isinstance(value, torch.Tensor) and isinstance(other := second[key], torch.Tensor)
        else value == second[key]
        for key, value in first.items()
    )
