"""A snapshot: the state exactly as it is now, readable while training goes on, without a copy of the
mirrors."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapckpt._torch import local_of, spec_of, wrap_local
from swapckpt.fence import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import Tensor

    from swapckpt.memory import HostSegment
    from swapckpt.swap import Swap


_IMMUTABLE = (int, float, bool, str, bytes, type(None))


def host_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the host; of a DTensor, with its placement."""
    return wrap_local(local_of(tensor).detach().to("cpu", copy=True), spec_of(tensor))


def _address(tensor: Tensor) -> int:
    """Where the local elements lie on the host; 0, which no mirror has, when they lie in no such memory."""
    # Run for each of tens of thousands of tensors while training waits: every call in here is felt.
    local = tensor if type(tensor) is torch.Tensor else local_of(tensor)
    return local.data_ptr() if local.is_cpu and local.layout is torch.strided else 0


@dataclass(frozen=True, slots=True)
class _Leased:
    """A segment, and the addresses of the tensors in it that somebody is going to read."""

    segment: HostSegment
    unread: set[int]


class Snapshot:
    """The state dict of one moment. A context manager; leaving it gives all memory back to the step.

    Call sequence (per rank):

    1. training thread, between steps: made by ``StateManager.snapshot()``. Mirrors are leased; scalars, group
       settings and small tensors are copied.
    2. any thread: read ``state_dict``. Steps go on meanwhile: an offload that reaches a leased segment is
       redirected or waits. ``segments`` gives the order in which the next step will reach them.
    3. any thread: ``written(tensor)`` when a tensor of ``state_dict`` is needed no more; the last one of a
       segment releases it. ``close`` (or leaving the ``with``) releases everything else.

    Reading a tensor of ``state_dict`` after its release gives the values of a later step.

    Args:
        state_dict: Nested mappings of tensors and values; mirrors among the tensors are leased.
        swaps: Of the optimizers whose mirrors may be in it.
        copy_tensor: Makes the copy of a tensor that is no mirror.
    """

    def __init__(
        self,
        state_dict: dict[str, object],
        swaps: Sequence[Swap],
        *,
        copy_tensor: Callable[[Tensor], Tensor] = host_copy,
    ) -> None:
        self._copy_tensor = copy_tensor
        self._leased: dict[int, _Leased] = {}  # by the address of a mirror
        guarded = []
        for swap in swaps:
            for batch in swap.table.batches:
                guarded += [(swap.gate, segment) for segment in batch.segments]
                leased = {segment: _Leased(segment, set()) for segment in batch.segments}
                for tensor in batch.tensors:
                    if tensor.region.nbytes:  # an empty one lies nowhere
                        self._leased[tensor.address] = leased[tensor.segment]
        self._lease = Lease(guarded)
        try:
            self.state_dict: dict[str, object] = {
                key: self._frozen(value) for key, value in state_dict.items()
            }
        except BaseException:
            self._lease.close()
            raise

    def _frozen(self, value: object) -> object:
        """``value`` with everything copied that is not under the lease."""
        if isinstance(value, torch.Tensor):
            address = _address(value)
            leased = self._leased.get(address)
            if leased is None:
                return self._copy_tensor(value)
            leased.unread.add(address)
            return value
        if type(value) in _IMMUTABLE:
            return value
        if isinstance(value, dict):
            return {key: self._frozen(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            entries = [self._frozen(each) for each in value]
            return entries if isinstance(value, list) else tuple(entries)
        return copy.deepcopy(value)

    @property
    def segments(self) -> tuple[HostSegment, ...]:
        """What is still leased, in the order in which the next step overwrites it."""
        return self._lease.segments

    def segment_of(self, tensor: Tensor) -> HostSegment | None:
        """The leased segment a tensor of ``state_dict`` lies in; None for one that was copied."""
        leased = self._leased.get(_address(tensor))
        return None if leased is None else leased.segment

    def written(self, tensor: Tensor) -> None:
        """Say that ``tensor`` has been read; its segment is released when all of its tensors have."""
        address = _address(tensor)
        leased = self._leased.get(address)
        if leased is not None:
            leased.unread.discard(address)
            if not leased.unread:
                self._lease.release(leased.segment)

    def close(self) -> None:
        """Release whatever is still leased. Closing twice does nothing."""
        self._lease.close()

    def __enter__(self) -> Snapshot:  # noqa: PYI034 - typing.Self is not in Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
