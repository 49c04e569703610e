"""Step any ``torch.optim`` optimizer on a subset of its parameters, with the numbers of one whole step.

[Note: same numbers] Stepping is per parameter in every supported optimizer, so calling the optimizer's own
step with ``param_groups`` narrowed to a batch gives the bits of one call over everything (measured for the
thirteen per-parameter optimizers of torch, foreach and fused included). What an optimizer advances once per
call in a *group* (a step counter) must still advance once per step: group fields are put back between
batches.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Protocol, cast

import torch

from swapckpt._torch import StepFunction, version_of
from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.precision import is_low_precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from torch import Tensor
    from torch.optim import Optimizer

    from swapckpt.config import SwapConfig

Group = dict[str, object]
Fields = MutableMapping[object, object]


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
    refuse_flags(optimizer)
    # Torch wraps the step of every class it constructs; one level is its hook wrapper.
    step = cast("StepFunction", cls.step)
    return cast("_HookedStep", step).__wrapped__ if hasattr(step, "hooked") else step


_ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Exactly these update each element from itself and scalars alone; a subclass may do anything."""


def is_local(cls: type[Optimizer], config: SwapConfig) -> bool:
    """True when a step of a DTensor looks at the local shard alone, so that ranks need not step together."""
    return config.split_oversized is True or issubclass(cls, _ELEMENTWISE)


def why_whole(cls: type[Optimizer], param: Tensor, config: SwapConfig) -> str | None:
    """Why a parameter is stepped whole, however large it is; None if it may be stepped in slices.

    ``param`` is a local shard.
    """
    if config.split_oversized is False:
        return "split_oversized=False"
    if not param.is_contiguous():
        return "it is not contiguous"
    if config.split_oversized is None:
        if cls not in _ELEMENTWISE:
            return f"{cls.__name__} is not known to update each element on its own"
        if param.device.type == "cpu" and not config.master_weights and is_low_precision(param):
            # Torch's own bits depend on how its threads divide the elements among themselves (measured).
            return f"{param.dtype} on the CPU rounds by how threads divide the work"
    return None


def refuse_flags(optimizer: Optimizer) -> None:
    """Raise UnsupportedOptimizerError if a group has a flag that rules out stepping in batches."""
    for index, group in enumerate(optimizer.param_groups):
        for flag, reason in _REFUSED_FLAGS.items():
            if group.get(flag):
                name = type(optimizer).__name__
                msg = f"{name} with {flag}=True (group {index}) cannot be swapped: {reason}."
                raise UnsupportedOptimizerError(msg)


class _Counters:
    """What an optimizer advances once per call in one mapping: a group, its own attributes, its state.

    Stepping in batches calls it several times; between them the values are put back, and at the end the
    mapping holds what one call makes of it.
    """

    def __init__(
        self, fields: MutableMapping[object, object], counts: Callable[[object, object], bool]
    ) -> None:
        self._fields, self._counts = fields, counts
        self._before = {key: (value, _version(value)) for key, value in self._counted()}
        self._pristine = {key: private_copy(value) for key, (value, _) in self._before.items()}
        self.advanced: dict[object, object] | None = None

    def _counted(self) -> list[tuple[object, object]]:
        return [(key, value) for key, value in self._fields.items() if self._counts(key, value)]

    def put_back(self) -> None:
        """Undo what an earlier batch advanced, on copies: the mapping's own tensors keep what they advanced
        to."""
        for key in self.advanced or ():
            if key in self._pristine:
                self._fields[key] = private_copy(self._pristine[key])
                self._before[key] = (self._fields[key], _version(self._fields[key]))
            else:
                self._fields.pop(key, None)

    def note_advance(self, *, idle: bool, who: str) -> None:
        """Remember what the first batch advanced, and hold later ones to it.

        A batch without gradients (``idle``) may leave it as it is.
        """
        changed = {
            key: value
            for key, value in self._counted()
            if key not in self._before or _touched(value, *self._before[key])
        }
        if idle and not changed:
            return
        if self.advanced is None:
            self.advanced = changed
        elif not _same(self.advanced, changed):
            msg = (
                f"{who} {sorted(map(str, self.advanced.keys() | changed))} by the parameters it steps, so "
                "stepping in batches would change its result. It cannot be swapped."
            )
            raise UnsupportedOptimizerError(msg)

    def finish(self) -> None:
        """Leave the mapping as one call would have."""
        self._fields.update(self.advanced or {})


def _is_setting(key: object, value: object) -> bool:
    del value
    return key != "params"


def _is_own_count(key: object, value: object) -> bool:
    """A number that an optimizer keeps on itself; torch's own attributes begin with an underscore."""
    return isinstance(key, str) and not key.startswith("_") and isinstance(value, int | float)


def _is_no_parameter(key: object, value: object) -> bool:
    return not isinstance(key, torch.Tensor) and not isinstance(value, dict)


class BatchedUpdate:
    """One optimizer step, taken batch by batch. A context manager: leaving it restores ``param_groups``."""

    def __init__(self, optimizer: Optimizer, step: StepFunction) -> None:
        self._optimizer = optimizer
        self._step = step
        self._groups: list[Group] = optimizer.param_groups
        self._params = [group["params"] for group in self._groups]
        self._counters = [_Counters(cast("Fields", group), _is_setting) for group in self._groups]
        self._shared = [_Counters(cast("Fields", optimizer.__dict__), _is_own_count)]
        if not optimizer.state or not all(isinstance(key, torch.Tensor) for key in optimizer.state):
            # Few optimizers do, and asking for it after every batch costs as much as their state is long.
            self._shared.append(_Counters(cast("Fields", optimizer.state), _is_no_parameter))

    def __enter__(self) -> BatchedUpdate:  # noqa: PYI034 - typing.Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._optimizer.param_groups = self._groups
        for group, params in zip(self._groups, self._params, strict=True):
            group["params"] = params
        for counters in (*self._counters, *self._shared):
            counters.finish()

    def run(self, subset: Iterable[tuple[int, list[Tensor]]]) -> None:
        """Step the parameters of ``subset``: pairs of group index and parameters, each group at most once.

        A group may appear with no parameters, so that fields it advances itself advance.
        """
        chosen = list(subset)
        for index, params in chosen:
            self._groups[index]["params"] = params
            self._counters[index].put_back()
        for counters in self._shared:
            counters.put_back()
        self._optimizer.param_groups = [self._groups[index] for index, _ in chosen]
        self._step(self._optimizer)
        owner = type(self._optimizer).__name__
        idle = {index: all(param.grad is None for param in params) for index, params in chosen}
        for index, is_idle in idle.items():
            self._counters[index].note_advance(idle=is_idle, who=f"{owner} advances group fields")
        for counters in self._shared:
            counters.note_advance(idle=all(idle.values()), who=f"{owner} advances its own")


def _version(value: object) -> int:
    return version_of(value) if isinstance(value, torch.Tensor) else 0


def _touched(value: object, original: object, version: int) -> bool:
    return value is not original or _version(value) != version


def private_copy(value: object) -> object:
    """A tensor of the same values that nobody else holds; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(first: dict[object, object], second: dict[object, object]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(
        torch.equal(value, other)
        if isinstance(value, torch.Tensor) and isinstance(other := second[key], torch.Tensor)
        else value == second[key]
        for key, value in first.items()
    )
