"""Host copies of the small state that stays on the device.

Step counters of fused optimizers and tensors below ``min_numel`` are not worth swapping, but an export must
not touch the device. Each batch's own offload brings them along: gathered on the device into one packed
tensor per dtype, so that a batch costs one more copy and not one per tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapckpt._torch import local_of, spec_of, wrap_local
from swapckpt.plan import Region, SegmentLayout, StateId, TensorSpec, align_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from swapckpt.device import CopyPair
    from swapckpt.memory import HostArena


class Shadow:
    """The host copies of one batch. Valid once the offload that carried them is complete."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._layout: Mapping[StateId, TensorSpec] = {}
        self._mirrors: dict[StateId, Tensor] = {}
        self._runs: list[tuple[torch.dtype, Tensor]] = []  # per dtype: the host bytes of its packed tensor

    def gather(self, small: Mapping[StateId, Tensor]) -> list[CopyPair]:
        """Pack ``small`` (all small device state of the batch) on the compute stream.

        Returns the copies to submit on the offload stream; their sources must live until those are complete.
        """
        ordered = sorted(small.items(), key=lambda item: (str(item[1].dtype), item[0]))
        layout = {name: _contiguous_spec(local_of(tensor)) for name, tensor in ordered}
        if layout != self._layout:
            self._rebuild(layout, dict(ordered))
        return [
            (host, torch.cat([local.reshape(-1) for local in _locals(ordered, dtype)]).view(torch.uint8))
            for dtype, host in self._runs
        ]

    def mirror(self, name: StateId) -> Tensor | None:
        """The host copy of one tensor; None if it was never gathered."""
        return self._mirrors.get(name)

    def _rebuild(self, layout: Mapping[StateId, TensorSpec], small: Mapping[StateId, Tensor]) -> None:
        regions: list[Region] = []
        runs: dict[torch.dtype, Region] = {}
        end = 0
        for spec in layout.values():
            # One dtype lies back to back, as torch.cat packs it; the next one starts aligned.
            begin = end if spec.dtype in runs else align_up(end)
            first = runs[spec.dtype].offset_nbytes if spec.dtype in runs else begin
            end = begin + spec.nbytes
            regions.append(Region(begin, spec.nbytes))
            runs[spec.dtype] = Region(first, end - first)
        segment = self._arena.allocate(SegmentLayout(tuple(regions), align_up(end)))
        self._layout = layout
        self._runs = [(dtype, segment.bytes(run)) for dtype, run in runs.items()]
        self._mirrors = {
            name: wrap_local(segment.mirror(region, spec), spec_of(small[name]))
            for (name, spec), region in zip(layout.items(), regions, strict=True)
        }


def _contiguous_spec(local: Tensor) -> TensorSpec:
    stride, strides = 1, []
    for size in reversed(local.shape):
        strides.append(stride)
        stride *= max(1, size)
    return TensorSpec(tuple(local.shape), tuple(reversed(strides)), local.dtype)


def _locals(ordered: Sequence[tuple[StateId, Tensor]], dtype: torch.dtype) -> list[Tensor]:
    return [local_of(tensor) for _, tensor in ordered if tensor.dtype == dtype]
