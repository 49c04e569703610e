"""Runs a step plan: load batch n+k, update batch n, offload batch n-1. The only file with stream waits.

[Note: no reuse without a wait] A staging buffer or a host region is written only behind the event of its last
reader or writer. The plan says which operation follows which; ``_submit`` turns every such edge into a wait
of one stream for the event of another. Three more orders are not between operations of one plan:

- fresh staging memory may still be in use by kernels queued on the compute stream: the load stream waits for
  an event recorded there after the allocation;
- a buffer is re-sized, and tensors that an update created are freed, only after a host wait for their
  offload;
- a mirror counts as written only after a *host* wait for the event that covers its offload: stream order is
  not enough for a reader on the host, and a device-wide synchronize proves nothing after a failed copy.
"""

from __future__ import annotations

from contextlib import suppress
from traceback import clear_frames
from typing import TYPE_CHECKING

from swapckpt.errors import StepError, SwapCkptError, TransferError
from swapckpt.memory import StagingRing
from swapckpt.plan import Op, OpKind, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from swapckpt.config import SwapConfig
    from swapckpt.device import Device, Event, Stream
    from swapckpt.fence import Gate
    from swapckpt.memory import HostSegment
    from swapckpt.state import Batch, OptimizerState, StateTable


class Pipeline:
    """Moves the batches of one optimizer through the device.

    Call sequence (the thread that steps; every rank on its own): ``run`` once per step. It returns when every
    offload is complete on the host, or raises StepError after ``StateTable.abandon`` has brought everything
    home; ``updates_started`` then tells whether parameters or state may be torn.
    """

    def __init__(self, table: StateTable, device: Device, *, config: SwapConfig, gate: Gate) -> None:
        self._table = table
        self._device = device
        self._config = config
        self.gate = gate
        self._ring = StagingRing(device, config.staging_buffers, timeout_secs=config.timeout_secs)
        self._streams: dict[OpKind, Stream] = {}
        self._events: dict[tuple[OpKind, int], Event] = {}
        self._plan = StepPlan(0, config.staging_buffers)
        self._operations: tuple[Op, ...] = ()
        self._batches: Sequence[Batch] = ()
        self._largest_nbytes = 0
        self.updates_started = False

    def run(
        self,
        state: OptimizerState,
        update: Callable[[Batch], None],
        *,
        batches: Sequence[Batch] | None = None,
        with_others: bool = False,
    ) -> None:
        """One step. ``update(batch)`` steps the parameters of one batch on the compute stream.

        ``batches`` are those of the table, or slices in the place of some of them. ``with_others`` says that
        other ranks send updates meanwhile: whenever it fails, something is torn.

        Raises:
            StepError: An allocation, copy or update failed; the cause is chained.
        """
        self.updates_started = with_others
        self._batches = self._table.batches if batches is None else batches
        self._begin()
        op: Op | None = None
        try:
            for op in self._operations:
                self._submit(op, state=state, update=update)
            self._drain()
        except BaseException as error:
            # The frames that failed hold views of staging; the error, which may be kept, holds the frames.
            clear_frames(error.__traceback__)
            if op is None or not isinstance(error, Exception):
                self._fail(op, state)
                raise
            failed, cause = self._culprit(op, error)
            self._fail(op, state)
            try:
                raise StepError(self._describe(failed, cause)) from cause
            finally:
                del cause  # it holds this frame: in a cycle all of it would stay until a collection
        self._ring.close(release=self._config.release_staging)

    def _begin(self) -> None:
        device, batches = self._device, self._batches
        if self._plan.num_batches != len(batches):
            self._plan = StepPlan(len(batches), self._config.staging_buffers)
            self._operations = self._plan.operations()
        self._largest_nbytes = max((batch.staged_nbytes for batch in batches), default=0)
        self._events.clear()
        self._streams = {
            OpKind.LOAD: device.load,
            OpKind.UPDATE: device.compute(),
            OpKind.OFFLOAD: device.offload,
        }

    def _submit(self, op: Op, *, state: OptimizerState, update: Callable[[Batch], None]) -> None:
        stream, batch = self._streams[op.kind], self._batches[op.batch]
        for dependency in op.after:
            stream.wait(self._events[dependency])
        slot_index = self._plan.buffer_of(op.batch)
        if op.kind is OpKind.LOAD:
            self._load(batch, slot_index, state=state)
        elif op.kind is OpKind.UPDATE:
            self._update(batch, slot_index, state=state, update=update)
        else:
            self._offload(batch, slot_index, state=state)
        event = self._events[op.key] = stream.record()
        if op.kind is OpKind.OFFLOAD:
            self._ring.slot(slot_index).done = event

    def _load(self, batch: Batch, slot_index: int, *, state: OptimizerState) -> None:
        slot, stream = self._ring.slot(slot_index), self._streams[OpKind.LOAD]
        if slot.created:
            self._ring.settle(slot)
        creates = batch.creates_state(state)
        needed = self._table.place(batch)
        before = slot.buffer
        # One size for all slots, allocated once per step, unless new state is to come on top of it.
        self._ring.reserve(slot, self._largest_nbytes if needed and not creates else needed, exact=creates)
        if slot.buffer is not before:
            stream.wait(self._streams[OpKind.UPDATE].record())
        pairs = self._table.start_load(batch, slot.buffer)
        if pairs:
            with stream.span("load", batch=batch.index, nbytes=_nbytes(pairs)):
                stream.copy(pairs)

    def _update(
        self, batch: Batch, slot_index: int, *, state: OptimizerState, update: Callable[[Batch], None]
    ) -> None:
        slot = self._ring.slot(slot_index)
        if batch.moving:
            self._table.to_device(batch, slot.buffer, state)
        self._table.upload_parked(batch, state)
        self.updates_started = True
        with self._streams[OpKind.UPDATE].span("update", batch=batch.index):
            update(batch)
        for tensor in self._table.discover(batch, state):
            if tensor.source is not None and tensor.source.device == self._device.device:
                self._ring.hold(slot, tensor.source)
        slot.shadowed = self._table.shadow_small(batch, state)

    def _offload(self, batch: Batch, slot_index: int, *, state: OptimizerState) -> None:
        slot, stream = self._ring.slot(slot_index), self._streams[OpKind.OFFLOAD]
        for segment in list(batch.segments):
            if any(tensor.segment is segment for tensor in batch.moving):
                self._pass_gate(batch, segment, state=state)
        pairs = self._table.start_offload(batch, slot.buffer) + slot.shadowed
        if pairs:
            with stream.span("offload", batch=batch.index, nbytes=_nbytes(pairs)):
                stream.copy(pairs)
        self._table.bind_mirrors(batch, state)

    def _pass_gate(self, batch: Batch, segment: HostSegment, *, state: OptimizerState) -> None:
        target = self.gate.before_overwrite(segment)
        if target is segment:
            return
        staying = batch.bystanders(segment)  # not offloaded now: their bytes have to come along
        if staying:
            self._finish_loads()
        for tensor in staying:
            target.bytes(tensor.region).copy_(segment.bytes(tensor.region))
        for each in batch.sharing:
            self._table.redirect(each, segment, target, state=state)

    def _finish_loads(self) -> None:
        """Host-wait for every load so far: the spare that the host is about to write may have been the mirror
        of an earlier batch of this step."""
        loads = [event for (kind, _), event in self._events.items() if kind is OpKind.LOAD]
        if loads:
            loads[-1].synchronize(self._config.timeout_secs)

    def _drain(self) -> None:
        """Host-wait for every offload, then publish: only now is a mirror known to be written."""
        for (kind, index), event in self._events.items():
            if kind is OpKind.OFFLOAD:
                event.synchronize(self._config.timeout_secs)
                self._table.to_host(self._batches[index])

    def _culprit(self, op: Op, error: Exception) -> tuple[tuple[OpKind, int], Exception]:
        """The operation that failed, and how: a copy reports its failure only to those who wait for it later.

        Events are in order of submission, so the first one that reports a failure is the culprit's own.
        """
        if isinstance(error, TransferError):
            for key, event in self._events.items():
                try:
                    event.synchronize(self._config.timeout_secs)
                except TransferError as cause:  # noqa: PERF203 - which one raises is the question
                    return key, cause
        return op.key, error

    def _fail(self, op: Op | None, state: OptimizerState) -> None:
        # The first cause is being raised; a stream that cannot even be waited for must not hide it.
        with suppress(SwapCkptError):
            self._device.reset()
        torn = op is not None and op.kind is OpKind.UPDATE and self.updates_started
        self._table.abandon(state, torn=self._batches[op.batch] if op is not None and torn else None)
        self._ring.close(release=True)

    def _describe(self, failed: tuple[OpKind, int], error: Exception) -> str:
        kind, index = failed
        names = [entry.name for entry in self._batches[index].params]
        shown = ", ".join([*names[:4], "..."] if len(names) > 4 else names)
        consequence = (
            "Parameters and state may be partly updated: restore both from a checkpoint."
            if self.updates_started
            else "Nothing was updated: parameters and state are unchanged."
        )
        reason = str(error).rstrip(".")
        return f"The step failed in batch {index} ({kind.value}; {shown}): {reason}. {consequence}"


def _nbytes(pairs: list[tuple[Tensor, Tensor]]) -> int:
    return sum(destination.nbytes for destination, _ in pairs)
