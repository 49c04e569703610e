"""The demo's data must be real text, and the same batch at the same step in every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from swapckpt.demo.corpus import BUNDLED_NAME, Corpus, load_corpus
from swapckpt.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

COUNTING = Corpus("counting", torch.arange(250, dtype=torch.uint8))


def test_bundled_text_is_prose() -> None:
    corpus = load_corpus(None, min_nbytes=129)
    text = bytes(corpus.tokens.tolist()).decode()
    assert corpus.name == BUNDLED_NAME
    assert len(text) > 100_000
    assert "assignment" in text.lower()


def test_file_is_read_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    assert load_corpus(path, min_nbytes=256).tokens.tolist() == list(range(256))


def test_short_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 9)
    with pytest.raises(ConfigError, match=r"short\.txt has 9 bytes, one sequence needs 10"):
        load_corpus(path, min_nbytes=10)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent cannot be read \(No such file"):
        load_corpus(tmp_path / "absent", min_nbytes=1)


def test_batch_is_windows_of_the_text_and_their_continuation() -> None:
    inputs, targets = COUNTING.batch(step=3, seed=0, size=64, time=10)
    assert inputs.shape == targets.shape == (64, 10)
    assert torch.equal(inputs[:, 1:], inputs[:, :-1] + 1)
    assert torch.equal(targets, inputs + 1)
    assert inputs[:, 0].unique().numel() > 30


def test_windows_reach_both_ends_of_the_text() -> None:
    inputs, targets = COUNTING.batch(step=1, seed=0, size=5000, time=10)
    assert inputs.min() == 0
    assert targets.max() == 249


def test_batch_depends_on_step_and_seed_alone() -> None:
    def batch(step: int, seed: int) -> list[list[int]]:
        torch.randn(1)  # the global generator must not matter
        inputs: list[list[int]] = COUNTING.batch(step=step, seed=seed, size=8, time=4)[0].tolist()
        return inputs

    assert batch(5, 7) == batch(5, 7)
    assert batch(5, 7) != batch(6, 7)
    assert batch(5, 7) != batch(5, 8)
