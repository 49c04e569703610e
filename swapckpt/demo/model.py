"""A Llama in plain torch (RMSNorm, RoPE, SwiGLU, SDPA), and the shape for a number of parameters."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swapckpt.errors import ConfigError

BYTE_VOCAB = 256
ROPE_THETA = 10_000.0
_FFN_MULTIPLE = 64
_MAX_LAYERS = 160
_USUAL_ASPECT = 128
_WIDTHS = (*range(64, 2048, 64), *range(2048, 32_769, 512))  # in whole heads, as people choose them
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def parse_count(text: str) -> int:
    """Number written as people write model sizes: ``"10M"``, ``"1.5B"``, ``"800k"`` or ``"123456"``.

    Raises:
        ConfigError: The text is something else, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBGT]?)", text.strip().replace("_", "").upper())
    count = round(float(match[1]) * _SUFFIXES[match[2]]) if match else 0
    if count < 1:
        msg = f"A model size is a positive number with K, M, B or T behind it (10M, 1.5B), got {text!r}."
        raise ConfigError(msg)
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama. Embedding and output head are separate matrices, biases do not exist."""

    dim: int
    layers: int
    heads: int
    ffn: int
    vocab: int = BYTE_VOCAB

    @property
    def params(self) -> int:
        """Number of parameters of the model, computed without building it."""
        return 2 * self.vocab * self.dim + self.dim + self.layers * self.params_per_layer

    @property
    def params_per_layer(self) -> int:
        return 4 * self.dim**2 + 3 * self.dim * self.ffn + 2 * self.dim

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.dim} wide, {self.heads} heads, ffn {self.ffn}, vocab {self.vocab}"
        )


def solve_shape(params: int, *, vocab: int = BYTE_VOCAB) -> LlamaShape:
    """The shape with about ``params`` parameters that looks most like a Llama.

    Among the usual widths and the depth that fits each best, takes the one whose count is
    nearest; a width-to-depth ratio twice or half the usual 128 counts like being 3 % off.

    Raises:
        ConfigError: No shape comes within 25 % (too small or too large for this vocabulary).
    """
    shapes = [_fit_depth(params, dim=dim, vocab=vocab) for dim in _WIDTHS]
    best = min(shapes, key=lambda shape: _misfit(shape, params))
    if abs(best.params / params - 1) > 0.25:
        msg = (
            f"No Llama with a vocabulary of {vocab} has about {params:,} parameters; "
            f"the nearest has {best.params:,} ({best}). Ask for a size nearer to that."
        )
        raise ConfigError(msg)
    return best


def _fit_depth(params: int, *, dim: int, vocab: int) -> LlamaShape:
    ffn = round(dim * 8 / 3 / _FFN_MULTIPLE) * _FFN_MULTIPLE
    head_dim = 128 if dim >= 2048 else 64
    one = LlamaShape(dim=dim, layers=1, heads=dim // head_dim, ffn=ffn, vocab=vocab)
    layers = 1 + round((params - one.params) / one.params_per_layer)
    return LlamaShape(dim=dim, layers=min(max(layers, 1), _MAX_LAYERS), heads=one.heads, ffn=ffn, vocab=vocab)


def _misfit(shape: LlamaShape, params: int) -> float:
    doublings = abs(math.log2(shape.dim / shape.layers / _USUAL_ASPECT))
    return abs(math.log(shape.params / params)) + 0.03 * doublings


class Block(nn.Module):
    """One layer: attention and SwiGLU, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.dim)
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: [batch, time, dim]; ``cos``, ``sin``: [time, head_dim / 2]."""
        x = x + self._attend(self.attention_norm(x), cos, sin)
        h = self.ffn_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in (self.wq, self.wk, self.wv)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )  # [batch, heads, time, head_dim]
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``x`` [..., time, head_dim]: halves are the coordinates of a rotation."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Llama(nn.Module):
    """Decoder-only transformer: token ids [batch, time] to logits [batch, time, vocab]."""

    def __init__(self, shape: LlamaShape, *, max_time: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        angles = _rope_angles(shape.dim // shape.heads, max_time)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:time], self.get_buffer("sin")[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _rope_angles(head_dim: int, max_time: int) -> Tensor:
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    return torch.outer(torch.arange(max_time).float(), frequencies)
