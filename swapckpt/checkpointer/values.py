"""Values that every rank has its own of: random number generators, positions in the data."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

KEY = "rank-"


def rank_key() -> str:
    """The key under which this rank's own values are saved."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return f"{KEY}{rank}"


class PerRank(Stateful, Generic[T]):
    """A value (or Stateful) of which every rank saves its own and gets its own back.

    Stock DCP keeps the value of one rank for each key. This Stateful puts ``rank-<n>`` before the key. When
    the number of ranks has changed, a rank that the checkpoint has a value of gets that one, and a rank that
    it has none of keeps what it has; ``Checkpointer.load`` warns about these.

    Args:
        value: A Stateful, a mapping of tensors and plain values, or a plain value. After a load ``value`` is
            what was saved (a Stateful has loaded it).
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        value: object = self.value
        return {rank_key(): value.state_dict() if isinstance(value, Stateful) else value}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take this rank's value. Raises KeyError when it is not there."""
        loaded = state_dict[rank_key()]
        value: object = self.value
        if isinstance(value, Stateful):
            value.load_state_dict(cast("dict[str, object]", loaded))
        else:
            self.value = cast("T", loaded)


class RngState(PerRank[Stateful]):
    """The random number generators of this rank: Python's, NumPy's (the global one), torch's on the CPU and
    on the current accelerator. A ready-made Stateful for ``dcp.save`` and ``Checkpointer``."""

    def __init__(self) -> None:
        super().__init__(_Generators())


class _Generators(Stateful):
    def state_dict(self) -> dict[str, object]:
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
        state: dict[str, object] = {
            "python": random.getstate(),
            "numpy": (kind, [int(key) for key in keys], position, has_gauss, gauss),
            "torch": torch.get_rng_state(),
        }
        accelerator = _accelerator()
        if accelerator is not None:
            state[accelerator] = torch.get_device_module(accelerator).get_rng_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        random.setstate(_tuples(state_dict["python"]))
        kind, keys, position, has_gauss, gauss = cast(
            "tuple[str, list[int], int, int, float]", state_dict["numpy"]
        )
        words = np.array(keys, dtype=np.uint32)
        np.random.set_state((kind, words, position, has_gauss, gauss))  # noqa: NPY002
        torch.set_rng_state(cast("torch.Tensor", state_dict["torch"]))
        accelerator = _accelerator()
        if accelerator is not None and accelerator in state_dict:
            torch.get_device_module(accelerator).set_rng_state(state_dict[accelerator])


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def _tuples(value: object) -> tuple[object, ...]:
    """``random.setstate`` wants tuples, whatever a format made of them."""
    assert isinstance(value, list | tuple)
    return tuple(_tuples(each) if isinstance(each, list | tuple) else each for each in value)
