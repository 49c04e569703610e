"""Checkpoints that are not as they were saved: damage is named, passed over on request, replaced by a later
save; code is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import swapckpt
from swapckpt.checkpointer.damage import Damage
from swapckpt.errors import CheckpointExistsError, CorruptCheckpointError, StorageError, UnsafePickleError
from swapckpt.storage import open_files
from swapckpt.storage.commit import aside
from tests.checkpointer.damages import (
    data_file,
    flip,
    lose,
    lose_manifest,
    lose_metadata,
    lose_metadata_bytes,
    metadata_as_folder,
    swap_file,
    truncate,
)
from tests.checkpointer.jobs import ASYNC, MODES, SYNC, Job, differing, history, hooked, loaded, saved
from tests.storage.stores import HookedFiles

if TYPE_CHECKING:
    from collections.abc import Callable


def check_fallback(
    folder: Path, damaged: int, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The step below the damaged one is loaded whole, which the log says; with that damaged too, none is."""
    step, job = loaded(folder, fallback=True)
    assert step == damaged - 1
    assert f"Step {damaged} is damaged, step {step} is loaded" in caplog.text
    assert not differing(job.contents(), history()[step])
    damage(folder / f"step-{step}")
    with pytest.raises(CorruptCheckpointError):
        loaded(folder, fallback=True)


# ------------------------------------------------------------------------------------------ damage: C9


@pytest.mark.parametrize("damage", [flip, truncate, lose, swap_file, lose_metadata_bytes])
def test_c9_damage_is_named_and_fallback_loads_the_next_older_one_whole(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    with pytest.raises(CorruptCheckpointError) as caught:
        loaded(tmp_path)
    assert "step-2" in str(caught.value)
    if damage in (flip, swap_file):
        assert data_file(tmp_path / "step-2").name in str(caught.value)
        assert "model." in str(caught.value) or "optimizer." in str(caught.value)
    check_fallback(tmp_path, 2, damage, caplog)


def test_without_verification_a_flipped_bit_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    flip(tmp_path / "step-1")
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, replace(ASYNC, verify_on_load=False)) as checkpointer:
        assert checkpointer.load() == 1
    assert differing(job.contents(), history()[1])


# ------------------------------------------------------------------------------ damaged steps, reached again


@pytest.mark.parametrize("damage", [flip, truncate, lose_metadata, metadata_as_folder])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_step_that_a_load_found_damaged_is_saved_again(
    tmp_path: Path,
    mode: swapckpt.CheckpointConfig,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-3")
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, mode) as checkpointer:
        with pytest.raises(CorruptCheckpointError, match=r"step-3.*(\n.*)*fallback=True.*step 2"):
            checkpointer.load()
        assert checkpointer.load(fallback=True) == 2
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(2).wait()  # a good one never
        job.step(3)
        checkpointer.save(3).wait()
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(3).wait()  # is good now
    assert "Step 3 was found damaged when it was loaded: this save replaces it." in caplog.text
    step, again = loaded(tmp_path)
    assert step == 3
    assert not differing(again.contents(), history()[3])


def test_a_step_that_no_load_found_damaged_is_not_replaced(tmp_path: Path) -> None:
    lost = tmp_path / "step-1"
    lost.mkdir()
    damage = Damage(open_files(tmp_path))
    assert not damage.may_replace(1)
    damage.found(1)
    assert damage.may_replace(1)
    damage.replaced(1)
    assert not damage.may_replace(1)


@pytest.mark.parametrize("error", [StorageError("gone"), PermissionError("gone")], ids=["ours", "system's"])
def test_a_load_says_what_it_found_though_the_store_fails_meanwhile(tmp_path: Path, error: Exception) -> None:
    asked: list[str] = []

    def fail(_number: int, operation: str, _path: str) -> None:
        asked.append(operation)
        raise error

    damage = Damage(HookedFiles(open_files(tmp_path), fail))
    damage.found(1)
    assert asked
    assert damage.may_replace(1)


def test_a_good_step_that_another_job_saved_in_place_of_a_damaged_one_is_not_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip(tmp_path / "step-2")
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        assert checkpointer.load(fallback=True) == 1
        with swapckpt.Checkpointer(tmp_path, {"other": 7}, SYNC) as other:
            other.save(2, overwrite=True)
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(2).wait()


def test_c15_two_jobs_that_save_one_step_do_not_both_commit_it(tmp_path: Path) -> None:
    states = [{"who": who, "x": torch.full((100_000,), who)} for who in (0, 1)]
    jobs = [swapckpt.Checkpointer(tmp_path, each, ASYNC) for each in states]
    handles = [job.save(1) for job in jobs]
    committed = []
    for who, handle in enumerate(handles):
        try:
            handle.wait()
        except CheckpointExistsError:
            continue
        committed.append(who)
    assert len(committed) == 1
    there: dict[str, Any] = {"who": -1, "x": torch.zeros(100_000, dtype=torch.int64)}
    with swapckpt.Checkpointer(tmp_path, there, ASYNC) as checkpointer:
        assert checkpointer.load() == 1
    assert [there["who"]] == committed
    assert torch.equal(there["x"], states[committed[0]]["x"])
    for job in jobs:
        job.close()


# ------------------------------------------------------------------------------------------ lost metadata


def test_c9_a_newer_step_without_its_metadata_is_never_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2, 3)
    lose_metadata(tmp_path / "step-1")  # older than what is loaded: a removal that was cut short
    lose_metadata(tmp_path / "step-3")
    for asked in (None, 3):
        with pytest.raises(
            CorruptCheckpointError, match=r"step-3 has lost its \.metadata(.|\n)*fallback=True"
        ):
            loaded(tmp_path, step=asked)
    assert loaded(tmp_path, step=2)[0] == 2
    check_fallback(tmp_path, 3, lose_metadata, caplog)


def test_a_newer_step_that_was_never_committed_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "__0_0.distcp").write_bytes(b"as stock torch leaves it")
    (tmp_path / "step-2").rename(tmp_path / aside("step-4", "a" * 32, kind="new"))
    assert loaded(tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("at", "damage"),
    [("__", truncate), ("__", lose), (".metadata", lose_metadata), (".swapckpt", lose_manifest)],
)
def test_a_file_that_is_cut_or_removed_while_its_step_is_read_is_damage(
    tmp_path: Path, at: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    struck: list[str] = []

    def before(_: int, operation: str, path: str) -> None:
        if operation == "open" and path.startswith(f"step-2/{at}") and not struck:
            struck.append(path)
            damage(tmp_path / "step-2")

    with hooked(before):
        step, job = loaded(tmp_path, fallback=True)
    assert struck
    assert step == 1
    assert "Step 2 is damaged, step 1 is loaded" in caplog.text
    assert "step-2" in caplog.text.split("is loaded:")[1]
    assert not differing(job.contents(), history()[1])


# ------------------------------------------------------------------------------ code in a checkpoint: C11


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("place", ["item", "metadata"])
def test_c11_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path, place: str) -> None:
    marker = tmp_path / "ran"
    folder = tmp_path / "run"
    dcp.save({"value": Evil(marker) if place == "item" else 1}, checkpoint_id=folder / "step-1")
    if place == "metadata":
        import pickle

        (folder / "step-1/.metadata").write_bytes(pickle.dumps(Evil(marker)))
    with swapckpt.Checkpointer(folder, {"value": 0}) as checkpointer:
        for fallback in (False, True):
            with pytest.raises(UnsafePickleError):
                checkpointer.load(fallback=fallback)
    assert not marker.exists()
