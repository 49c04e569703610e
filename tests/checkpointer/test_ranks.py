"""Two ranks: sharded and rank-local content, damage and full disks on one of them, training in between."""

from __future__ import annotations

import errno
import os
import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import swapckpt
from tests.checkpointer.jobs import (
    ASYNC,
    CONFIGS,
    SWAP,
    Failing,
    Job,
    Net,
    differing,
    hooked,
)
from tests.checkpointer.test_agreement import raised, save_and_wait

if TYPE_CHECKING:
    from pathlib import Path

    from tests.multirank import RankRunner

PINNED = swapckpt.CheckpointConfig(async_mode="async_with_pinned_mem", timeout_secs=120)
MODES = {"async": ASYNC, "pinned": PINNED}


def without_norm() -> Net:
    model = Net()
    model.norm = torch.nn.Identity()  # type: ignore[assignment]
    return model


def sharded(config: swapckpt.SwapConfig | None = SWAP) -> Job:
    model = without_norm()
    for each in (model.up, model.down):
        fully_shard(each)
    fully_shard(model)
    return Job.build(config, model=model)


def local(job: Job) -> dict[str, Any]:
    return {
        name: value.to_local() if isinstance(value, torch.distributed.tensor.DTensor) else value
        for name, value in job.contents().items()
    }


# ------------------------------------------------------------------------------- C1 and C12, on shards


def train_while_saving(folder: Path, swapped: str, mode: str) -> list[float]:
    """All-reduces of the trainer's own, steps and saves at once; what each save holds is compared."""
    job = sharded(CONFIGS[swapped])
    expected: dict[int, dict[str, Any]] = {}
    sums = []
    with swapckpt.Checkpointer(folder, job.states, MODES[mode]) as checkpointer:
        for step in range(1, 4):
            job.step(step)
            expected[step] = local(job)
            checkpointer.save(step)
            for number in range(40):
                value = torch.tensor(float(dist.get_rank() + number))
                dist.all_reduce(value)
                sums.append(value.item() - 2 * number)
    for step, contents in expected.items():
        job = sharded(CONFIGS[swapped])
        with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
            assert checkpointer.load(step) == step
        assert not differing(local(job), contents), step
    return sums


@pytest.mark.parametrize(
    ("swapped", "mode"), [("swapped", "async"), ("unswapped", "async"), ("swapped", "pinned")]
)
def test_c1_c12_saves_while_the_trainer_communicates(
    tmp_path: Path, run_ranks: RankRunner, swapped: str, mode: str
) -> None:
    for sums in run_ranks(2, train_while_saving, tmp_path, swapped, mode):
        assert sums == [1.0] * 120


# ------------------------------------------------------------------------------- C7 and C9, on one of two


def full_on_rank_1(folder: Path) -> tuple[list[str], list[int]]:
    job = sharded()
    failing = Failing("append", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    seen = []
    with hooked(failing), swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        job.step(1)
        seen.append(raised(save_and_wait(checkpointer, 1)))
        if dist.get_rank() == 1:
            failing.arm()
        seen.append(raised(save_and_wait(checkpointer, 2)))
        before = checkpointer.steps()
        dist.barrier()
        seen.append(raised(save_and_wait(checkpointer, 2)))
        return seen, before


def test_c7_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path: Path, run_ranks: RankRunner) -> None:
    first, second = run_ranks(2, full_on_rank_1, tmp_path)
    assert first == second
    seen, steps = first
    assert seen[0] == seen[2] == "nothing"
    assert seen[1].startswith("CheckpointError")
    assert "No space left" in seen[1]
    assert steps == [1]


def fall_back(folder: Path) -> tuple[str, int | None, bool]:
    job = sharded()
    with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        expected = None
        for step in (1, 2):
            job.step(step)
            expected = expected or local(job)
            checkpointer.save(step).wait()
        dist.barrier()
        if dist.get_rank() == 1:
            file = folder / "step-2/__1_0.distcp"
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        dist.barrier()
        text = raised(checkpointer.load)
        found = checkpointer.load(fallback=True)
        whole = not differing(local(job), expected)
        job.step(2)  # nothing refuses
        return text, found, whole


def test_c9_damage_that_one_rank_reads_sends_all_to_the_older_one(
    tmp_path: Path, run_ranks: RankRunner
) -> None:
    for text, step, whole in run_ranks(2, fall_back, tmp_path):
        assert text.startswith("CorruptCheckpointError")
        assert "__1_0.distcp" in text
        assert step == 1
        assert whole


# ------------------------------------------------------------------------------- C19: what each rank has


def rank_values(folder: Path, *, saves: bool) -> tuple[Any, Any, list[str]]:
    """The next random number and the position of this rank, before or after a load; and warnings."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    random.seed(rank)
    torch.manual_seed(rank)
    position: swapckpt.PerRank[Any] = swapckpt.PerRank({"at": 100 + rank, "t": torch.full((2,), float(rank))})
    states = {"rng": swapckpt.RngState(), "position": position, "epoch": 3}
    with (
        swapckpt.Checkpointer(folder, states, ASYNC) as checkpointer,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        if saves:
            checkpointer.save(1).wait()
        else:
            random.seed(50 + rank)
            position.value = {"at": -1, "t": torch.zeros(2)}
            checkpointer.load()
        texts = [str(each.message) for each in told if "swapckpt" in str(each.filename)]
    return (
        (random.random(), torch.rand(1).item()),
        (position.value["at"], position.value["t"].tolist()),
        texts,
    )


def test_c19_each_rank_gets_its_own_back(tmp_path: Path, run_ranks: RankRunner) -> None:
    before = run_ranks(2, rank_values, tmp_path, saves=True)
    assert before[0][:2] != before[1][:2]
    assert run_ranks(2, rank_values, tmp_path, saves=False) == before


def test_c19_with_more_ranks_those_without_a_value_keep_theirs_and_are_told(
    tmp_path: Path, run_ranks: RankRunner
) -> None:
    before = run_ranks(1, rank_values, tmp_path, saves=True)
    first, second = run_ranks(2, rank_values, tmp_path, saves=False)
    assert first == before[0]
    assert second[1] == (-1, [0.0, 0.0])
    assert any("'position' of 1 ranks and none of rank-1" in text for text in second[2])
    assert any("'rng' of 1 ranks" in text for text in second[2])


def test_c19_with_fewer_ranks_each_gets_that_of_its_number(tmp_path: Path, run_ranks: RankRunner) -> None:
    before = run_ranks(2, rank_values, tmp_path, saves=True)
    assert run_ranks(1, rank_values, tmp_path, saves=False) == before[:1]


# ------------------------------------------------------------------------------- other world sizes


def save_shards(folder: Path) -> None:
    job = sharded()
    with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        for step in (1, 2):
            job.step(step)
        checkpointer.save(2)


def test_what_two_ranks_saved_is_loaded_by_one(tmp_path: Path, run_ranks: RankRunner) -> None:
    run_ranks(2, save_shards, tmp_path)
    job, plain = Job.build(model=without_norm()), Job.build(None, model=without_norm())
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        assert checkpointer.load() == 2
    for step in (1, 2):
        plain.step(step)
    assert not differing(job.contents(), plain.contents())
