"""Two ranks that do not see the same: whatever one of them knows, both raise, and both go on together."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

import swapckpt
from swapckpt.errors import (
    StorageError,
    SwapCkptError,
)
from tests.checkpointer.jobs import ASYNC, MODES, SWAP, Gate, Job, differing, history, hooked, loaded
from tests.core.devices import FailingDevice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.multirank import RankRunner


def raised(call: Callable[[], object]) -> str:
    """Type and message of what ``call`` raises."""
    try:
        call()
    except SwapCkptError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def save_and_wait(checkpointer: swapckpt.Checkpointer, step: int) -> Callable[[], object]:
    return lambda: checkpointer.save(step).result()


# ------------------------------------------------------------------------------- a failure seen by one alone


def read_by_one_rank_only(folder: Path) -> tuple[list[str], list[int]]:
    """Both ranks' saves of step 1 fail; only rank 0 asks for the result."""
    job = Job.build()
    (folder / "step-1").mkdir(parents=True, exist_ok=True)
    (folder / "step-1/foreign").touch()
    with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        handle = checkpointer.save(1)
        if dist.get_rank() == 0:
            with pytest.raises(StorageError):
                handle.result()
        seen = [raised(save_and_wait(checkpointer, step)) for step in (2, 3)]
        return seen, checkpointer.steps()


def test_a_failure_that_one_rank_has_read_is_raised_on_all_or_none(
    tmp_path: Path, run_ranks: RankRunner
) -> None:
    first, second = run_ranks(2, read_by_one_rank_only, tmp_path / "run")
    assert first == second
    assert first[0][1] == "nothing"
    assert first[1][-1] == 3


def load_after_a_failure_read_by_one(folder: Path) -> tuple[list[str], int | None]:
    job = Job.build()
    (folder / "step-1").mkdir(parents=True, exist_ok=True)
    (folder / "step-1/foreign").touch()
    with swapckpt.Checkpointer(folder, job.states, replace(ASYNC, timeout_secs=10)) as checkpointer:
        handle = checkpointer.save(1)
        if dist.get_rank() == 0:
            with pytest.raises(StorageError):
                handle.result()
        step = checkpointer.load()
        return [raised(save_and_wait(checkpointer, step)) for step in (2, 2)], step


def test_a_load_leaves_the_failure_of_a_save_to_the_next_save(tmp_path: Path, run_ranks: RankRunner) -> None:
    first, second = run_ranks(2, load_after_a_failure_read_by_one, tmp_path / "run")
    assert first == second
    seen, step = first
    assert step is None
    assert "foreign" in seen[0]
    assert seen[1] == "nothing"


# --------------------------------------------------------------------------------------- a capture that fails


def capture_fails_on_rank_1(folder: Path, mode: str) -> tuple[list[str], list[int]]:
    job = Job.build()
    device = FailingDevice("thread")
    if dist.get_rank() == 1:
        job = Job.build(None)
        swapckpt.swap_optimizer(job.optimizer, SWAP, device=device)
    seen = []
    with swapckpt.Checkpointer(folder, job.states, MODES[mode]) as checkpointer:
        job.step(1)
        seen.append(raised(save_and_wait(checkpointer, 1)))
        if dist.get_rank() == 1:
            device.offload.copies_left = 1
            with pytest.raises(SwapCkptError):
                job.step(2)
        else:
            job.step(2)
        seen.append(raised(save_and_wait(checkpointer, 2)))
        seen.append(raised(save_and_wait(checkpointer, 3)))
        assert checkpointer.load() == 1
        job.step(2)
        seen.append(raised(save_and_wait(checkpointer, 2)))
        return seen, checkpointer.steps()


@pytest.mark.parametrize("mode", MODES)
def test_a_state_that_failed_on_one_rank_fails_the_save_on_all(
    tmp_path: Path, run_ranks: RankRunner, mode: str
) -> None:
    first, second = run_ranks(2, capture_fails_on_rank_1, tmp_path, mode)
    assert first == second
    told, steps = first
    assert told[0] == told[3] == "nothing"
    assert all(text.startswith("StateFailedError") for text in told[1:3])
    assert steps == [1, 2]
    reference = history()
    step, job = loaded(tmp_path)
    assert step == 2
    assert not differing(job.contents(), reference[2])


def capture_error_is_raised_by_save(folder: Path) -> str:
    job = Job.build()
    if dist.get_rank() == 1:
        job.progress["open file"] = (folder / "x").open("w")  # cannot be copied
    with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        return raised(lambda: checkpointer.save(1))


def test_what_cannot_be_captured_is_raised_by_save_itself_on_every_rank(
    tmp_path: Path, run_ranks: RankRunner
) -> None:
    for text in run_ranks(2, capture_error_is_raised_by_save, tmp_path):
        assert text.startswith("CheckpointError: copying 'progress.open file' for the save failed: TypeError")


# ------------------------------------------------------------------------------------------ different calls


def different_steps(folder: Path) -> tuple[list[str], list[int]]:
    job = Job.build()
    with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        wrong = raised(save_and_wait(checkpointer, 5 + dist.get_rank()))
        return [wrong, raised(save_and_wait(checkpointer, 7))], checkpointer.steps()


def test_ranks_that_save_different_steps(tmp_path: Path, run_ranks: RankRunner) -> None:
    first, second = run_ranks(2, different_steps, tmp_path)
    assert first == second
    (wrong, right), steps = first
    assert "rank 0: (5, False)" in wrong
    assert "rank 1: (6, False)" in wrong
    assert right == "nothing"
    assert steps == [7]


def different_loads(folder: Path) -> tuple[list[str], int | None]:
    job = Job.build()
    rank = dist.get_rank()
    with swapckpt.Checkpointer(folder, job.states, replace(ASYNC, timeout_secs=10)) as checkpointer:
        for step in (1, 2):
            job.step(step)
            checkpointer.save(step).result()
        seen = [
            raised(lambda: checkpointer.load(1 + rank)),
            raised(lambda: checkpointer.load(1 + 8 * rank)),  # one of them does not exist
            raised(lambda: checkpointer.load(allow_partial=rank == 0)),
        ]
        return seen, checkpointer.load()


def test_ranks_that_load_differently(tmp_path: Path, run_ranks: RankRunner) -> None:
    first, second = run_ranks(2, different_loads, tmp_path)
    assert first == second
    seen, step = first
    assert all("do not agree" in text for text in seen), seen
    assert step == 2


def one_is_still_busy(folder: Path) -> tuple[list[str], list[int]]:
    """Rank 0's save takes longer: it removes an old checkpoint at the end, when rank 1 is done."""
    job = Job.build()
    gate = Gate("remove")
    config = replace(ASYNC, on_busy="raise", keep_latest=1)
    with hooked(gate), swapckpt.Checkpointer(folder, job.states, config) as checkpointer:
        checkpointer.save(1).result()
        seen = []
        with gate.closed():
            handle = checkpointer.save(2)
            if dist.get_rank() == 0:
                assert gate.arrived.wait(30)
            else:
                handle.result()
            seen.append(raised(lambda: checkpointer.save(3)))
            dist.barrier()
        checkpointer.wait()
        dist.barrier()
        seen.append(raised(save_and_wait(checkpointer, 4)))
        dist.barrier()
        return seen, checkpointer.steps()


def test_a_save_that_one_rank_has_not_finished_is_busy_for_all(tmp_path: Path, run_ranks: RankRunner) -> None:
    first, second = run_ranks(2, one_is_still_busy, tmp_path)
    assert first == second
    (busy, free), steps = first
    assert busy.startswith("SaveInProgressError: Step 2")
    assert free == "nothing"
    assert steps == [4]


# -------------------------------------------------------------------------------------------- plain values


def different_values(folder: Path) -> list[str]:
    rank = dist.get_rank()
    job = Job.build()
    states = {**job.states, "lucky": {"number": rank, "same": 1}, "word": f"rank {rank}", "nan": float("nan")}
    with swapckpt.Checkpointer(folder, states, ASYNC) as checkpointer:
        first = raised(save_and_wait(checkpointer, 1))
        states["lucky"]["number"] = 0
        states["word"] = swapckpt.PerRank(rank) if rank == 2 else "same"
        return [first, raised(save_and_wait(checkpointer, 2))]


def test_different_plain_values_under_one_key_are_an_error_that_lists_them(
    tmp_path: Path, run_ranks: RankRunner
) -> None:
    first, second = run_ranks(2, different_values, tmp_path)
    assert first == second
    assert first[0].startswith("SchemaError")
    assert "lucky.number: ranks 0, 1 differ" in first[0]
    assert "word: ranks 0, 1 differ" in first[0]
    assert "same" not in first[0]
    assert "nan" not in first[0]
    assert first[1] == "nothing"


# -------------------------------------------------------------------------------------------- a lost peer


def peer_dies_mid_save(folder: Path) -> tuple[str, float, list[int], list[str]]:
    job = Job.build()

    def die(_number: int, operation: str, _path: str) -> None:
        if operation == "append" and dist.get_rank() == 1 and saving:
            os.kill(os.getpid(), signal.SIGKILL)

    saving: list[int] = []
    with hooked(die):
        checkpointer = swapckpt.Checkpointer(folder, job.states, replace(ASYNC, timeout_secs=5))
    job.step(1)
    checkpointer.save(1).result()
    job.step(2)
    saving.append(2)
    handle = checkpointer.save(2)
    text = raised(handle.result)
    job.step(3)  # nothing is leased any more, nothing waits
    again = [raised(lambda: checkpointer.save(3).result()), raised(checkpointer.close)]
    return text, job.progress["tokens"], checkpointer.steps(), again


def test_a_killed_peer_is_an_error_within_the_bound(tmp_path: Path, run_ranks: RankRunner) -> None:
    survivor, dead = run_ranks.outcomes(2, peer_dies_mid_save, tmp_path)
    assert "SIGKILL" in dead.error
    assert survivor.value is not None, f"{survivor.error}\n{survivor.log}"
    text, tokens, steps, again = survivor.value
    assert text.startswith("CheckpointError")
    assert "a rank is gone" in text
    assert tokens == 60
    assert steps == [1]
    assert again[0].startswith("CheckpointError")
    assert again[1] == "nothing"


def peer_leaves_with_an_error(folder: Path) -> tuple[str, str]:
    """Rank 1 raises inside the block, while rank 0 goes on and saves."""
    job = Job.build()
    config = replace(ASYNC, timeout_secs=50)  # nobody may wait for that
    if dist.get_rank() == 1:
        with pytest.raises(ZeroDivisionError), swapckpt.Checkpointer(folder, job.states, config):
            raise ZeroDivisionError
        return "left", ""
    with swapckpt.Checkpointer(folder, job.states, config) as checkpointer:
        return raised(save_and_wait(checkpointer, 1)), str(checkpointer.steps())


def test_an_error_inside_the_block_is_not_held_up_by_the_other_ranks(
    tmp_path: Path, run_ranks: RankRunner
) -> None:
    begin = time.monotonic()
    first, second = replace(run_ranks, timeout_secs=30)(2, peer_leaves_with_an_error, tmp_path)
    assert second == ("left", "")
    assert first[0].startswith("CheckpointError")
    assert first[1] == "[]"
    assert time.monotonic() - begin < 45
