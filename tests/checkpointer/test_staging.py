"""Copies of what training is about to change: what they hold, what orders them, and that memory is reused."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import swapckpt
from swapckpt.checkpointer import staging
from swapckpt.checkpointer.staging import Staging
from swapckpt.device import CpuDevice
from swapckpt.errors import PhaseError, ReleasedStorageError
from swapckpt.storage import SwapSavePlanner, SwapStorageReader, SwapStorageWriter
from tests.checkpointer.jobs import ASYNC, CONFIGS, Gate, Job, differing, history, hooked, loaded
from tests.storage.stores import equal, unwrapped

if TYPE_CHECKING:
    from pathlib import Path


LARGE = 40_000
"""Elements; copied by the lane's thread."""


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(200, LARGE // 100)
    return {
        "plain": torch.randn(LARGE),
        "permuted": base.t(),
        "strided": base[:, ::2],
        "slice": base[3:150, 10:344],
        "expanded": torch.randn(1, LARGE).expand(3, LARGE),
        "conj": torch.randn(LARGE, dtype=torch.complex64).conj(),
        "neg": torch.randn(LARGE, dtype=torch.complex64).conj().imag,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "bf16": torch.randn(LARGE).bfloat16(),
        "bool": torch.rand(LARGE * 4) > 0.5,
        "sparse": torch.eye(50).to_sparse(),
    }


def on(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "device_for", lambda *_, **options: CpuDevice(policy, **options))


@pytest.mark.parametrize("policy", ["inline", "thread", "lazy", "random"])
def test_odd_tensors_are_copied_as_they_are(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(policy, monkeypatch)
    stage = Staging(timeout_secs=60)
    for _ in range(3):
        sources = odd_tensors()
        copies = {name: stage.copy(tensor) for name, tensor in sources.items()}
        stage.start()
        expected = {name: tensor.clone() for name, tensor in sources.items()}
        stage.fence()
        for name, tensor in sources.items():
            if name != "expanded":
                tensor.copy_(torch.zeros_like(tensor))  # what comes behind the fence changes nothing
        stage.synchronize()
        for name, copied in copies.items():
            assert torch.equal(copied.to_dense().resolve_neg(), expected[name].to_dense().resolve_neg()), name
            assert copied.dtype == expected[name].dtype


def test_memory_is_reused_and_grows_with_nothing_but_what_is_copied() -> None:
    stage = Staging(timeout_secs=60)

    def save(*numels: int) -> int:
        for numel in numels:
            stage.copy(torch.ones(numel))
        stage.start()
        stage.synchronize()
        return stage.nbytes

    held = save(LARGE, 2 * LARGE)
    assert held >= 3 * LARGE * 4
    assert [save(LARGE, 2 * LARGE) for _ in range(5)] == [held] * 5
    assert save(LARGE) <= held
    assert save(LARGE, 2 * LARGE) == held
    assert save(2 * LARGE, LARGE) == held


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_host_bytes_are_constant_over_saves(tmp_path: Path, config: Any) -> None:
    job = Job.build(config)
    held = set()
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        for step in range(1, 6):
            job.step(step)
            checkpointer.save(step).wait()
            held.add((checkpointer._staging.nbytes, job.manager.memory().host_nbytes))
        assert len(held) == 1
        large = [param for param in job.model.parameters() if param.nbytes >= staging.SMALL_NBYTES]
        copies = 1 if config is not None else 3  # with the moments of what is not swapped
        assert checkpointer._staging.nbytes >= copies * sum(param.nbytes for param in large)
        slabs_nbytes = 2 << 20  # one for the small ones
        assert checkpointer._staging.nbytes <= copies * sum(param.nbytes for param in large) + slabs_nbytes


@pytest.mark.parametrize("policy", ["lazy", "random"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_next_step_waits_for_copies_that_are_as_late_as_they_may_be(
    tmp_path: Path, config: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(policy, monkeypatch)
    job = Job.build(config)
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        for step in range(1, 5):
            job.step(step)
            checkpointer.save(step)
    reference = history()
    for step in range(1, 5):
        assert not differing(loaded(tmp_path, step)[1].contents(), reference[step]), step


def test_a_load_waits_for_copies_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, gate = Job.build(), Gate()
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        checkpointer.save(0).wait()
    on("lazy", monkeypatch)
    with hooked(gate), swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        job.step(1)
        checkpointer.save(1)
        assert checkpointer.load(0) == 0
    assert not differing(loaded(tmp_path, 1)[1].contents(), history()[1])


# ---------------------------------------------------------------------------- changes without a step


def exchange(job: Job) -> None:
    """As evaluation does with the average of the weights."""
    with torch.no_grad():
        for param in job.model.parameters():
            param.fill_(7.0)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_that_change_while_they_are_copied_fail_the_save(
    tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("lazy", monkeypatch)
    job, changed, synchronize = Job.build(config), threading.Event(), Staging.synchronize

    def late(self: Staging) -> None:
        assert changed.wait(60)
        synchronize(self)

    monkeypatch.setattr(Staging, "synchronize", late)
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        job.step(1)
        saved = checkpointer.save(1)
        exchange(job)
        changed.set()
        with pytest.raises(PhaseError, match="Changed while the save was copying") as caught:
            saved.result()
        message = str(caught.value)
        assert all(f"  - {name}" in message for name in ("down.weight", "up.weight")), message
        assert checkpointer.steps() == []
        checkpointer.save(1).result()  # as it is now
    assert all((param == 7.0).all() for param in loaded(tmp_path, 1)[1].model.parameters())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_behind_a_fence_parameters_may_change(
    tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("lazy", monkeypatch)
    job = Job.build(config)
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        job.step(1)
        checkpointer.save(1)
        checkpointer.fence()
        exchange(job)
    assert not differing(loaded(tmp_path, 1)[1].contents(), history()[1])


# ---------------------------------------------------------------------------- what cannot be saved


@pytest.mark.parametrize("numel", [3, LARGE], ids=["small", "large"])
def test_a_parameter_without_storage_is_named(tmp_path: Path, numel: int) -> None:
    model = torch.nn.ParameterDict({"here": torch.ones(3), "gone": torch.ones(numel)})
    model["gone"].untyped_storage().resize_(0)
    with (
        swapckpt.Checkpointer(tmp_path, {"model": model}, ASYNC) as checkpointer,
        pytest.raises(ReleasedStorageError, match="gone"),
    ):
        checkpointer.save(1)


def test_a_small_tensor_that_loses_its_storage_between_saves_is_named() -> None:
    """That it had one when it was copied before says nothing."""
    stage, tensor = Staging(timeout_secs=60), torch.ones(100)
    for _ in range(2):
        stage.copy(tensor, name="w")
        stage.start()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ReleasedStorageError, match="w"):
        stage.copy(tensor, name="w")


def test_a_tensor_without_storage_is_named(tmp_path: Path) -> None:
    values = {"here": torch.ones(3), "gone": torch.ones(LARGE)}
    values["gone"].untyped_storage().resize_(0)
    with (
        swapckpt.Checkpointer(tmp_path, {"values": values}, ASYNC) as checkpointer,
        pytest.raises(ReleasedStorageError, match=r"values\.gone"),
    ):
        checkpointer.save(1)


# ------------------------------------------------------------------------------------------ MirrorStager


@pytest.mark.parametrize("gives_back", [True, False], ids=["written", "held"])
def test_mirror_stager_with_stock_async_save(tmp_path: Path, gives_back: bool, one_rank: None) -> None:
    job = Job.build(swapckpt.SwapConfig(swap_times=3, min_numel=16, spare_nbytes=1 << 30))
    stager = swapckpt.MirrorStager(job.manager)
    writer = SwapStorageWriter(on_written=stager.written if gives_back else None)
    planner = SwapSavePlanner()
    expected = {}
    for step in range(1, 4):
        job.step(step)
        expected[step] = job.contents()
        state = {"model": job.model.state_dict(), "optimizer": job.manager.state_dict()}
        with unwrapped():
            saved = dcp.async_save(
                state,
                checkpoint_id=tmp_path / f"step-{step}",
                storage_writer=writer,
                planner=planner,
                async_stager=stager,
            )
        stager.release_after(saved)
        job.step(100 + step)  # at once
        saved.result()
        assert not stager.should_synchronize_after_execute
    stager.close()
    for step in range(1, 4):
        other = Job.build()
        states = {"model": other.model, "optimizer": other.manager}
        with swapckpt.Checkpointer(tmp_path, states, ASYNC) as checkpointer:
            assert checkpointer.load(step) == step
        found = {name: value for name, value in other.contents().items() if isinstance(value, torch.Tensor)}
        assert not [name for name in found if name != "seen" and not equal(found[name], expected[step][name])]
        assert SwapStorageReader(tmp_path / f"step-{step}").read_metadata().state_dict_metadata


def test_mirror_stager_gives_mirrors_back_when_a_save_fails(tmp_path: Path, one_rank: None) -> None:
    job = Job.build(swapckpt.SwapConfig(swap_times=3, min_numel=16, spare_nbytes=0, timeout_secs=60))
    job.step(1)
    stager = swapckpt.MirrorStager(job.manager)
    (tmp_path / "file").write_text("in the way")
    writer = SwapStorageWriter(tmp_path / "file" / "step-1")
    saved = dcp.async_save(
        {"optimizer": job.manager.state_dict()}, storage_writer=writer, async_stager=stager
    )
    stager.release_after(saved)
    with pytest.raises(dcp.api.CheckpointException):
        saved.result()
    job.step(2)  # would wait for the lease, and fail
    assert not differing(job.contents(), history()[2])


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    """A group of one, which ``dcp.async_save`` wants."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
