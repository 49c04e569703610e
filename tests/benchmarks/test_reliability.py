"""What the reliability benchmark counts, it can count: each of its figures, made to be wrong."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

from benchmarks import _damage
from benchmarks._damage import Damaged, flip_bit, load_damaged, save_ours
from benchmarks._lives import Lives, Tally
from benchmarks._victims import Job, Reference
from benchmarks.reliability import judge_load
from swapckpt.storage import committed_steps, open_files

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 64


@pytest.fixture
def chance() -> random.Random:
    return random.Random(0)


@pytest.fixture
def data_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_damage, "FILES", _damage.FILES[:1])


@pytest.mark.usefixtures("data_alone")
def test_a_flipped_bit_is_a_wrong_load_where_nothing_is_verified(
    tmp_path: Path, chance: random.Random
) -> None:
    damaged = Damaged(tmp_path, WIDTH, save_ours)
    verified = load_damaged(damaged, flip_bit, number=4, chance=chance)
    assert (verified.injected, verified.losses, verified.wrong_loads) == (4, 0, 0)
    unverified = load_damaged(damaged, flip_bit, number=4, chance=chance, verify=False)
    assert unverified.wrong_loads > 0


@pytest.mark.usefixtures("data_alone")
def test_a_whole_checkpoint_that_no_fallback_finds_is_a_loss(tmp_path: Path, chance: random.Random) -> None:
    def flip_in_all(path: Path, older: Path, chance: random.Random) -> None:
        for each in (path, older, older.parent.parent / "step-1" / path.name):
            data = bytearray(each.read_bytes())
            data[len(data) // 2] ^= 1
            each.write_bytes(data)

    tally = load_damaged(Damaged(tmp_path, WIDTH, save_ours), flip_in_all, number=2, chance=chance)
    assert tally == Tally(injected=2, hit=2, losses=2)


def lives_of(folder: Path, *, seed: int = 0) -> Lives:
    return Lives(folder, WIDTH, "disabled", Reference(WIDTH, seed=seed))


def test_lives_that_are_killed_lose_nothing_and_what_is_removed_is_a_loss(
    tmp_path: Path, chance: random.Random
) -> None:
    lives = lives_of(tmp_path / "x")
    lives.kill_one(chance)
    lives.kill_one(chance)
    assert lives.tally.injected == 2
    assert (lives.tally.losses, lives.tally.wrong_loads) == (0, 0)
    assert lives.promised in committed_steps(open_files(tmp_path / "x"))
    for step in committed_steps(open_files(tmp_path / "x")):
        if step >= lives.promised:
            shutil.rmtree(tmp_path / "x" / f"step-{step}")
    with lives.born():
        assert lives.tally.losses == 1
    assert lives.tally.wrong_loads == 0


def test_a_checkpoint_that_does_not_load_is_a_loss(tmp_path: Path, chance: random.Random) -> None:
    lives = lives_of(tmp_path / "x")
    lives.kill_one(chance)
    for path in (tmp_path / "x").glob("step-*/*.distcp"):
        path.write_bytes(b"")
    with lives.born():
        assert lives.tally.losses == 1


def test_other_bits_than_those_of_plain_torch_are_a_wrong_load(tmp_path: Path) -> None:
    lives = lives_of(tmp_path / "x", seed=1)
    with lives.born():
        assert lives.tally.wrong_loads == 1


def test_a_save_that_fails_though_nothing_strikes_is_a_loss(tmp_path: Path) -> None:
    lives = lives_of(tmp_path / "x")
    with lives.born() as life:
        (tmp_path / "x").write_text("no folder")
        for _ in range(3):
            lives._next_save(life)
        assert lives.tally.losses == 2


def test_the_newest_checkpoint_is_judged_by_its_bits_and_its_step(tmp_path: Path) -> None:
    job = Job(WIDTH)
    job.step()
    save_ours(job, tmp_path)
    reference = Reference(WIDTH)

    def judged(promised: int, reference: Reference) -> Tally:
        tally = Tally()
        judge_load(tally, tmp_path, promised, reference=reference, width=WIDTH)
        return tally

    assert judged(1, reference) == Tally()
    assert judged(2, reference) == Tally(losses=1)
    assert judged(1, Reference(WIDTH, seed=1)) == Tally(wrong_loads=1)
