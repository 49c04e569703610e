"""A ``torch.accelerator`` device (CUDA, NPU, XPU, ...): its own streams, events and pinned memory.

Only the tensor's device module is asked (``torch.get_device_module``); no vendor package is imported. One
family of streams and events is used throughout, since mixing ``torch.Event`` with a module's own streams
fails on some back ends.
"""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch

from swapckpt.device.base import CopyPair, Event, Ledger
from swapckpt.errors import TransferError, TransferTimeoutError
from swapckpt.trace import Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

_POLL_SECS = 20e-6
_MAX_POLL_SECS = 2e-3


class NativeEvent(Protocol):
    """``torch.<device>.Event``."""

    def record(self, stream: NativeStream) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: NativeEvent) -> float: ...


class NativeStream(Protocol):
    """``torch.<device>.Stream``."""

    def wait_event(self, event: NativeEvent) -> None: ...


class DeviceModule(Protocol):
    """Every name of a device module that swapckpt uses."""

    def Stream(self, device: torch.device) -> NativeStream: ...  # noqa: N802 - torch's name
    def Event(self, *, enable_timing: bool = False) -> NativeEvent: ...  # noqa: N802 - torch's name
    def current_stream(self, device: torch.device) -> NativeStream: ...
    def stream(self, stream: NativeStream) -> AbstractContextManager[None]: ...


@runtime_checkable
class CapturingModule(Protocol):
    """A device module with graphs (CUDA, NPU)."""

    def is_current_stream_capturing(self) -> bool: ...


class AcceleratorEvent:
    """A point in an :class:`AcceleratorStream`, waited for by polling."""

    def __init__(self, native: NativeEvent, stream: str) -> None:
        self.native = native
        self._stream = stream

    def query(self) -> bool:
        return self.native.query()

    def synchronize(self, timeout_secs: float) -> None:
        # Polling, not Event.synchronize(): after a dropped copy that call never returns on some back ends.
        deadline = time.monotonic() + timeout_secs
        pause = _POLL_SECS
        try:
            while not self.native.query():
                if time.monotonic() > deadline:
                    msg = (
                        f"A copy on the {self._stream} stream did not complete within {timeout_secs} s. "
                        "The device may have dropped it; its mirrors were not published."
                    )
                    raise TransferTimeoutError(msg)
                time.sleep(pause)
                pause = min(2 * pause, _MAX_POLL_SECS)
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise _reported(self._stream, error) from error


def _reported(stream: str, error: RuntimeError) -> TransferError:
    """The error of earlier work. Any call can be the one that reports it, recording an event included."""
    return TransferError(f"The device reported an error for the {stream} stream: {error}")


class AcceleratorStream:
    """A native stream. Waits order work on the device and do not block the host."""

    def __init__(self, name: str, native: NativeStream, device: AcceleratorDevice) -> None:
        self.name = name
        self.native = native
        self._device = weakref.ref(device)  # the device owns the stream
        self._module, self._ledger = device.module, device.ledger

    def wait(self, event: Event) -> None:
        if not isinstance(event, AcceleratorEvent):
            msg = f"The {self.name} stream can only wait for events of its own device, got {event!r}."
            raise TypeError(msg)
        try:
            self.native.wait_event(event.native)
        except RuntimeError as error:
            raise _reported(self.name, error) from error

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        try:
            with self._module.stream(self.native):
                for destination, source in pairs:
                    to_device = destination.device.type != "cpu"
                    # Contiguous equals only: anything else is staged through temporaries by the back ends.
                    destination.copy_(source, non_blocking=True)
                    count = self._ledger.count_load if to_device else self._ledger.count_offload
                    count(destination.nbytes)
        except RuntimeError as error:  # of a copy, of earlier work, or of going back to the other stream
            raise _reported(self.name, error) from error

    def record(self) -> AcceleratorEvent:
        try:
            native = self._module.Event()
            native.record(self.native)
        except RuntimeError as error:
            raise _reported(self.name, error) from error
        return AcceleratorEvent(native, self.name)

    def span(self, name: str, *, batch: int, nbytes: int = 0) -> AbstractContextManager[None]:
        device = self._device()
        if device is None or device.timeline is None:
            return nullcontext()
        return self._recorded_span(device, name, batch, nbytes)

    @contextmanager
    def _recorded_span(self, device: AcceleratorDevice, name: str, batch: int, nbytes: int) -> Iterator[None]:
        begin, end = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
        begin.record(self.native)
        yield
        end.record(self.native)
        device.pending_spans.append(PendingSpan(self.name, name, batch, nbytes, begin, end))


@dataclass(frozen=True, slots=True)
class PendingSpan:
    """A span whose times are read from the device's events once they are complete."""

    stream: str
    name: str
    batch: int
    nbytes: int
    begin: NativeEvent
    end: NativeEvent

    def resolve(self, origin: NativeEvent, origin_ns: int) -> Span:
        begin_ns = origin_ns + int(origin.elapsed_time(self.begin) * 1e6)
        end_ns = origin_ns + int(origin.elapsed_time(self.end) * 1e6)
        return Span(self.stream, self.name, self.batch, begin_ns, end_ns, self.nbytes)


class AcceleratorDevice:
    """Streams and memory of one accelerator device."""

    def __init__(self, device: torch.device, *, timeout_secs: float = 600.0) -> None:
        self.module = cast("DeviceModule", torch.get_device_module(device))
        self._torch_device = device
        self.timeout_secs = timeout_secs
        self.ledger = Ledger()
        self._timeline: Timeline | None = None
        self.pending_spans: list[PendingSpan] = []
        self.load = AcceleratorStream("load", self.module.Stream(device=device), self)
        self.offload = AcceleratorStream("offload", self.module.Stream(device=device), self)

    @property
    def device(self) -> torch.device:
        return self._torch_device

    @property
    def is_host(self) -> bool:
        return False

    @property
    def timeline(self) -> Timeline | None:
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        if self._timeline is not None and timeline is None:
            self._resolve_spans(self._timeline)
        self._timeline = timeline
        self.pending_spans.clear()
        if timeline is not None:
            self._origin = self.module.Event(enable_timing=True)
            self._origin.record(self.module.current_stream(self._torch_device))
            self._origin_ns = time.perf_counter_ns()

    def _resolve_spans(self, timeline: Timeline) -> None:
        AcceleratorEvent(self.compute().record().native, "compute").synchronize(self.timeout_secs)
        for pending in self.pending_spans:
            timeline.add(pending.resolve(self._origin, self._origin_ns))

    def compute(self) -> AcceleratorStream:
        return AcceleratorStream("compute", self.module.current_stream(self._torch_device), self)

    def is_capturing(self) -> bool:
        return isinstance(self.module, CapturingModule) and self.module.is_current_stream_capturing()

    def allocate(self, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._torch_device)
        self.ledger.hold_device(nbytes)
        return buffer

    def release(self, buffer: Tensor) -> None:
        # The caller has waited for all copies, so the caching allocator may reuse the memory at once.
        self.ledger.drop_device(buffer.nbytes)

    def hold(self, tensor: Tensor) -> None:
        self.ledger.hold_device(tensor.nbytes)

    def drop(self, tensor: Tensor) -> None:
        self.ledger.drop_device(tensor.nbytes)

    def pinned_empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register_host(self, slab: Tensor) -> Callable[[], None] | None:
        registrar = _REGISTRARS.get(self._torch_device.type)
        return registrar(slab) if registrar is not None else None

    def reset(self) -> None:
        for stream in (self.load, self.offload, self.compute()):
            stream.record().synchronize(self.timeout_secs)


def _register_cuda(slab: Tensor) -> Callable[[], None] | None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1  # cudaHostRegisterPortable: pinned for every context of the process
    pointer = slab.data_ptr()
    if int(runtime.cudaHostRegister(pointer, slab.nbytes, portable)) != 0:
        return None

    def unregister() -> None:
        runtime.cudaHostUnregister(pointer)

    if not slab.is_pinned():
        unregister()
        return None
    return unregister


class NpuRuntime(Protocol):
    """``torch.npu.npurt()``: registration of host memory with the Ascend runtime."""

    def npuHostRegister(self, pointer: int, nbytes: int, flags: int) -> int: ...  # noqa: N802
    def npuHostUnregister(self, pointer: int) -> int: ...  # noqa: N802


class NpuModule(Protocol):
    """The part of ``torch.npu`` that only Ascend has."""

    def npurt(self) -> NpuRuntime: ...


def _register_npu(slab: Tensor) -> Callable[[], None] | None:
    pinned = 0x10000000  # ACL_HOST_REG_PINNED; page-aligned pointer and length, or error 507899
    runtime = cast("NpuModule", torch.get_device_module("npu")).npurt()
    pointer = slab.data_ptr()
    if int(runtime.npuHostRegister(pointer, slab.nbytes, pinned)) != 0:
        return None

    def unregister() -> None:
        runtime.npuHostUnregister(pointer)

    # Older drivers register the memory and still treat it as pageable: is_pinned() tells.
    if not slab.is_pinned():
        unregister()
        return None
    return unregister


_REGISTRARS: dict[str, Callable[[Tensor], Callable[[], None] | None]] = {
    "cuda": _register_cuda,
    "npu": _register_npu,
}
