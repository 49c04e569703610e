"""The device keeps the promises of an accelerator, and breaks none that it should not make."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import simaccel as sim

MIB = 2**20


def on_device(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="sim")


def pinned(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


# ------------------------------------------------------------------------------------------- what torch sees


def test_it_is_the_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module("sim").current_device() == 0


def test_current_device_and_stream_are_those_of_the_context() -> None:
    module = torch.get_device_module("sim")
    with module.device(1):
        assert torch.ones(1, device="sim").device.index == 1
        side = module.Stream()
    assert side.device_index == 1
    with module.stream(side):  # switches to the stream's device, as torch.cuda does
        assert module.current_device() == 1
        assert module.current_stream() == side
        assert module.current_stream(0) == module.default_stream(0)
    assert module.current_device() == 0
    assert module.current_stream() == module.default_stream()
    assert module.current_stream(1) == module.default_stream(1)


@pytest.mark.parametrize("schedule", [sim.EAGER, sim.LAZY, *sim.seeds(2)], ids=str)
def test_operators_views_and_indexing_equal_the_cpu(schedule: sim.Schedule) -> None:
    def compute(device: str) -> list[torch.Tensor]:
        x = torch.arange(12.0, device=device).view(3, 4)
        y = x.t()[1:] @ x + x.unfold(1, 2, 1).sum()
        y[:, 0] = 7
        y.mul_(torch.tensor(0.5)).clamp_(max=40)
        picked = y[torch.tensor([0, 2])]
        out = torch.add(x, 1, out=torch.empty(0, device=device))
        return [each.cpu() for each in (y, picked, x[x > 3], out, torch.cat([x, x]), x.to(torch.bfloat16))]

    sim.use(schedule)
    for actual, expected in zip(compute("sim"), compute("cpu"), strict=True):
        assert torch.equal(actual, expected)


def test_a_kernel_does_not_read_host_memory() -> None:
    params = [torch.zeros(4, device="sim") for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"same device.*1-dimensional operand on cpu"):
        torch._fused_sgd_(
            [params[0]],
            [torch.ones(4)],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Watch(TorchDispatchMode):
    """Notes the device of every tensor that an operator is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen += [(str(func), arg.device.type) for arg in args if isinstance(arg, torch.Tensor)]
        return func(*args, **kwargs or {})


def test_a_dispatch_mode_does_not_see_what_the_device_does_inside() -> None:
    sim.use(sim.LAZY)
    device = torch.zeros(2, device="sim")
    device.add_(1)
    with Watch() as watch:
        device.mul_(2)
        torch.accelerator.synchronize()
    assert watch.seen == [("aten.mul_.Tensor", "sim")]
    assert sim.peek(device).tolist() == [2, 2]


def test_copies_between_devices_wait_for_both() -> None:
    sim.use(sim.LAZY)
    here = torch.zeros(2, device="sim:0").fill_(1)
    there = torch.zeros(2, device="sim:1")
    there.copy_(here)
    assert there.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="same device"):
        there.add_(here)


def test_random_numbers_are_drawn_in_program_order() -> None:
    def draw(device: str) -> torch.Tensor:
        torch.manual_seed(3)
        first, second = torch.empty(4, device=device), torch.empty(4, device=device)
        side = torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            first.normal_()
        second.normal_()
        torch.accelerator.synchronize()
        return torch.stack([first.cpu(), second.cpu()])

    sim.use(sim.LAZY)
    assert torch.equal(draw("sim"), draw("cpu"))


# -------------------------------------------------------------------------------------------------- memory


def test_the_host_cannot_reach_device_memory() -> None:
    tensor = torch.ones(4, device="sim")
    read_end, write_end = os.pipe()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.write(write_end, ctypes.c_void_p(tensor.data_ptr()), 4) == -1
        assert ctypes.get_errno() == errno.EFAULT
    finally:
        os.close(read_end)
        os.close(write_end)


def test_accounting_follows_tensors_and_storages() -> None:
    before = sim.memory()
    tensor = on_device(3 * MIB)
    assert sim.memory().allocated_nbytes == before.allocated_nbytes + 3 * MIB
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert sim.memory().allocated_nbytes == before.allocated_nbytes
    storage.resize_(2 * MIB)
    assert sim.memory().allocated_nbytes == before.allocated_nbytes + 2 * MIB
    assert sim.memory().peak_nbytes == before.allocated_nbytes + 3 * MIB
    del tensor, storage
    assert sim.memory().allocated_nbytes == before.allocated_nbytes
    assert sim.memory().reserved_nbytes == before.reserved_nbytes + 5 * MIB
    torch.accelerator.empty_cache()
    assert sim.memory().reserved_nbytes == before.reserved_nbytes
    assert torch.accelerator.max_memory_allocated() == sim.memory().peak_nbytes
    sim.reset_peak()
    assert sim.memory().peak_nbytes == before.allocated_nbytes


def test_resizing_a_storage_keeps_its_content() -> None:
    tensor = torch.arange(4.0, device="sim")
    tensor.untyped_storage().resize_(32)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_released_storage_cannot_be_used() -> None:
    tensor = torch.ones(4, device="sim")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="released device storage"):
        tensor.add_(1)


def test_capacity_counts_cached_blocks_but_gives_them_up_first() -> None:
    sim.configure(capacity=8 * MIB)
    del_me = on_device(6 * MIB)
    del del_me
    assert sim.memory().reserved_nbytes >= 6 * MIB
    kept = on_device(7 * MIB)
    assert sim.memory().reserved_nbytes < 8 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="capacity of 8388608"):
        on_device(2 * MIB)
    del kept
    on_device(2 * MIB)


def test_the_nth_allocation_fails_once() -> None:
    sim.configure(fail_alloc=2)
    on_device(MIB)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        on_device(MIB)
    on_device(MIB)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_new_and_reused_memory_is_garbage(dtype: torch.dtype) -> None:
    assert torch.empty(8, dtype=dtype, pin_memory=True).isnan().all()
    sim.reset()  # empties the cache
    tensor = torch.empty(8, dtype=dtype, device="sim")
    assert sim.peek(tensor).isnan().all()
    address = tensor.fill_(1).data_ptr()
    del tensor
    reused = torch.empty(8, dtype=dtype, device="sim")
    assert reused.data_ptr() == address
    assert sim.peek(reused).isnan().all()


def test_a_freed_block_is_garbage_for_work_that_comes_too_late() -> None:
    side, host = torch.Stream("sim"), torch.zeros(4).pin_memory()
    tensor = torch.ones(4, device="sim")
    sim.configure(policy=sim.Policy.MASK)
    sim.slow(side)
    with side:
        host.copy_(tensor, non_blocking=True)
    del tensor  # the default stream may use the memory at once, while the copy still waits
    side.synchronize()
    assert host.isnan().all()


def test_record_stream_keeps_a_block_until_that_stream_is_done() -> None:
    side, host = torch.Stream("sim"), torch.zeros(4).pin_memory()
    tensor = torch.ones(4, device="sim")
    address = tensor.data_ptr()
    sim.configure(policy=sim.Policy.MASK)
    sim.slow(side)
    with side:
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(side)
    del tensor
    other = torch.empty(4, device="sim")
    assert other.data_ptr() != address
    side.synchronize()
    assert host.tolist() == [1, 1, 1, 1]
    assert torch.empty(4, device="sim").data_ptr() == address


def test_a_block_belongs_to_the_stream_that_allocated_it() -> None:
    side = torch.Stream("sim")
    with side:
        tensor = torch.empty(4, device="sim")
        address = tensor.data_ptr()
        del tensor
    assert torch.empty(4, device="sim").data_ptr() != address
    with side:
        assert torch.empty(4, device="sim").data_ptr() == address


# -------------------------------------------------------------------------------------------------- pinned


def test_pinned_memory_is_accounted_and_its_views_are_pinned() -> None:
    before = sim.memory()
    slab = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    assert slab.is_pinned()
    assert slab[10:20].is_pinned()
    assert not torch.empty(4).is_pinned()
    assert sim.memory().pinned_nbytes == before.pinned_nbytes + MIB
    del slab
    assert sim.memory().pinned_nbytes == before.pinned_nbytes
    assert sim.memory().pinned_peak_nbytes >= before.pinned_nbytes + MIB


def test_pinned_memory_outlives_the_copies_that_read_it() -> None:
    sim.use(sim.LAZY)
    target = torch.zeros(4, device="sim")
    target.copy_(pinned([1, 2, 3, 4]), non_blocking=True)  # the source is freed before the copy runs
    assert target.tolist() == [1, 2, 3, 4]


def test_registered_host_memory_is_pinned_until_unregistered() -> None:
    host = torch.zeros(4)
    sim.host_register(host)
    assert host.is_pinned()
    sim.use(sim.LAZY)
    device = torch.ones(4, device="sim")
    host.copy_(device, non_blocking=True)
    assert host.tolist() == [0, 0, 0, 0]
    sim.host_unregister(host)
    assert host.tolist() == [1, 1, 1, 1]
    assert not host.is_pinned()


def test_the_nth_pinned_allocation_fails_once() -> None:
    sim.configure(fail_pin=2)
    torch.empty(4, pin_memory=True)
    with pytest.raises(RuntimeError, match="pinned host allocation of 16 bytes failed"):
        torch.empty(4, pin_memory=True)
    torch.empty(4, pin_memory=True)


# --------------------------------------------------------------------------------------- order and progress


def test_a_lazy_copy_happens_when_something_after_it_needs_it() -> None:
    sim.use(sim.LAZY)
    side, host, device = torch.Stream("sim"), pinned([1, 2]), torch.zeros(2, device="sim")
    torch.accelerator.synchronize()
    with side:
        device.copy_(host, non_blocking=True)
    done = side.record_event()
    assert sim.peek(device).tolist() == [0, 0]
    assert not done.query()
    torch.accelerator.current_stream().wait_event(done)
    assert sim.peek(device).tolist() == [0, 0]
    assert (device + 1).tolist() == [2, 3]
    assert done.query()


def test_a_copy_reads_its_source_when_it_runs() -> None:
    sim.use(sim.LAZY)
    host, device = pinned([1, 2]), torch.zeros(2, device="sim")
    device.copy_(host, non_blocking=True)
    host.fill_(9)
    assert device.tolist() == [9, 9]


@pytest.mark.parametrize("to_device", [True, False])
def test_pageable_copies_are_safe_without_waiting(to_device: bool) -> None:
    sim.use(sim.LAZY)
    host, device = torch.ones(2), torch.zeros(2, device="sim")
    if to_device:
        device.copy_(host, non_blocking=True)
        host.fill_(9)
        assert device.tolist() == [1, 1]
    else:
        host.copy_(device, non_blocking=True)
        assert host.tolist() == [0, 0]


def test_a_blocking_copy_waits_for_its_stream_only() -> None:
    sim.use(sim.LAZY)
    side = torch.Stream("sim")
    here, there = torch.zeros(2, device="sim"), torch.zeros(2, device="sim")
    torch.accelerator.synchronize()
    with side:
        there.fill_(1)
    here.fill_(1)
    assert here.cpu().tolist() == [1, 1]
    assert sim.peek(there).tolist() == [0, 0]


def test_polling_an_event_makes_progress() -> None:
    sim.use(sim.LAZY)
    device = torch.zeros(2, device="sim").fill_(3)
    done = torch.accelerator.current_stream().record_event()
    polls = 1
    while not done.query():
        polls += 1
        assert polls < 100
    assert polls > 1
    assert sim.peek(device).tolist() == [3, 3]


def test_an_event_stands_for_the_work_before_its_last_record() -> None:
    sim.use(sim.LAZY)
    stream, device = torch.accelerator.current_stream(), torch.zeros(2, device="sim")
    event = torch.Event("sim")
    assert event.query()
    stream.record_event(event)
    device.fill_(1)
    event.synchronize()
    assert sim.peek(device).tolist() == [0, 0]
    stream.record_event(event)
    event.synchronize()
    assert sim.peek(device).tolist() == [1, 1]


def test_a_mask_makes_streams_slow_in_order_of_creation() -> None:
    seen = []
    for _ in sim.each(sim.masks(2)):
        side = torch.Stream("sim")
        default, other = torch.zeros(1, device="sim"), torch.zeros(1, device="sim")
        torch.accelerator.synchronize()
        default.fill_(1)
        with side:
            other.fill_(1)
        seen.append((sim.peek(default).item() == 0, sim.peek(other).item() == 0))
    assert seen == [(False, False), (True, False), (False, True), (True, True)]


def test_a_seed_gives_the_same_schedule_again_and_others_give_others() -> None:
    def progress(seed: int) -> list[int]:
        pending = []
        for _ in sim.each([sim.Schedule(sim.Policy.RANDOM, seed=seed)]):
            device = torch.zeros(2, device="sim")
            for value in range(20):
                device.fill_(value)
                pending.append(sim.num_pending())
        return pending

    runs = [progress(seed) for seed in range(5)]
    assert runs == [progress(seed) for seed in range(5)]
    assert len({tuple(run) for run in runs}) == 5


def test_virtual_time_overlaps_what_streams_allow() -> None:
    """25 MB take 1 ms over the link: both directions at once on two streams, one after the other on one."""
    host_in, host_out = torch.empty(25_000_000, dtype=torch.uint8).pin_memory(), None
    host_out = torch.empty_like(host_in).pin_memory()
    there, back = on_device(25_000_000), on_device(25_000_000)

    def copy_both(load: torch.Stream, offload: torch.Stream) -> float:
        torch.accelerator.synchronize()
        start = sim.virtual_secs()
        with load:
            there.copy_(host_in, non_blocking=True)
        with offload:
            host_out.copy_(back, non_blocking=True)
        torch.accelerator.synchronize()
        return sim.virtual_secs() - start

    one, other = torch.Stream("sim"), torch.Stream("sim")
    assert copy_both(one, other) == pytest.approx(1e-3)
    assert copy_both(one, one) == pytest.approx(2e-3)


def test_events_measure_virtual_milliseconds() -> None:
    module = torch.get_device_module("sim")
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    begin.record()
    on_device(25_000_000).copy_(torch.empty(25_000_000, dtype=torch.uint8).pin_memory(), non_blocking=True)
    end.record()
    assert begin.elapsed_time(end) == pytest.approx(1.0)


# -------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("to_device", [True, False])
def test_the_nth_copy_over_the_link_fails_once(to_device: bool) -> None:
    host, device = pinned([1, 2]), torch.zeros(2, device="sim")
    source, target = (host, device) if to_device else (device, host)
    sim.configure(fail_copy=2)
    target.copy_(source)
    device.clone()  # within the device: does not count
    with pytest.raises(RuntimeError, match="injected"):
        target.copy_(source, non_blocking=True)
    target.copy_(source)


def test_a_copy_that_fails_late_stops_the_device() -> None:
    sim.use(sim.LAZY)
    host, device = pinned([1, 2]), torch.zeros(2, device="sim")
    torch.accelerator.synchronize()
    sim.configure(fail_copy_late=1)
    device.copy_(host, non_blocking=True)
    device.add_(1)
    done = torch.accelerator.current_stream().record_event()
    with pytest.raises(RuntimeError, match="H2D copy failed"):
        done.synchronize()
    assert sim.peek(device).tolist() == [0, 0]
    stream = torch.accelerator.current_stream()
    for call in (
        done.query,
        done.wait,
        stream.record_event,
        torch.accelerator.synchronize,
        lambda: device.add_(1),
        device.tolist,
    ):
        with pytest.raises(RuntimeError, match="earlier asynchronous work"):
            call()
    sim.reset()
    assert device.tolist() == [0, 0]


def test_a_kernel_that_cannot_run_fails_the_launch_when_eager_and_the_device_when_lazy() -> None:
    target, index = torch.zeros(2, device="sim"), torch.tensor([5], device="sim")
    with pytest.raises(IndexError, match="out of bounds"):
        target.index_fill_(0, index, 1)
    assert target.tolist() == [0, 0]
    sim.use(sim.LAZY)
    target.index_fill_(0, index, 1)
    with pytest.raises(RuntimeError, match=r"earlier asynchronous work: .*out of bounds"):
        torch.accelerator.synchronize()


def test_reset_frees_what_nobody_holds() -> None:
    gc.collect()
    kept, dropped = on_device(MIB), on_device(MIB)
    del dropped
    sim.reset()
    assert sim.memory().reserved_nbytes == sim.memory().allocated_nbytes >= MIB
    del kept
