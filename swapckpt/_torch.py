"""Every private torch name that swapckpt depends on, in one place.

| name | what it gives |
|---|---|
| ``DTensor._spec``, ``DTensor._local_tensor`` | placement and shard of a DTensor, without an autograd node |
| ``DTensor(local, spec, requires_grad=)`` | wrap a host shard (``from_local`` moves it to the mesh) |
| ``DTensorSpec``, ``TensorMeta`` | a state's own spec: its dtype may not be its parameter's |
| ``Tensor._version`` | whether an optimizer advanced a tensor-valued group field in place |
| ``_optimizer_step_pre_hooks``, ``_optimizer_step_post_hooks`` | step hooks, set aside inside a step |
| ``_wrapped_by_lr_sched``, ``_opt_called`` | the marks of a scheduler's wrapper of ``step`` |
| ``filesystem._StorageInfo`` | where an item lies, as DCP's ``.metadata`` has it | 2.11 - 2.14 |
| ``metadata._MEM_FORMAT_ENCODING`` | how DCP's ``.metadata`` writes a memory format | 2.11 - 2.14 |
| ``TorchDispatchMode``, ``OpOverload._schema`` | which tensors an operation reads and writes |
| ``torch._disable_dynamo`` | as on torch's own ``step``: ``torch.compiler.disable`` imports the compiler |
| ``torch._foreach_copy_`` | thousands of small copies in one call |
| ``_init_optim_state`` (by name) | the fake step of DCP's state-dict helpers |

All of them exist in torch 2.11 to 2.14; a test checks the installed one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import _foreach_copy_ as foreach_copy
from torch._compile import _disable_dynamo as disable_dynamo
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.tensor.placement_types import Placement
    from torch.optim import Optimizer

__all__ = [
    "DTensor",
    "DTensorSpec",
    "MemoryFormatEncoding",
    "OperationWatch",
    "StepFunction",
    "StorageInfo",
    "called_by_fake_step",
    "disable_dynamo",
    "foreach_copy",
    "is_scheduler_wrapper",
    "local_of",
    "spec_for",
    "spec_like",
    "spec_of",
    "track_step_calls",
    "version_of",
    "without_step_hooks",
    "wrap_local",
]


def local_of(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or the tensor itself. No copy, no communication."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001


def spec_of(tensor: Tensor) -> DTensorSpec | None:
    """Mesh, placements and global geometry of a DTensor; None for a plain tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None  # noqa: SLF001


def spec_for(param: Tensor, dtype: torch.dtype) -> DTensorSpec | None:
    """The spec of a state tensor that is shaped and sharded like ``param`` but has its own dtype."""
    spec = spec_of(param)
    if spec is None:
        return None
    meta = TensorMeta(param.shape, param.stride(), dtype)
    return DTensorSpec(mesh=spec.mesh, placements=spec.placements, tensor_meta=meta)


def spec_like(param: Tensor, placements: tuple[Placement, ...], *, like: Tensor) -> DTensorSpec | None:
    """The spec of a state tensor on the mesh of ``param``: ``like`` (on the meta device) is all of it."""
    spec = spec_of(param)
    if spec is None:
        return None
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    return DTensorSpec(mesh=spec.mesh, placements=placements, tensor_meta=meta)


def wrap_local(local: Tensor, spec: DTensorSpec | None) -> Tensor:
    """``local`` as a DTensor of ``spec``, over the same memory; ``local`` itself without a spec."""
    return local if spec is None else DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def version_of(tensor: Tensor) -> int:
    """A counter that every in-place write raises."""
    return tensor._version  # noqa: SLF001


class StepFunction(Protocol):
    """A ``step`` function, unbound: the optimizer is the first argument."""

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class OperationSeen(Protocol):
    """Called for every tensor that an operation reads or writes."""

    def __call__(self, tensor: Tensor, what: str, /, *, is_write: bool) -> None: ...


class _StepWrapper(Protocol):
    _wrapped_by_lr_sched: bool


class _Scheduled(Protocol):
    _opt_called: bool


def is_scheduler_wrapper(step: object) -> bool:
    """True for the wrapper that ``torch.optim.lr_scheduler`` leaves on an optimizer instance."""
    return hasattr(step, "_wrapped_by_lr_sched")


def track_step_calls(optimizer: Optimizer) -> StepFunction:
    """A fresh wrapper like the scheduler's own, around the ``step`` of the optimizer's present class.

    The scheduler's wrapper has captured the function of the class at the time: after the class changed it
    would go on calling the old one.
    """
    reference = weakref.ref(optimizer)
    function = cast("StepFunction", type(optimizer).step)

    @functools.wraps(function)
    def step(*args: object, **kwargs: object) -> object:
        target = reference()
        if target is None:
            msg = "The optimizer of this step function no longer exists."
            raise ReferenceError(msg)
        cast("_Scheduled", target)._opt_called = True  # noqa: SLF001
        return function(target, *args, **kwargs)

    cast("_StepWrapper", step)._wrapped_by_lr_sched = True  # noqa: SLF001
    return step


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Set the step hooks of ``optimizer`` aside: they have fired, or will, around the whole step.

    A subclass's ``step`` may call its base's, which torch has wrapped as well: without this the hooks would
    fire again for every batch. (Hooks for all optimizers of the process still do.)
    """
    pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001
    optimizer._optimizer_step_pre_hooks = OrderedDict()  # noqa: SLF001
    optimizer._optimizer_step_post_hooks = OrderedDict()  # noqa: SLF001
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = pre  # noqa: SLF001
        optimizer._optimizer_step_post_hooks = post  # noqa: SLF001


def called_by_fake_step(max_depth: int = 12) -> bool:
    """True when DCP's state-dict helpers are initialising the state of a fresh optimizer by a fake step."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to tell this call from a real first step
    for _ in range(max_depth):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name in ("_init_optim_state", "init_optim_state"):
            return True
    return False


class OperationWatch(TorchDispatchMode):
    """Tells ``seen`` of every tensor that torch's operations of the calling thread read or write.

    ``seen(local, name of the operation, is_write=...)``; views are no access.
    """

    def __init__(self, seen: OperationSeen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(  # type: ignore[explicit-any] # OpOverload is generic over any signature
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        del types
        kwargs = kwargs or {}
        for index, argument in enumerate(() if func.is_view else func._schema.arguments):  # noqa: SLF001
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self._seen(local_of(tensor), str(func), is_write=is_write)
        return func(*args, **kwargs)
