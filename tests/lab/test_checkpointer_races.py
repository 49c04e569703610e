"""The race detector over the Checkpointer: its writer threads read mirrors while steps overwrite them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from swapckpt import CheckpointConfig, Checkpointer, StateManager
from swapckpt.checkpointer.planners import RankSavePlanner
from swapckpt.device import CpuDevice
from swapckpt.optimizer import guard_with, swap_of
from swapckpt.snapshot import Snapshot
from swapckpt.storage import datafile
from swapckpt.testing import CheckedDevice, RaceDetector, WatchedGate
from tests.core.training import Twins
from tests.lab.scenarios import RECIPE, config, late

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.planner import WriteItem

    from swapckpt.testing.races import Clock


class Watched(Checkpointer):
    """Tells a detector what its writer threads read, and when. They are slower than steps."""

    def __init__(self, detector: RaceDetector, folder: Path, states: dict[str, object]) -> None:
        self.detector = detector
        self._captured_at: Clock = {}
        # What is known to all threads that said something was written: they share the snapshot's sets.
        self._said: Clock = {}
        self._lock = threading.Lock()
        super().__init__(folder, states, CheckpointConfig(keep_latest=1, threads=2, timeout_secs=20.0))

    def _captured(self) -> dict[str, object]:
        captured = super()._captured()
        self._captured_at = self.detector.now(self.detector.host())
        return captured

    def read(self, data: object) -> None:
        """A writer thread reads the memory of an item."""
        self.detector.join(self.detector.host(), self._captured_at)  # it was started after that
        if hasattr(data, "data_ptr"):
            self.detector.read(data, "a file being written")  # type: ignore[arg-type]

    def _written(self, tensor: Tensor) -> None:
        time.sleep(0.002)
        with self._lock:
            self.read(tensor)
            self.detector.join(self.detector.host(), self._said)
            self._said = self.detector.now(self.detector.host())
            super()._written(tensor)


def save_and_step(folder: Path, monkeypatch: pytest.MonkeyPatch, *, spare_nbytes: int, alike: int) -> None:
    """Saves during which steps go on, on a file per 1 KB. ``alike`` small tensors are written as runs."""
    monkeypatch.setattr(datafile, "FILE_NBYTES", 1 << 10)
    monkeypatch.setattr(datafile, "SMALL_NBYTES", 4 << 10)
    detector = RaceDetector()
    recipe = replace(RECIPE, shapes=(*RECIPE.shapes, *[(24,)] * alike))
    device = CheckedDevice(detector, CpuDevice("inline"))
    twins = Twins(recipe, config(spare_nbytes=spare_nbytes), device, active=late)  # type: ignore[arg-type]
    guard_with(twins.swapped, WatchedGate(swap_of(twins.swapped).gate, detector))
    model = nn.ParameterList(twins.params)
    resolve = RankSavePlanner.resolve_data
    states = {"model": model, "optimizer": StateManager(model, twins.swapped)}
    checkpointer = Watched(detector, folder, states)

    def resolved(planner: RankSavePlanner, item: WriteItem) -> Any:
        data = resolve(planner, item)
        checkpointer.read(data)
        return data

    monkeypatch.setattr(RankSavePlanner, "resolve_data", resolved)
    with detector.watching(), checkpointer:
        twins.step(2)
        for number in range(3):
            handle = checkpointer.save(number)
            twins.step()
            handle.result()
    twins.check()
    detector.check()


@pytest.mark.parametrize("alike", [0, 20])
@pytest.mark.parametrize("spare_nbytes", [0, 1 << 30])
def test_steps_are_ordered_behind_what_files_are_written_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_nbytes: int, alike: int
) -> None:
    save_and_step(tmp_path, monkeypatch, spare_nbytes=spare_nbytes, alike=alike)


def test_a_release_that_comes_too_early_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshot, "written", lambda snapshot, _: snapshot.close())  # all, with the first
    with pytest.raises(AssertionError, match=r"is not ordered after read by a file being written"):
        save_and_step(tmp_path, monkeypatch, spare_nbytes=0, alike=0)
