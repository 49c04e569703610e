"""Conformance of a device."""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING

import torch
from torch.optim import AdamW

from swapckpt.errors import TransferError
from swapckpt.optimizer import swap_optimizer
from swapckpt.testing.suites.run import BOUND_SECS, CONFIGS, SHAPES, Run, differences, raises
from swapckpt.trace import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from swapckpt.device import Device

_SIZES = (1, 512, 100_003)


class DeviceSuite:
    """What every :class:`~swapckpt.device.Device` does. Fixture: ``device_factory() -> Device``."""

    def test_bytes_go_to_the_device_and_come_back(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        for nbytes in _SIZES:
            source, target = _host(device, nbytes, 3), _host(device, nbytes, 0)
            buffer = _buffer(device, nbytes)
            device.load.copy([(buffer, source)])
            device.offload.wait(device.load.record())
            device.offload.copy([(target, buffer)])
            device.offload.record().synchronize(BOUND_SECS)
            assert torch.equal(target, source), f"{nbytes} bytes"
            device.release(buffer)

    def test_copies_of_one_stream_run_in_order(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        buffer, target = _buffer(device, 64), _host(device, 64, 0)
        for value in range(20):
            device.load.copy([(buffer, _host(device, 64, value))])
        device.offload.wait(device.load.record())
        device.offload.copy([(target, buffer)])
        device.offload.record().synchronize(BOUND_SECS)
        assert _values(target) == [19]

    def test_streams_wait_for_each_other(self, device_factory: Callable[[], Device]) -> None:
        """Each value is read before the next one takes its place."""
        device = device_factory()
        buffer = _buffer(device, 4096)
        targets = [_host(device, 4096, 0) for _ in range(8)]
        for value, target in enumerate(targets, start=1):
            device.load.copy([(buffer, _host(device, 4096, value))])
            device.offload.wait(device.load.record())
            device.offload.copy([(target, buffer)])
            device.load.wait(device.offload.record())
        device.offload.record().synchronize(BOUND_SECS)
        assert [(int(target.min()), int(target.max())) for target in targets] == [(n, n) for n in range(1, 9)]

    def test_kernels_run_between_load_and_offload(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        buffer, target = _buffer(device, 4096), _host(device, 4096, 0)
        for value in range(5):
            device.load.copy([(buffer, _host(device, 4096, value))])
            device.compute().wait(device.load.record())
            buffer.add_(100)
            device.offload.wait(device.compute().record())
            device.offload.copy([(target, buffer)])
            device.offload.record().synchronize(BOUND_SECS)
            assert _values(target) == [100 + value]
            device.load.wait(device.offload.record())

    def test_one_call_copies_many_pairs(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        buffer, target = _buffer(device, 100), _host(device, 100, 0)
        parts = [(buffer.narrow(0, 10 * n, 10), _host(device, 10, n)) for n in range(10)]
        device.load.copy(parts)
        device.offload.wait(device.load.record())
        device.offload.copy([(target.narrow(0, 50, 50), buffer.narrow(0, 0, 50))])
        device.offload.record().synchronize(BOUND_SECS)
        assert target.tolist() == [0] * 50 + [value for value in range(5) for _ in range(10)]

    def test_a_loop_of_queries_ends(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        buffer, target = _buffer(device, 4096), _host(device, 4096, 0)
        device.load.copy([(buffer, _host(device, 4096, 8))])
        device.offload.wait(device.load.record())
        device.offload.copy([(target, buffer)])
        event = device.offload.record()
        deadline = time.monotonic() + BOUND_SECS
        while not event.query():
            assert time.monotonic() < deadline, "query() never became True"
        assert _values(target) == [8]

    def test_an_event_of_an_idle_stream_is_reached(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        for stream in (device.load, device.offload, device.compute()):
            event = stream.record()
            event.synchronize(BOUND_SECS)
            assert event.query(), stream.name

    def test_streams_are_named(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        names = [stream.name for stream in (device.load, device.offload, device.compute())]
        assert names == ["load", "offload", "compute"]

    def test_buffers_are_accounted(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        first, second = device.allocate(1000), device.allocate(24)
        assert (first.shape, first.dtype, first.device) == ((1000,), torch.uint8, device.device)
        assert device.ledger.device_nbytes == 1024
        device.release(first)
        device.release(second)
        assert (device.ledger.device_nbytes, device.ledger.device_peak_nbytes) == (0, 1024)

    def test_created_state_is_accounted(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        state = torch.zeros(16, device=device.device)
        device.hold(state)
        assert device.ledger.device_nbytes == 64
        device.drop(state)
        assert (device.ledger.device_nbytes, device.ledger.device_peak_nbytes) == (0, 64)

    def test_copies_are_counted_by_direction(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        buffer, host = _buffer(device, 8), _host(device, 8, 1)
        device.load.copy([(buffer, host), (buffer.narrow(0, 0, 4), host.narrow(0, 0, 4))])
        device.offload.wait(device.load.record())
        device.offload.copy([(host, buffer)])
        device.offload.record().synchronize(BOUND_SECS)
        ledger = device.ledger
        assert (ledger.num_loads, ledger.loaded_nbytes) == (2, 12)
        assert (ledger.num_offloads, ledger.offloaded_nbytes) == (1, 8)

    def test_host_memory_is_flat_and_pinned(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        assert device.is_host == (device.device.type == "cpu")
        host = device.pinned_empty(1024)
        assert (host.shape, host.dtype, host.device.type) == ((1024,), torch.uint8, "cpu")
        assert host.is_pinned() or device.is_host

    def test_registered_memory_is_pinned_until_it_is_given_back(
        self, device_factory: Callable[[], Device]
    ) -> None:
        """Where a device cannot register memory it returns None, every time."""
        device = device_factory()
        nbytes = 4 * mmap.PAGESIZE
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        for value in (1, 2):
            undo = device.register_host(memory)
            if undo is None:
                return
            assert memory.is_pinned() or device.is_host
            buffer = _buffer(device, nbytes)
            memory.fill_(value)
            device.load.copy([(buffer, memory)])
            device.load.record().synchronize(BOUND_SECS)
            memory.zero_()
            device.offload.copy([(memory, buffer)])
            device.offload.record().synchronize(BOUND_SECS)
            assert _values(memory) == [value]
            undo()
            assert not memory.is_pinned()

    def test_a_copy_that_fails_is_reported(self, device_factory: Callable[[], Device]) -> None:
        """At once, or by an event behind it. ``reset`` clears it; a device that is lost says so there."""
        device = device_factory()
        for stream in (device.load, device.offload):
            with raises(TransferError):
                stream.copy([(_host(device, 8, 1), _buffer(device, 4))])
                stream.record().synchronize(BOUND_SECS)
            try:
                device.reset()
            except TransferError:
                return
            self.test_bytes_go_to_the_device_and_come_back(lambda: device)

    def test_a_timeline_has_a_span_for_each_copy(self, device_factory: Callable[[], Device]) -> None:
        device = device_factory()
        buffer, host = _buffer(device, 4096), _host(device, 4096, 1)
        timeline = device.timeline = Timeline()
        for batch in (3, 4):
            with device.load.span("load", batch=batch, nbytes=4096):
                device.load.copy([(buffer, host)])
        with device.compute().span("update", batch=3):
            pass
        device.load.record().synchronize(BOUND_SECS)
        device.timeline = None
        with device.load.span("load", batch=5):  # nothing is being recorded
            device.load.copy([(buffer, host)])
        device.load.record().synchronize(BOUND_SECS)
        spans = sorted(timeline.spans, key=lambda span: (span.stream, span.batch))
        assert [(span.stream, span.name, span.batch, span.nbytes) for span in spans] == [
            ("compute", "update", 3, 0),
            ("load", "load", 3, 4096),
            ("load", "load", 4, 4096),
        ]
        assert all(span.begin_ns <= span.end_ns for span in spans)
        assert spans[1].end_ns <= spans[2].begin_ns + 1000  # clocks of devices have a resolution

    def test_steps_equal_those_of_an_unswapped_optimizer(self, device_factory: Callable[[], Device]) -> None:
        for name, config in CONFIGS.items():
            device = device_factory()
            plain = Run(_adamw, device.device, SHAPES)
            swapped = Run(_adamw, device.device, SHAPES)
            swap_optimizer(swapped.optimizer, config, device=device)
            for step in range(4):
                plain.step()
                swapped.step()
                wrong = differences(swapped, plain)
                assert not wrong, f"{name}, after step {step}: {wrong}"
            assert config.release_staging == (device.ledger.device_nbytes == 0), name
            assert device.ledger.num_loads > 0, name


def _host(device: Device, nbytes: int, value: int) -> Tensor:
    return device.pinned_empty(nbytes).fill_(value)


def _values(tensor: Tensor) -> list[int]:
    """The different values in ``tensor``. Lists of all of them take minutes to be shown when they differ."""
    return sorted(set(tensor.tolist()))


def _buffer(device: Device, nbytes: int) -> Tensor:
    """A staging buffer that both copy streams may use from now on."""
    buffer = device.allocate(nbytes)
    for stream in (device.load, device.offload):
        stream.wait(device.compute().record())
    return buffer


def _adamw(params: list[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01, foreach=False)
