"""The suites find what is broken: each planted fault makes the test fail that is about it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

from swapckpt.device import CpuDevice
from swapckpt.device.cpu import CpuEvent, CpuStream
from swapckpt.errors import StepError
from swapckpt.storage.posix import PosixFiles, PosixReader, PosixWriter
from swapckpt.testing import DeviceSuite, FilesSuite, OptimizerSuite
from tests.core.optimizers import Accumulating

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from swapckpt.device import CopyPair, Event
    from swapckpt.storage.files import Entry


@pytest.fixture(autouse=True)
def _everything_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under CI, where pytest shows all of two lists that differ: that must not take long."""
    monkeypatch.setenv("CI", "true")


# ---------------------------------------------------------------------------------------------- devices


class WaitsForNothing(CpuStream):
    def wait(self, event: Event) -> None:
        pass


class CopiesTheLastPair(CpuStream):
    def copy(self, pairs: Sequence[CopyPair]) -> None:
        super().copy(pairs[-1:])


class EventsAreReachedAtOnce(CpuStream):
    def record(self) -> Any:
        return EagerEvent(self, self._seq)


class EagerEvent(CpuEvent):
    def query(self) -> bool:
        return True


class ForgetsErrors(CpuStream):
    def record(self) -> Any:
        return ForgetfulEvent(self, self._seq)


class ForgetfulEvent(CpuEvent):
    def synchronize(self, timeout_secs: float) -> None:
        self._stream.force(self._seq, timeout_secs)
        self._stream.progress.error = None


class HasNoSpans(CpuStream):
    def span(self, name: str, *, batch: int, nbytes: int = 0) -> Any:
        return pytest.MonkeyPatch.context()


class NeverGivesBack(CpuDevice):
    def release(self, buffer: Tensor) -> None:
        pass


class ForgetsCreatedState(CpuDevice):
    def hold(self, tensor: Tensor) -> None:
        pass

    def drop(self, tensor: Tensor) -> None:
        pass


class AllocatesElements(CpuDevice):
    def allocate(self, nbytes: int) -> Tensor:
        super().allocate(nbytes)
        return torch.empty(nbytes)


def with_streams(cls: type[CpuStream]) -> CpuDevice:
    device = CpuDevice("lazy")
    for stream in (device.load, device.offload):
        stream.__class__ = cls
    return device


BROKEN_DEVICES: dict[str, tuple[Callable[[], CpuDevice], str]] = {
    "waits for nothing": (partial(with_streams, WaitsForNothing), "streams_wait_for_each_other"),
    "copies the last pair": (partial(with_streams, CopiesTheLastPair), "one_call_copies_many_pairs"),
    "is reached at once": (partial(with_streams, EventsAreReachedAtOnce), "a_loop_of_queries_ends"),
    "forgets errors": (partial(with_streams, ForgetsErrors), "a_copy_that_fails_is_reported"),
    "has no spans": (partial(with_streams, HasNoSpans), "a_timeline_has_a_span_for_each_copy"),
    "never gives back": (NeverGivesBack, "buffers_are_accounted"),
    "forgets created state": (ForgetsCreatedState, "created_state_is_accounted"),
    "allocates elements": (AllocatesElements, "buffers_are_accounted"),
}


@pytest.mark.parametrize(("device_factory", "test"), BROKEN_DEVICES.values(), ids=BROKEN_DEVICES)
def test_a_broken_device_is_found(device_factory: Callable[[], CpuDevice], test: str) -> None:
    check = getattr(DeviceSuite(), f"test_{test}")
    check(lambda: CpuDevice("lazy"))
    with pytest.raises(AssertionError):
        check(device_factory)


# ------------------------------------------------------------------------------------------- optimizers


class Remembering(AdamW):
    """Keeps the first state tensors it made, as a user's statistics might, and goes on writing to them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.moments: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param, values in self.state.items():
            self.moments.setdefault(param, values["exp_avg"]).mul_(0.99)
        return loss


class Undescribed(Optimizer):
    """Its state depends on the values of its gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    key = "large" if float(param.grad.abs().sum()) > 0 else "small"
                    self.state[param].setdefault(key, torch.zeros_like(param)).add_(param.grad)
                    param.add_(self.state[param][key], alpha=-0.01)


BROKEN_OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "accumulates": (Accumulating, "steps_equal_those_without_swapping"),
    "remembers": (Remembering, "steps_equal_those_without_swapping"),
    "undescribed": (Undescribed, "state_is_described_before_it_exists"),
}


@pytest.mark.parametrize(("optimizer_factory", "test"), BROKEN_OPTIMIZERS.values(), ids=BROKEN_OPTIMIZERS)
def test_an_optimizer_that_cannot_be_swapped_is_found(
    optimizer_factory: Callable[[Any], Optimizer], test: str
) -> None:
    check = getattr(OptimizerSuite(), f"test_{test}")
    check(AdamW, lambda: CpuDevice("lazy"))
    with pytest.raises((AssertionError, StepError)):  # one of them refuses by itself
        check(optimizer_factory, lambda: CpuDevice("lazy"))


def test_a_missing_wait_is_found_by_the_race_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    from swapckpt.testing.checked import CheckedStream

    check = OptimizerSuite().test_every_access_is_ordered
    check(AdamW)
    monkeypatch.setattr(CheckedStream, "wait", lambda self, event: None)
    with pytest.raises(AssertionError, match="race"):
        check(AdamW)


# ----------------------------------------------------------------------------------------------- stores


class Overwrites(PosixFiles):
    def put(self, path: str, data: bytes) -> None:
        self._at(path).write_bytes(data)


class ListsBackwards(PosixFiles):
    def entries(self, path: str) -> list[Entry]:
        return super().entries(path)[::-1]


class RemovesByPrefix(PosixFiles):
    def remove(self, path: str) -> None:
        parent, _, start = path.rpartition("/")
        for entry in super().entries(parent):
            if entry.name.startswith(start):
                super().remove(f"{parent}/{entry.name}".strip("/"))


class ReadsShort(PosixFiles):
    def open(self, path: str) -> Any:
        reader = super().open(path)
        assert isinstance(reader, PosixReader)
        reader.__class__ = ShortReader
        return reader


class ShortReader(PosixReader):
    def read_into(self, offset: int, view: memoryview) -> None:
        super().read_into(offset, view[: max(0, self.nbytes - offset)])


class AbortsByClosing(PosixFiles):
    def create(self, path: str, *, nbytes: int) -> Any:
        writer = super().create(path, nbytes=nbytes)
        assert isinstance(writer, PosixWriter)
        writer.__class__ = ClosingWriter
        return writer


class ClosingWriter(PosixWriter):
    def abort(self) -> None:
        self.close()


BROKEN_STORES: dict[str, tuple[type[PosixFiles], str]] = {
    "overwrites": (Overwrites, "a_put_never_overwrites"),
    "lists backwards": (ListsBackwards, "entries_are_those_of_the_folder_itself"),
    "removes by prefix": (RemovesByPrefix, "what_is_removed_is_gone_and_nothing_else"),
    "reads short": (ReadsShort, "bytes_are_read_back_at_any_position"),
    "aborts by closing": (AbortsByClosing, "an_aborted_file_was_never_there"),
}


@pytest.mark.parametrize(("cls", "test"), BROKEN_STORES.values(), ids=BROKEN_STORES)
def test_a_broken_store_is_found(cls: type[PosixFiles], test: str, tmp_path: Path) -> None:
    check = getattr(FilesSuite(), f"test_{test}")
    check(lambda: PosixFiles(tmp_path / "right"))
    with pytest.raises(AssertionError):
        check(lambda: cls(tmp_path / "broken"))


def test_the_suites_do_not_need_pytest_and_the_package_does_not_need_the_suites() -> None:
    code = """
import sys
sys.modules["pytest"] = None
import swapckpt
assert "swapckpt.testing" not in sys.modules
import swapckpt.testing
print(sorted(swapckpt.testing.__all__))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "DeviceSuite" in done.stdout
