"""What adopting an optimizer gives and costs, told before the first step."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from swapckpt.memory import HostArena
from swapckpt.plan import Cut, Item, Op, OpKind, StepPlan, align_up, cut_batches, lay_out
from swapckpt.precision import MASTER_DTYPE, is_low_precision
from swapckpt.state import ineligibility
from swapckpt.update import why_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from swapckpt.config import SwapConfig
    from swapckpt.device import Device
    from swapckpt.plan import TensorSpec

_PROBE_NBYTES = 64 << 20


_GATHERED_TENSORS = 3  # the parameter, its gradient and its momentum


@dataclass(frozen=True, slots=True)
class WholeMatrix:
    """A matrix that ``gather_matrices=True`` gathers on its owner."""

    numel: int
    is_here: bool  # this rank is the owner


@dataclass(frozen=True, slots=True)
class ParamFootprint:
    """State of one parameter on this rank: swapped bytes, and what stays where it is, with the reason."""

    name: str
    nbytes: int  # of the parameter's own local shard: what batches are balanced by
    swapped_nbytes: int
    resident: tuple[tuple[str, int], ...] = ()  # (reason, bytes)
    master_grad_nbytes: int = 0  # of its gradient as fp32, while its master is stepped
    gathered_nbytes: int = 0  # of whole parameter, gradient and momentum, on whichever rank gathers them
    gathered_here_nbytes: int = 0  # the same if that is this rank
    numel: int = 0
    why_whole: str | None = None  # None: stepped in slices where it is larger than a batch

    @property
    def item(self) -> Item:
        """What batches are cut by."""
        return Item(self.numel, self.nbytes, self.why_whole is None)


@dataclass(frozen=True, slots=True)
class SwapReport:
    """Figures of one rank. ``str()`` renders them for a terminal.

    ``step_secs`` is the time the transfers take when nothing else limits the step; an update that takes
    longer on the device hides them.
    """

    device_freed_nbytes: int
    staging_peak_nbytes: int
    host_nbytes: int
    num_batches: int
    largest_batch_nbytes: int
    largest_param: str
    largest_param_nbytes: int
    gbps: float
    step_secs: float
    resident: tuple[tuple[str, int, int], ...]  # (reason, number of tensors, bytes)
    master_grads_peak_nbytes: int = 0  # fp32 gradients of a batch whose masters are stepped
    gathered_peak_nbytes: int = 0  # whole matrices, gradients and momenta that this rank holds for a batch
    largest_gathered: str = "none"
    largest_gathered_nbytes: int = 0  # of that matrix, its gradient and its momentum, on its owner
    num_sliced: int = 0  # parameters larger than a batch that are stepped in slices
    oversized: tuple[tuple[str, str, int], ...] = ()  # stepped whole: (name, reason, bytes of its batch)

    def __str__(self) -> str:
        lines = [
            f"device memory freed        {format_nbytes(self.device_freed_nbytes)}",
            f"staging peak in a step     {format_nbytes(self.staging_peak_nbytes)}",
            *(
                [f"fp32 gradients in a step   {format_nbytes(self.master_grads_peak_nbytes)}"]
                if self.master_grads_peak_nbytes
                else []
            ),
            f"host memory for mirrors    {format_nbytes(self.host_nbytes)}",
            f"batches                    {self.num_batches}",
            f"largest batch              {format_nbytes(self.largest_batch_nbytes)}",
            f"largest parameter          {format_nbytes(self.largest_param_nbytes)}: {self.largest_param}",
            f"transfers per step         {self.step_secs:.3g} s at {self.gbps:.3g} GB/s in each direction",
        ]
        if self.largest_gathered_nbytes:
            here, largest = (
                format_nbytes(self.gathered_peak_nbytes),
                format_nbytes(self.largest_gathered_nbytes),
            )
            lines.append(f"whole matrices in a step   {here} on this rank")
            lines.append(f"largest whole matrix       {largest} on its owner: {self.largest_gathered}")
        if self.num_sliced:
            lines.append(f"stepped in slices          {self.num_sliced} parameters larger than a batch")
        lines += [
            f"stepped whole              {name}: {format_nbytes(nbytes)} in one batch, since {reason}"
            for name, reason, nbytes in self.oversized
        ]
        lines += [
            f"stays where it is          {format_nbytes(nbytes)} in {count} tensors: {reason}"
            for reason, count, nbytes in self.resident
        ]
        return "\n".join(lines)


def format_nbytes(nbytes: float) -> str:
    """``1.5 GiB``: three significant digits, binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 999.5:  # 1000 to 1023 would need four digits
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def footprint(
    param: Tensor,
    specs: Iterable[tuple[str, TensorSpec]],
    *,
    name: str,
    optimizer: type[Optimizer],
    config: SwapConfig,
    matrix: WholeMatrix | None = None,
) -> ParamFootprint:
    """Sort the state of one parameter (key and local geometry) into swapped and resident.

    ``matrix`` is that of which ``param`` is a shard, if it is gathered for its update.
    """
    swapped, resident = 0, []
    whole = why_whole(optimizer, param, config)
    for key, spec in specs:
        standin = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        reason = ineligibility(standin, key=key, config=config, device=standin.device)
        if reason is None:
            swapped += align_up(spec.nbytes)
        else:
            resident.append((reason, spec.nbytes))
        is_scalar, is_swapped = spec.numel <= 1, reason is None
        if is_scalar == is_swapped or (is_swapped and spec.shape != tuple(param.shape)):
            whole = whole or f"its {key} cannot be divided"
    has_master = config.master_weights and is_low_precision(param)
    grad_nbytes = param.numel() * MASTER_DTYPE.itemsize if has_master else 0
    itemsize = MASTER_DTYPE.itemsize if has_master else param.element_size()
    gathered_nbytes = _GATHERED_TENSORS * matrix.numel * itemsize if matrix is not None else 0
    return ParamFootprint(
        name,
        param.nbytes,
        swapped,
        tuple(resident),
        master_grad_nbytes=grad_nbytes,
        gathered_nbytes=gathered_nbytes,
        gathered_here_nbytes=gathered_nbytes if matrix is not None and matrix.is_here else 0,
        numel=param.numel(),
        why_whole=whole,
    )


def build_report(
    footprints: Sequence[ParamFootprint], config: SwapConfig, *, gbps: float, cuts: Sequence[Cut] = ()
) -> SwapReport:
    """Figures for one rank. ``cuts`` are the batches of an adopted optimizer; default those it would get."""
    items = [each.item for each in footprints]
    cuts = cuts or cut_batches(items, config.swap_times, min_slice_numel=config.smallest_slice_numel)
    batches, grads, wholes = (
        [nbytes for cut in cuts for nbytes in _parts(cut, footprints, attrgetter(field))]
        for field in ("swapped_nbytes", "master_grad_nbytes", "gathered_here_nbytes")
    )
    budget_nbytes = -(-sum(item.nbytes for item in items) // config.swap_times)
    oversized = [
        (each.name, each.why_whole, each.swapped_nbytes)
        for each in footprints
        if each.why_whole is not None and each.nbytes > budget_nbytes
        if each.swapped_nbytes and each.numel >= 2 * config.smallest_slice_numel
    ]
    largest = max(footprints, key=lambda each: each.swapped_nbytes, default=ParamFootprint("none", 0, 0))
    gathered = max(footprints, key=attrgetter("gathered_nbytes"), default=largest)
    resident: dict[str, list[int]] = defaultdict(list)
    for each in footprints:
        for reason, nbytes in each.resident:
            resident[reason].append(nbytes)

    def duration_secs(op: Op) -> float:
        return 0.0 if op.kind is OpKind.UPDATE else batches[op.batch] / (gbps * 1e9)

    return SwapReport(
        device_freed_nbytes=sum(batches),
        staging_peak_nbytes=min(config.staging_buffers, len(batches)) * max(batches, default=0),
        host_nbytes=sum(batches),
        num_batches=len(batches),
        largest_batch_nbytes=max(batches, default=0),
        largest_param=largest.name,
        largest_param_nbytes=largest.swapped_nbytes,
        gbps=gbps,
        step_secs=StepPlan(len(batches), config.staging_buffers).makespan_secs(duration_secs),
        num_sliced=sum(bool(cut.slices) for cut in cuts),
        oversized=tuple(oversized),
        master_grads_peak_nbytes=max(grads, default=0),
        gathered_peak_nbytes=max(wholes, default=0),
        largest_gathered=gathered.name if gathered.gathered_nbytes else "none",
        largest_gathered_nbytes=gathered.gathered_nbytes,
        resident=tuple((reason, len(sizes), sum(sizes)) for reason, sizes in sorted(resident.items())),
    )


def _parts(
    cut: Cut, footprints: Sequence[ParamFootprint], nbytes_of: Callable[[ParamFootprint], int]
) -> list[int]:
    """Bytes of every batch that ``cut`` is run as."""
    chosen = footprints[cut.items.start : cut.items.stop]
    total = sum(nbytes_of(each) for each in chosen)
    if not cut.slices:
        return [total]
    (sliced,) = chosen
    return [total * len(elements) // sliced.numel for elements in cut.slices]


def measure_gbps(device: Device, *, nbytes: int = _PROBE_NBYTES, timeout_secs: float = 60.0) -> float:
    """Bandwidth of the slower direction between host mirrors and device memory, in GB/s, from one copy
    each."""
    segment = HostArena(device).allocate(lay_out([nbytes]))
    host, buffer = segment.bytes(segment.layout.regions[0]), device.allocate(nbytes)
    try:
        slowest = elapsed = 0.0
        device.load.wait(device.compute().record())
        for stream, pair in ((device.load, (buffer, host)), (device.offload, (host, buffer))):
            for _ in range(2):  # the first copy touches fresh memory
                begin = time.perf_counter()
                stream.copy([pair])
                stream.record().synchronize(timeout_secs)
                elapsed = time.perf_counter() - begin
            slowest = max(slowest, elapsed)
        return nbytes / slowest / 1e9
    finally:
        device.release(buffer)
