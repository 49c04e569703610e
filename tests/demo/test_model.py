"""The demo's Llama must have the size it promises and be the transformer it says it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swapckpt.demo.model import Llama, LlamaShape, parse_count, rotate, solve_shape
from swapckpt.errors import ConfigError

TINY = LlamaShape(dim=64, layers=2, heads=4, ffn=128)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10M", 10_000_000),
        ("1.5b", 1_500_000_000),
        ("800k", 800_000),
        ("12_345", 12_345),
        (" 2T ", 2 * 10**12),
    ],
)
def test_count_is_read_as_people_write_it(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "ten", "-3M", "0", "0.1", "10MB", "1e6", "nan"])
def test_count_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="10M"):
        parse_count(text)


@pytest.mark.parametrize(
    ("count", "vocab", "tolerance"),
    [
        ("1M", 256, 0.05),
        ("10M", 256, 0.01),
        ("100M", 256, 0.01),
        ("1B", 128_256, 0.02),
        ("8B", 128_256, 0.02),
    ],
)
def test_solved_model_has_about_the_wanted_number_of_parameters(
    count: str, vocab: int, tolerance: float
) -> None:
    shape = solve_shape(parse_count(count), vocab=vocab)
    with torch.device("meta"):
        model = Llama(shape, max_time=8)
    assert sum(param.numel() for param in model.parameters()) == shape.params
    assert shape.params == pytest.approx(parse_count(count), rel=tolerance)
    assert shape.dim % shape.heads == 0


def test_eight_billion_looks_like_a_llama() -> None:
    shape = solve_shape(8 * 10**9, vocab=128_256)
    assert (shape.dim, shape.heads) == (4096, 32)
    assert 30 <= shape.layers <= 36


@pytest.mark.parametrize(("params", "vocab"), [(1000, 256), (10**7, 128_256), (10**15, 256)])
def test_impossible_size_is_refused_with_the_nearest(params: int, vocab: int) -> None:
    with pytest.raises(ConfigError, match="the nearest has"):
        solve_shape(params, vocab=vocab)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = Llama(TINY, max_time=16)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_rotation_makes_scores_depend_on_distance_only() -> None:
    model = Llama(TINY, max_time=16)
    cos, sin = model.get_buffer("cos"), model.get_buffer("sin")  # [time, head_dim / 2]
    head_dim = 2 * cos.shape[1]
    q, k = torch.randn(head_dim), torch.randn(head_dim)
    rotated_q, rotated_k = rotate(q.expand(16, -1), cos, sin), rotate(k.expand(16, -1), cos, sin)
    scores = rotated_q @ rotated_k.T  # [time of q, time of k]
    torch.testing.assert_close(scores.diagonal(3), scores[0, 3].expand(13))
    assert not torch.allclose(scores[0, 3], scores[3, 0])


def test_model_learns() -> None:
    model = Llama(TINY, max_time=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(256, (4, 16))
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.545, abs=0.2)  # ln 256: it begins knowing nothing
    assert losses[-1] < losses[0] / 2
