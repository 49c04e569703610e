"""Swapped optimizers on an accelerator: right in every order of execution, within their memory, and never
wrong after a failure."""

from __future__ import annotations

import copy
import enum
import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn, optim

import swapckpt
from swapckpt.device import AcceleratorDevice
from swapckpt.device.accelerator import AcceleratorEvent, AcceleratorStream
from swapckpt.errors import HostMemoryError, StateFailedError, StepError, SwapCkptError
from swapckpt.optimizer import swap_of, swapped_state
from swapckpt.swap import Phase
from tests import simaccel as sim
from tests.core.training import always, shifting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPES = ((40, 50), (7,), (64, 32), (2000,), (), (1, 1200), (33, 65))
NUM_STEPS = 4
SCHEDULES = [sim.EAGER, sim.LAZY, *sim.masks(3), *sim.seeds(10)]  # compute, load and offload stream
LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    cls: Any
    options: dict[str, Any]
    config: swapckpt.SwapConfig = field(default_factory=lambda: swapckpt.SwapConfig(swap_times=3))
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    active: Callable[[int, int], bool] = shifting  # which parameter has a gradient in which step


CASES = {
    "AdamW-fused": Case(cls=optim.AdamW, options=FUSED),
    "AdamW-foreach": Case(cls=optim.AdamW, options=FOREACH),
    "AdamW-loop": Case(cls=optim.AdamW, options=LOOP),
    "AdamW-amsgrad": Case(cls=optim.AdamW, options=FUSED | {"amsgrad": True}),
    "AdamW-bfloat16": Case(cls=optim.AdamW, options=FUSED, dtype=torch.bfloat16),
    "AdamW-two-buffers": Case(
        cls=optim.AdamW,
        options=FUSED,
        config=swapckpt.SwapConfig(swap_times=100, staging_buffers=2, min_numel=0),
    ),
    "AdamW-kept-buffers": Case(
        cls=optim.AdamW,
        options=FUSED,
        config=swapckpt.SwapConfig(swap_times=3, release_staging=False, packed=False),
    ),
    "AdamW-one-key": Case(
        cls=optim.AdamW,
        options=FOREACH,
        config=swapckpt.SwapConfig(swap_times=3, state_keys=("exp_avg_sq",)),
    ),
    "SGD-momentum": Case(cls=optim.SGD, options=FUSED | {"momentum": 0.9}, active=always),
    "Adagrad": Case(cls=optim.Adagrad, options=FOREACH),
    "NAdam": Case(cls=optim.NAdam, options=FOREACH),
}


class Training:
    """Parameters on the device, their optimizer, and the same gradients in every run."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).to(case.dtype) for shape in case.shapes]
        self.params = [nn.Parameter(value.to("sim")) for value in values]
        self.optimizer: optim.Optimizer = case.cls(self.params, lr=0.01, **case.options)
        self.num_steps = 0

    def adopt(self) -> Training:
        swapckpt.swap_optimizer(self.optimizer, self.case.config)
        return self

    def set_gradients(self) -> None:
        """Computed on the device, and maybe still pending when the optimizer steps."""
        for index, param in enumerate(self.params):
            param.grad = None
            if self.case.active(self.num_steps, index):
                generator = torch.Generator().manual_seed(1000 * self.num_steps + index)
                values = torch.randn(param.shape, generator=generator).to(param.dtype)
                param.grad = values.to("sim").mul_(0.5)
        self.num_steps += 1

    def step(self) -> None:
        self.set_gradients()
        self.optimizer.step()

    def values(self) -> dict[str, object]:
        """Parameters and state by name, on the host. Mirrors are read as they are: nothing waits for them."""
        found: dict[str, object] = {}
        for index, param in enumerate(self.params):
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{index}.{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
            found[f"{index}"] = param.detach()
        return {name: on_host(value) for name, value in found.items()}

    def exported(self) -> dict[str, object]:
        """What a save reads: host memory only. Nothing waits for it either."""
        view = swapped_state(self.optimizer)
        found = {
            f"{index}.{key}": value
            for index, param in enumerate(self.params)
            if param in self.optimizer.state
            for key, value in view.values(param).items()
        }
        tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
        assert all(tensor.device.type == "cpu" for tensor in tensors)
        return {name: copy.deepcopy(value) for name, value in found.items()}

    @property
    def phase(self) -> Phase:
        return swap_of(self.optimizer).phase


def on_host(value: object) -> object:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def differences(found: dict[str, object], expected: dict[str, object]) -> list[str]:
    """Names of what is not equal as bits."""
    names = [name for name in expected.keys() | found.keys() if (name in expected) != (name in found)]
    for name in expected.keys() & found.keys():
        value, wanted = found[name], expected[name]
        if isinstance(value, torch.Tensor) and isinstance(wanted, torch.Tensor):
            same = value.dtype == wanted.dtype and torch.equal(bits(value), bits(wanted))
        else:
            same = value == wanted
        if not same:
            names.append(name)
    return sorted(names)


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def unswapped(case: Case) -> list[dict[str, object]]:
    """The values before the first step and after each."""
    training = Training(case)
    history = [training.values()]
    for _ in range(NUM_STEPS):
        training.step()
        history.append(training.values())
    return history


# ---------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_unswapped_optimizer_in_every_schedule(case: Case) -> None:
    expected = unswapped(case)
    for schedule in sim.each(SCHEDULES):
        training = Training(case).adopt()
        assert isinstance(swap_of(training.optimizer).device, AcceleratorDevice)
        for step in range(NUM_STEPS):
            training.step()
            state = {name: value for name, value in expected[step + 1].items() if "." in name}
            wrong = differences(training.exported(), state)
            assert not wrong, f"exported after step {step} in schedule {schedule}: {wrong}"
            wrong = differences(training.values(), expected[step + 1])
            assert not wrong, f"after step {step} in schedule {schedule}: {wrong}"


ORDERS = [  # who waits for whom; the load stream waits for the compute stream when a buffer is new
    ("compute", "load"),
    ("offload", "compute"),
    ("load", "offload"),
    ("load", "compute"),
    ("host", "offload"),
]


@pytest.mark.parametrize(("waiting", "waited_for"), ORDERS)
def test_without_any_one_order_some_mask_gives_wrong_values(
    monkeypatch: pytest.MonkeyPatch, waiting: str, waited_for: str
) -> None:
    """And none does when everything runs at once: that is why the schedules are needed."""
    wait, synchronize = AcceleratorStream.wait, AcceleratorEvent.synchronize

    def forgetful_wait(self: AcceleratorStream, event: AcceleratorEvent) -> None:
        if (self.name, event._stream) != (waiting, waited_for):
            wait(self, event)

    def forgetful_synchronize(self: AcceleratorEvent, timeout_secs: float) -> None:
        if ("host", self._stream) != (waiting, waited_for):
            synchronize(self, timeout_secs)

    monkeypatch.setattr(AcceleratorStream, "wait", forgetful_wait)
    monkeypatch.setattr(AcceleratorEvent, "synchronize", forgetful_synchronize)
    case = CASES["AdamW-two-buffers"]
    expected = unswapped(case)

    def goes_wrong() -> bool:
        training = Training(case).adopt()
        for step in range(NUM_STEPS):
            training.step()
            if differences(training.values() | training.exported(), expected[step + 1]):
                return True
        return False

    assert [goes_wrong() for _ in sim.each([sim.EAGER])] == [False]
    assert any(goes_wrong() for _ in sim.each(sim.masks(3)))


@pytest.mark.parametrize("case", [CASES["AdamW-fused"], CASES["NAdam"]], ids=["AdamW-fused", "NAdam"])
def test_adopting_and_releasing_existing_state_keeps_it_in_every_schedule(case: Case) -> None:
    expected = unswapped(case)
    for schedule in sim.each(SCHEDULES):
        training = Training(case)
        training.step()
        training.adopt()
        assert not differences(training.values(), expected[1]), schedule
        training.step()
        assert not differences(training.values(), expected[2]), schedule
        swapckpt.release(training.optimizer)
        assert training.optimizer.state[training.params[0]]["exp_avg"].device.type == "sim"
        training.step()
        assert not differences(training.values(), expected[3]), schedule


def test_mirrors_are_pinned_so_that_copies_are_asynchronous() -> None:
    training = Training(CASES["AdamW-fused"]).adopt()
    training.step()
    state = training.optimizer.state[training.params[2]]
    assert state["exp_avg"].device.type == "cpu"
    assert state["exp_avg"].is_pinned()


# ---------------------------------------------------------------------------------------------- memory

KIB = 1024
EQUAL = Case(
    cls=optim.AdamW,
    options=FUSED,
    config=swapckpt.SwapConfig(swap_times=4, staging_buffers=3, min_numel=2),
    shapes=((64, 128),) * 8,  # 32 KiB each: 64 KiB of state, 128 KiB per batch
    active=always,
)
BATCH_NBYTES = 128 * KIB
COUNTERS_NBYTES = 8 * 512  # one step counter per parameter stays; the allocator's unit is 512 bytes
SHADOWS_NBYTES = 4 * 512  # counters on their way to the host, packed: of each buffer, and of the next one


@pytest.mark.parametrize("schedule", [sim.EAGER, sim.LAZY, *sim.seeds(2)], ids=str)
def test_an_idle_optimizer_holds_no_device_memory_and_a_step_its_staging_buffers(
    schedule: sim.Schedule,
) -> None:
    sim.use(schedule)
    training = Training(EQUAL)
    training.set_gradients()
    baseline = sim.memory().allocated_nbytes
    training.adopt()
    for step in range(3):
        sim.reset_peak()
        training.optimizer.step()
        assert sim.memory().allocated_nbytes == baseline + COUNTERS_NBYTES, step
        staging_nbytes = sim.memory().peak_nbytes - baseline - COUNTERS_NBYTES
        assert 3 * BATCH_NBYTES <= staging_nbytes <= 3 * BATCH_NBYTES + SHADOWS_NBYTES, step


def test_the_unswapped_optimizer_holds_its_state() -> None:
    """The figures above are not small because something else is counted."""
    training = Training(EQUAL)
    training.set_gradients()
    baseline = sim.memory().allocated_nbytes
    training.optimizer.step()
    assert sim.memory().allocated_nbytes == baseline + COUNTERS_NBYTES + 4 * BATCH_NBYTES


def test_adoption_gives_back_the_memory_of_existing_state() -> None:
    training = Training(EQUAL)
    training.set_gradients()
    baseline = sim.memory().allocated_nbytes
    training.optimizer.step()
    training.adopt()
    assert sim.memory().allocated_nbytes == baseline + COUNTERS_NBYTES


def test_a_step_fits_where_the_state_does_not() -> None:
    def train(swapped: bool) -> None:
        training = Training(EQUAL)
        if swapped:
            training.adopt()
        training.set_gradients()
        sim.configure(capacity=sim.memory().allocated_nbytes + 4 * BATCH_NBYTES - 1)
        training.optimizer.step()
        training.optimizer.step()

    with pytest.raises(torch.OutOfMemoryError):
        train(swapped=False)
    sim.reset()
    train(swapped=True)


def test_mirrors_are_freed_with_the_optimizer() -> None:
    before = sim.memory().pinned_nbytes
    training = Training(EQUAL).adopt()
    training.step()
    assert sim.memory().pinned_nbytes >= before + 4 * BATCH_NBYTES
    del training
    assert sim.memory().pinned_nbytes == before


def test_loads_updates_and_offloads_overlap() -> None:
    """By the virtual clock: one after the other, a step takes the state twice over the link."""
    case = Case(
        cls=optim.AdamW,
        options=FUSED,
        config=swapckpt.SwapConfig(swap_times=8),
        shapes=((64, 128),) * 16,
        active=always,
    )
    training = Training(case).adopt()
    sim.use(sim.LAZY)
    training.step()
    training.set_gradients()
    torch.accelerator.synchronize()
    start = sim.virtual_secs()
    training.optimizer.step()
    one_way_secs = 16 * 2 * 64 * 128 * 4 / 25e9
    assert sim.virtual_secs() - start < 1.5 * one_way_secs


# -------------------------------------------------------------------------------------------- failures

FAILING = Case(cls=optim.AdamW, options=FUSED, config=swapckpt.SwapConfig(swap_times=4, min_numel=0))


class Injection(enum.Enum):
    ALLOC = "fail_alloc"
    PIN = "fail_pin"
    COPY = "fail_copy"
    COPY_LATE = "fail_copy_late"

    def arm(self, nth: int) -> None:
        setting: dict[str, Any] = {self.value: nth}
        sim.configure(**setting)

    def __str__(self) -> str:
        return self.value


def recover(training: Training, values: dict[str, object], saved: dict[str, Any]) -> None:
    with swapckpt.recovery(training.optimizer), torch.no_grad():
        for index, param in enumerate(training.params):
            param.copy_(values[f"{index}"])  # type: ignore[arg-type]
        training.optimizer.load_state_dict(saved)


@pytest.mark.parametrize("schedule", [sim.EAGER, sim.LAZY, sim.masks(3)[0b011], *sim.seeds(2)], ids=str)
@pytest.mark.parametrize("injection", [Injection.ALLOC, Injection.COPY, Injection.COPY_LATE], ids=str)
def test_a_failing_step_is_reported_and_undone_or_refused_until_recovery(
    injection: Injection, schedule: sim.Schedule
) -> None:
    """Whatever fails, and wherever: the step after it (repeated, or after recovery) has the right values."""
    expected = unswapped(FAILING)
    phases = []
    for nth in range(1, 100):
        sim.reset()
        sim.use(schedule)
        training = Training(FAILING).adopt()
        training.step()
        saved = copy.deepcopy(training.optimizer.state_dict())
        training.set_gradients()
        torch.accelerator.synchronize()
        injection.arm(nth)
        failure = None
        try:
            training.optimizer.step()
        except StepError as error:
            failure = error
        injection.arm(0)
        if failure is None:  # fewer calls than that
            assert not differences(training.values(), expected[2])
            break
        assert "injected" in str(failure.__cause__), failure
        phases.append(training.phase)
        if injection is Injection.COPY_LATE:
            sim.reset()  # the device is dead: a new process, in real life
        if training.phase is Phase.FAILED:
            with pytest.raises(StateFailedError, match="failed midway"):
                training.optimizer.step()
            with pytest.raises(StateFailedError):
                training.optimizer.state_dict()
            recover(training, expected[1], saved)
        assert training.phase is Phase.IDLE
        assert not differences(training.values(), expected[1]), nth
        training.optimizer.step()
        assert not differences(training.values(), expected[2]), nth
    assert Phase.FAILED in phases
    assert len(phases) >= 3


def test_a_step_that_fails_before_any_update_changes_nothing() -> None:
    expected = unswapped(FAILING)
    training = Training(FAILING).adopt()
    training.step()
    training.set_gradients()
    for injection in (Injection.ALLOC, Injection.COPY):
        injection.arm(1)
        with pytest.raises(StepError, match="Nothing was updated"):
            training.optimizer.step()
        assert training.phase is Phase.IDLE
        assert not differences(training.values(), expected[1])
    training.optimizer.step()
    assert not differences(training.values(), expected[2])


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """Memory is given back when the last reference goes, not by the next collection of garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("nth", [1, 5, 9])  # a load, an offload, a load after updates
@pytest.mark.usefixtures("_no_collection")
def test_a_failed_step_holds_no_device_memory_even_while_its_error_is_kept(nth: int) -> None:
    training = Training(EQUAL).adopt()
    training.step()
    training.set_gradients()
    allocated = sim.memory().allocated_nbytes
    Injection.COPY.arm(nth)
    with pytest.raises(StepError, match="injected") as kept:
        training.optimizer.step()
    assert kept.value.__traceback__ is not None
    assert sim.memory().allocated_nbytes == allocated


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("injection", [Injection.PIN, Injection.COPY], ids=str)
def test_a_failing_adoption_leaves_the_optimizer_as_it_was(injection: Injection) -> None:
    expected = unswapped(FAILING)
    outcomes = []
    for nth in range(1, 20):
        sim.reset()
        training = Training(FAILING)
        training.step()
        allocated = sim.memory().allocated_nbytes
        injection.arm(nth)
        try:
            training.adopt()
        except SwapCkptError as error:
            outcomes.append(str(error))
        else:
            break
        assert type(training.optimizer) is optim.AdamW
        assert not differences(training.values(), expected[1])
        assert sim.memory().allocated_nbytes == allocated
        training.step()
        assert not differences(training.values(), expected[2])
    assert outcomes
    assert all("injected" in outcome for outcome in outcomes)


def test_no_pinned_memory_for_the_first_state_fails_the_step() -> None:
    training = Training(FAILING).adopt()
    Injection.PIN.arm(1)
    with pytest.raises(StepError) as failure:
        training.step()
    assert isinstance(failure.value.__cause__, HostMemoryError)
    assert training.phase is Phase.FAILED
