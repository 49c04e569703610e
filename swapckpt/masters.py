"""Step fp32 masters in the place of low-precision parameters.

[Note: no stale master] The parameter is the truth that the model computes with; the master only knows it more
exactly. Whoever writes a parameter (a load of the model alone, an average copied in) need not know of the
master: before each update, a parameter that is not the rounding of its master gives the master its value. The
comparison and the choice are made on the device, for a whole local shard at a time, without asking the host.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from swapckpt._torch import local_of, spec_for, wrap_local
from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.precision import MASTER, MASTER_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from swapckpt.device import Device
    from swapckpt.state import Batch, OptimizerState, ParamState

    Stepped = list[tuple[ParamState, Tensor]]


@contextmanager
def masters_of(batch: Batch, state: OptimizerState, device: Device) -> Iterator[Mapping[Tensor, Tensor]]:
    """Per low-precision parameter of an active batch the master to step in its place.

    Inside, ``state`` is that of the masters, and their gradients are those of the parameters as fp32, which
    take device memory until the end. Leaving normally writes the parameters.

    Raises:
        UnsupportedOptimizerError: On leaving: the optimizer keeps state of its own under the master's key.
    """
    stepped: Stepped = []
    cast: list[Tensor] = []
    try:
        for entry in batch.active:
            if entry.has_master:
                _take_place(entry, state, stepped)
        for entry, master in stepped:
            assert entry.param.grad is not None
            master.grad = entry.param.grad.detach().to(MASTER_DTYPE)
            cast.append(local_of(master.grad))
            device.hold(cast[-1])
        yield {entry.param: master for entry, master in stepped}
        with torch.no_grad():
            for entry, master in stepped:
                local_of(entry.param).copy_(local_of(master))
    finally:
        for entry, master in stepped:
            master.grad = None
            _give_back(entry, master, state)
        for grad in cast:
            device.drop(grad)


def _take_place(entry: ParamState, state: OptimizerState, stepped: Stepped) -> None:
    param = entry.param.detach()
    values = state.get(entry.param)
    known = values.pop(MASTER, None) if values else None
    if isinstance(known, torch.Tensor):
        stepped.append((entry, known))
        _refresh(local_of(known), local_of(param))
    else:
        local = local_of(param).to(MASTER_DTYPE)
        stepped.append((entry, wrap_local(local, spec_for(param, MASTER_DTYPE))))
    if values:
        state[stepped[-1][1]] = values


def _refresh(master: Tensor, param: Tensor) -> None:
    """See [Note: no stale master]."""
    stale = (master.to(param.dtype) != param).any()
    torch.where(stale, param, master, out=master)


def _give_back(entry: ParamState, master: Tensor, state: OptimizerState) -> None:
    values = state.pop(master, {})
    taken = MASTER in values
    values[MASTER] = master
    state[entry.param] = values
    if taken:
        msg = (
            f"The optimizer keeps state of its own under {MASTER!r} (parameter {entry.name}), which is the "
            "key of fp32 masters. It cannot be swapped with master_weights=True."
        )
        raise UnsupportedOptimizerError(msg)
