"""What state a parameter that has never been stepped will have, found without stepping it.

A dry step runs the optimizer's own ``step`` on small CPU stand-ins that are thrown away. Every dimension of a
stand-in is a different prime, so the shape of the state it creates tells which dimensions of the parameter
the real state will have.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapckpt._torch import DTensorSpec, StepFunction, local_of, spec_for, spec_of
from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.plan import TensorSpec
from swapckpt.precision import MASTER, MASTER_DTYPE, is_low_precision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True, slots=True)
class StateTemplate:
    """One state value to come: the geometry of a local tensor and its placement, or a plain value."""

    spec: TensorSpec | None
    placement: DTensorSpec | None
    value: object = None  # for values that are not tensors


def home_device(fields: Mapping[str, object], param: Tensor, key: str) -> torch.device:
    """Where unswapped state of ``param`` belongs, by the rule of torch's own ``load_state_dict``.

    Step counters are on the CPU unless the group's implementation wants them by the parameter.
    """
    if key == "step" and not fields.get("fused") and not fields.get("capturable"):
        return torch.device("cpu")
    return local_of(param).device


def describe(
    optimizer: Optimizer,
    step: StepFunction,
    params: Iterable[tuple[int, Tensor]],
    *,
    master_weights: bool = False,
) -> dict[Tensor, dict[str, StateTemplate]]:
    """The state that a first step will create for each of ``params`` (pairs of group index and parameter).

    With ``master_weights`` that is the state of a master for parameters of low precision, and the master.

    Raises:
        UnsupportedOptimizerError: The optimizer cannot step a CPU stand-in, or creates state for a sharded
            parameter whose sharding cannot be told from its shape.
    """
    wanted = list(params)
    standins: dict[object, tuple[int, Tensor]] = {}
    for group, param in wanted:
        if _signature(group, param) not in standins:
            dtype = MASTER_DTYPE if master_weights and is_low_precision(param) else param.dtype
            standins[_signature(group, param)] = (group, _standin(param, dtype))
    try:
        created = dry_step(optimizer, step, list(standins.values()))
    except Exception as error:
        msg = (
            f"{type(optimizer).__name__} cannot step a small CPU parameter ({error}), so its state is not "
            "known before its first step. Step once before exporting or loading its state."
        )
        raise UnsupportedOptimizerError(msg) from error
    described = {
        param: {
            key: _template(param, standins[_signature(group, param)][1], value)
            for key, value in created.get(standins[_signature(group, param)][1], {}).items()
        }
        for group, param in wanted
    }
    for param, templates in described.items() if master_weights else ():
        if is_low_precision(param):
            templates[MASTER] = master_template(param)
    return described


def master_template(param: Tensor) -> StateTemplate:
    """The form of the fp32 master of ``param``."""
    local = local_of(param)
    standin = torch.empty_strided(local.shape, local.stride(), device="meta").to(MASTER_DTYPE)
    spec = TensorSpec(tuple(local.shape), tuple(standin.stride()), MASTER_DTYPE)
    return StateTemplate(spec, spec_for(param, MASTER_DTYPE))


def dry_step(
    optimizer: Optimizer, step: StepFunction, standins: Iterable[tuple[int, Tensor]]
) -> dict[Tensor, dict[str, object]]:
    """The state that one step creates for ``standins`` (pairs of group index and small CPU tensor).

    Neither the optimizer's state nor its groups nor its hooks are involved. The plain implementation is used:
    fused and foreach need not support the CPU.
    """
    groups: list[dict[str, object]] = []
    for index, standin in standins:
        standin.grad = torch.zeros_like(standin)
        options = {
            key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
            for key, value in optimizer.param_groups[index].items()
            if key not in ("params", "param_names")
        }
        options |= {flag: False for flag in ("fused", "foreach") if flag in options}
        groups.append({**options, "params": [standin]})
    live_groups, live_state = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = groups, defaultdict(dict)
    try:
        step(optimizer)
        return dict(optimizer.state)
    finally:
        optimizer.param_groups, optimizer.state = live_groups, live_state


def _signature(group: int, param: Tensor) -> object:
    """Parameters with equal signatures get state of the same form."""
    ones = tuple(size == 1 for size in param.shape)
    return (group, ones, _dim_order(param.stride(), param.shape), param.dtype)


def _dim_order(stride: Iterable[int], shape: Iterable[int]) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory."""
    strides, sizes = list(stride), list(shape)
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], -sizes[dim], dim)))


def _standin_sizes(param: Tensor) -> list[int]:
    return [1 if size == 1 else _PRIMES[dim] for dim, size in enumerate(param.shape)]


def _standin(param: Tensor, dtype: torch.dtype) -> Tensor:
    sizes = _standin_sizes(param)
    order = _dim_order(param.stride(), param.shape)
    dense = torch.zeros([sizes[dim] for dim in order], dtype=dtype, device="cpu")
    return dense.permute([order.index(dim) for dim in range(len(order))]).detach().requires_grad_()


def _template(param: Tensor, standin: Tensor, value: object) -> StateTemplate:
    if not isinstance(value, torch.Tensor):
        return StateTemplate(None, None, value)
    sizes = dict(zip(_standin_sizes(param), param.shape, strict=True))
    shape = tuple(sizes.get(size, size) for size in value.shape)
    if spec_of(param) is None or value.dim() == 0:
        return StateTemplate(TensorSpec(shape, _dense_stride(shape, value), value.dtype), None)
    if value.shape != standin.shape:
        msg = (
            f"The state of a sharded parameter of shape {tuple(param.shape)} has shape {shape}: its sharding "
            "is not known before the first step. Step once before exporting or loading it."
        )
        raise UnsupportedOptimizerError(msg)
    local = local_of(param)
    spec = TensorSpec(tuple(local.shape), tuple(local.stride()), value.dtype)
    return StateTemplate(spec, spec_for(param, value.dtype))


def _dense_stride(shape: tuple[int, ...], like: Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor of ``shape`` with the order of dimensions in memory of ``like``."""
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(_dim_order(like.stride(), like.shape)):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)
