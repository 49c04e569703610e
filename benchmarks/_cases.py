"""Parameters of known models, with gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes of one model's parameters, in the order in which the optimizer steps them."""

    title: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of every parameter."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def params(self) -> list[nn.Parameter]:
        """Parameters with gradients, the same values at every call."""
        generator = torch.Generator().manual_seed(0)
        made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in self.shapes]
        for param in made:
            param.grad = torch.randn(param.shape, generator=generator)
        return made


def many_small(*, layers: int = 34, dim: int = 248) -> Case:
    """GPT blocks with biases: 408 tensors of 1 KB to 1 MB, 25.2 M parameters, 816 moments."""
    block = (
        *((dim,), (dim,)),
        *((3 * dim, dim), (3 * dim,), (dim, dim), (dim,)),
        *((dim,), (dim,)),
        *((4 * dim, dim), (4 * dim,), (dim, 4 * dim), (dim,)),
    )
    return Case("many small", block * layers)


def llama(*, layers: int = 12, dim: int = 640, hidden: int = 1728, vocabulary: int = 32_000) -> Case:
    """A Llama with untied embeddings: 100.5 M parameters, a fifth of them in each embedding."""
    block = (
        *((dim,), (dim, dim), (dim, dim), (dim, dim), (dim, dim)),
        *((dim,), (hidden, dim), (hidden, dim), (dim, hidden)),
    )
    return Case("Llama", ((vocabulary, dim), *(block * layers), (dim,), (vocabulary, dim)))
