"""The writer process: same files, and every way in which it or its trainer can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import AdamW

import swapckpt
from swapckpt.errors import ConfigError, ReleasedStorageError, StorageError
from swapckpt.memory import shared_memory
from swapckpt.storage import SwapStorageReader, SwapStorageWriter
from swapckpt.storage.process import ProcessRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessRunner]:
    runner = ProcessRunner(shared_memory, timeout_secs=120.0)
    yield runner
    runner.close()


def worker_of(runner: ProcessRunner) -> psutil.Process:
    return psutil.Process(runner.pid)


class Job:
    """A model whose optimizer's state lies in shared memory."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 10)).to(torch.bfloat16)
        self.optimizer = AdamW(self.model.parameters(), foreach=True)
        self.manager = swapckpt.StateManager(self.model, self.optimizer, swapckpt.SwapConfig(swap_times=2))
        self.states = {"model": self.model, "optimizer": self.manager, "epoch": 1}

    def step(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()

    def bits(self) -> list[Tensor]:
        moments = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
        return [param.detach().clone() for param in self.model.parameters()] + moments

    def checkpointer(self, folder: Path, **config: Any) -> swapckpt.Checkpointer:
        config = {"async_mode": "async_with_pinned_mem", "timeout_secs": 120.0, **config}
        return swapckpt.Checkpointer(folder, self.states, swapckpt.CheckpointConfig(**config))


def odd_tensors() -> dict[str, object]:
    base = torch.randn(40, 50)
    return {
        "permuted": base.t(),
        "slice": base[3:9, 10:44],
        "expanded": base[:1].expand(7, 50),
        "conj": torch.randn(30, dtype=torch.complex64).conj(),
        "neg": torch.randn(30, dtype=torch.complex64).conj().imag,
        "sparse": torch.eye(5).to_sparse(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "large": torch.randn(300_000),
        "value": [1, "two"],
    }


def same(found: list[Path], expected: list[Path]) -> bool:
    """Compared in a call: of contents that differ pytest would compute the difference for minutes."""
    return [file.read_bytes() for file in found] == [file.read_bytes() for file in expected]


def test_a_process_writes_what_threads_write(tmp_path: Path, runner: ProcessRunner) -> None:
    job = Job()
    job.step()
    state = {"odd": odd_tensors(), "optimizer": job.manager.state_dict()}
    for name, each in (("thread", None), ("process", runner)):
        dcp.save(state, storage_writer=SwapStorageWriter(tmp_path / name, runner=each), no_dist=True)
    thread, process = (sorted((tmp_path / name).glob("*.distcp")) for name in ("thread", "process"))
    assert [file.name for file in thread] == [file.name for file in process]
    assert same(thread, process)


def test_mirrors_are_written_in_place_and_released_one_by_one(tmp_path: Path, runner: ProcessRunner) -> None:
    job = Job()
    job.step()
    with job.manager.snapshot() as snapshot:
        released: list[Tensor] = []
        writer = SwapStorageWriter(tmp_path / "x", runner=runner, on_written=released.append)
        dcp.save({"optimizer": snapshot.state_dict}, storage_writer=writer, no_dist=True)
    tensors = [value for state in job.optimizer.state.values() for value in state.values()]
    mirrors = {tensor.data_ptr() for tensor in tensors if tensor.numel() >= 1024}
    assert mirrors
    assert mirrors <= {tensor.data_ptr() for tensor in released}
    assert runner.copied_nbytes == sum(tensor.nbytes for tensor in tensors if tensor.numel() < 1024)


def test_mirrors_that_do_not_lie_row_by_row_are_written_from_where_they_are(
    tmp_path: Path, runner: ProcessRunner
) -> None:
    job = Job()
    job.step()
    matrices = [v for state in job.optimizer.state.values() for v in state.values() if v.numel() >= 1024]
    state = {"turned": {str(n): each.t() for n, each in enumerate(matrices) if each.dim() == 2}}
    assert state["turned"]
    for name, each in (("thread", None), ("process", runner)):
        dcp.save(state, storage_writer=SwapStorageWriter(tmp_path / name, runner=each), no_dist=True)
    assert runner.copied_nbytes == 0
    thread, process = (sorted((tmp_path / name).glob("*.distcp")) for name in ("thread", "process"))
    assert same(thread, process)


def test_a_trainers_copies_are_made_where_the_process_sees_them(tmp_path: Path) -> None:
    job = Job()
    with job.checkpointer(tmp_path) as checkpointer:
        job.step()
        checkpointer.save(1).wait()
        assert checkpointer.runner is not None
        assert checkpointer.runner.copied_nbytes == 0


def test_a_trainers_saves_hold_the_step_they_were_made_at(tmp_path: Path) -> None:
    job = Job()
    with job.checkpointer(tmp_path) as checkpointer:
        saved = []
        for step in range(1, 4):
            job.step()
            checkpointer.save(step)
            saved.append(job.bits())
            job.step()  # at once: mirrors are redirected, parameters fenced
    other = Job()
    with swapckpt.Checkpointer(tmp_path, other.states) as loader:
        for step in range(1, 4):
            loader.load(step)
            assert all(map(torch.equal, saved[step - 1], other.bits()))


def wait_until_writing(runner: ProcessRunner) -> None:
    """Before it has a job, a process that dies is replaced and nothing fails."""
    deadline = time.monotonic() + 60
    while not runner.is_writing:
        assert time.monotonic() < deadline, "the process gets no job"
        time.sleep(0.001)


@contextmanager
def stopped(process: psutil.Process) -> Iterator[psutil.Process]:
    process.suspend()
    try:
        yield process
    finally:
        if process.is_running():
            process.resume()


def test_modules_of_the_working_directory_are_not_the_process_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is run as ``python src/train.py`` does not see them either."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not the library')")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    with Job().checkpointer(tmp_path / "runs") as checkpointer:
        checkpointer.save(1).wait()


def test_a_process_that_is_killed_fails_this_save_and_not_the_next(tmp_path: Path) -> None:
    job = Job()
    job.step()
    with job.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1).wait()
        assert checkpointer.runner is not None
        with stopped(worker_of(checkpointer.runner)) as worker:
            handle = checkpointer.save(2)
            wait_until_writing(checkpointer.runner)
            worker.kill()
        with pytest.raises(StorageError, match=r"step-2|ended with status -9"):
            handle.wait()
        assert checkpointer.steps() == [1]
        job.step()
        checkpointer.save(3).wait()
        assert checkpointer.steps() == [1, 3]
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_a_process_that_was_killed_between_saves_is_replaced(tmp_path: Path) -> None:
    job = Job()
    job.step()
    with job.checkpointer(tmp_path) as checkpointer:
        assert checkpointer.runner is not None
        worker = worker_of(checkpointer.runner)
        worker.kill()
        worker.wait(30)
        checkpointer.save(1).wait()
        assert checkpointer.steps() == [1]


def test_a_process_that_hangs_is_ended_within_the_bound(tmp_path: Path) -> None:
    job = Job()
    job.step()
    with job.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1).wait()
        assert checkpointer.runner is not None
        checkpointer.runner.timeout_secs = 1.0
        worker = worker_of(checkpointer.runner)
        worker.suspend()
        with pytest.raises(StorageError, match=r"reported nothing for 1\.0 s"):
            checkpointer.save(2).wait()
        assert not worker.is_running()


def test_a_full_disk_fails_the_save_with_the_systems_error(tmp_path: Path, runner: ProcessRunner) -> None:
    writer = SwapStorageWriter("/dev/full/step-1", runner=runner)
    with pytest.raises(dcp.api.CheckpointException, match="/dev/full"):
        dcp.save({"x": torch.ones(3)}, storage_writer=writer, no_dist=True)
    folder = tmp_path / "gone"
    writer = SwapStorageWriter(folder / "step-1", runner=Vanishing(runner, folder))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"x": torch.ones(300_000)}, storage_writer=writer, no_dist=True)
    assert isinstance(caught.value.failures[0][0], FileNotFoundError | StorageError)


class Vanishing:
    """Removes the folder right before the process writes into it."""

    def __init__(self, runner: ProcessRunner, folder: Path) -> None:
        self._runner = runner
        self._folder = folder

    def run(self, *args: Any, **options: Any) -> Any:
        for entry in self._folder.iterdir():
            entry.rmdir()
        return self._runner.run(*args, **options)


def test_a_released_tensor_is_refused_before_it_is_read(tmp_path: Path, runner: ProcessRunner) -> None:
    tensor = torch.ones(100)
    writer = SwapStorageWriter(tmp_path / "x", runner=runner)
    state = {"x": tensor}
    tensor.untyped_storage().resize_(0)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert isinstance(caught.value.failures[0][0], ReleasedStorageError)


def test_memory_of_this_process_is_refused() -> None:
    config = swapckpt.CheckpointConfig(async_mode="async_with_pinned_mem")
    with pytest.raises(ConfigError, match="memory of this process"):
        swapckpt.Checkpointer("memory://runs/x", {"epoch": 1}, config)


TRAINER = """
import os, signal, sys, torch, swapckpt
from tests.checkpointer.test_writer_process import Job, wait_until_writing, worker_of
job = Job()
checkpointer = job.checkpointer(sys.argv[1])
job.step()
checkpointer.save(1).wait()
worker = worker_of(checkpointer.runner)
print(worker.pid, flush=True)
worker.suspend()
checkpointer.save(2)
wait_until_writing(checkpointer.runner)
worker.resume() if sys.argv[2] == "running" else None
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_nothing_is_left_of_a_trainer_that_is_killed(tmp_path: Path, state: str) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:  # not a pipe: a stopped process would keep it open
        command = [sys.executable, "-c", TRAINER, str(tmp_path), state]
        done = subprocess.run(
            command, stdout=output, stderr=output, check=False, cwd=Path(__file__).parents[2]
        )
    assert done.returncode == -signal.SIGKILL, log.read_text()
    pid = int(log.read_text())
    if state == "stopped" and psutil.pid_exists(pid):
        os.kill(pid, signal.SIGCONT)  # nothing but SIGKILL reaches a stopped process
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the writer process outlives its trainer"
        time.sleep(0.05)
    job = Job()
    with swapckpt.Checkpointer(tmp_path, job.states) as checkpointer:
        assert checkpointer.load() == 1
        job.step()
        checkpointer.save(2).wait()  # what the killed one left is no obstacle


def test_what_a_process_wrote_is_read_by_stock_torch(tmp_path: Path, runner: ProcessRunner) -> None:
    tensor = torch.randn(50, 60)
    dcp.save({"x": tensor}, storage_writer=SwapStorageWriter(tmp_path / "x", runner=runner), no_dist=True)
    for reader in (None, SwapStorageReader(tmp_path / "x")):
        loaded = {"x": torch.zeros(50, 60)}
        dcp.load(loaded, checkpoint_id=tmp_path / "x", storage_reader=reader, no_dist=True)
        assert torch.equal(loaded["x"], tensor)
