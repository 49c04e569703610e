"""Tensors and values by FQN, wherever they are: in a checkpoint, a ``torch.save`` file or safetensors.

[Note: pieces] Tensors are read in pieces of at most ``PIECE_NBYTES``, consecutive in row-major order. The
pieces of two tensors of one dtype and shape are the same whatever their shards are, so that two checkpoints
can be compared, and one copied, in memory for a piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from swapckpt.errors import ConfigError, SchemaError
from swapckpt.storage.fetch import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

PIECE_NBYTES = 8 << 20

Path: TypeAlias = "tuple[str | int, ...]"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a tensor is, without its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Content(Protocol):
    """What a checkpoint or file holds. Used by one thread, and closed by who opened it.

    Attributes:
        where: Path or URL, for messages.
        paths: Place in the nested state dict of every tensor and value, by FQN, in the order of the source.
        tensors: Which of them are tensors.
    """

    where: str
    paths: Mapping[str, Path]
    tensors: Mapping[str, TensorInfo]

    def read(self, fqn: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor into ``target``, which is dense and has its dtype and shape.

        Raises:
            CorruptCheckpointError: The bytes contradict a checksum or their description.
            StorageError: They could not be read.
        """

    def value(self, fqn: str) -> object:
        """A value that is no tensor. Raises as :meth:`read`, and UnsafePickleError: it asks for code."""

    def close(self) -> None: ...


def boxes(info: TensorInfo) -> Iterator[Box]:
    """The pieces of a tensor (see the note at the top)."""
    yield from _boxes(info.shape, info.dtype.itemsize, ())


def _boxes(shape: tuple[int, ...], itemsize: int, fixed: tuple[int, ...]) -> Iterator[Box]:
    inner = math.prod(shape[1:]) * itemsize
    if not shape or math.prod(shape) * itemsize <= PIECE_NBYTES:
        if 0 not in shape:
            yield Box((*fixed, *(0 for _ in shape)), (*(1 for _ in fixed), *shape))
        return
    if inner > PIECE_NBYTES:
        for row in range(shape[0]):
            yield from _boxes(shape[1:], itemsize, (*fixed, row))
        return
    rows = PIECE_NBYTES // inner
    for first in range(0, shape[0], rows):
        count = min(rows, shape[0] - first)
        offsets = (*fixed, first, *(0 for _ in shape[1:]))
        yield Box(offsets, (*(1 for _ in fixed), count, *shape[1:]))


def pieces(content: Content, fqn: str) -> Iterator[Tensor]:
    """A tensor's elements in row-major order, piece by piece. Each is valid until the next is asked for."""
    info = content.tensors[fqn]
    for box in boxes(info):
        target = torch.empty(box.lengths, dtype=info.dtype)
        content.read(fqn, box, target)
        yield target


def whole(content: Content, fqn: str) -> Tensor:
    """All of a tensor."""
    info = content.tensors[fqn]
    target = torch.empty(info.shape, dtype=info.dtype)
    content.read(fqn, Box((0,) * len(info.shape), info.shape), target)
    return target


class Selected:
    """What is below a name, without that name.

    Raises:
        ConfigError: Nothing is.
    """

    def __init__(self, content: Content, prefix: str) -> None:
        start = f"{prefix}."
        self._content = content
        self._full = {fqn.removeprefix(start): fqn for fqn in content.paths if fqn.startswith(start)}
        if not self._full:
            raise ConfigError(f"{content.where} has nothing below {prefix!r}.")
        self.where = content.where
        self.paths: Mapping[str, Path] = {
            fqn: _below(content.paths[full], prefix, fqn) for fqn, full in self._full.items()
        }
        self.tensors: Mapping[str, TensorInfo] = {
            fqn: content.tensors[full] for fqn, full in self._full.items() if full in content.tensors
        }

    def read(self, fqn: str, box: Box, target: Tensor) -> None:
        self._content.read(self._full[fqn], box, target)

    def value(self, fqn: str) -> object:
        return self._content.value(self._full[fqn])

    def close(self) -> None:
        self._content.close()


def _below(path: Path, prefix: str, rest: str) -> Path:
    for length in range(1, len(path)):
        if fqn_of(path[:length]) == prefix:
            return path[length:]
    return (rest,)  # the prefix ends inside a key


# ------------------------------------------------------------------------------------------------- nesting


def fqn_of(path: Path) -> str:
    """The name that DCP gives to a place."""
    return ".".join(map(str, path))


def nested(leaves: Mapping[Path, object], *, where: str) -> dict[str, object]:
    """The nested state dict with a leaf at each path: dicts for names, lists for numbers.

    Raises:
        SchemaError: A leaf lies where another one is.
    """
    root = _Node()
    for path, leaf in leaves.items():
        node = root
        for key in path[:-1]:
            child = node.setdefault(key, _Node())
            if not isinstance(child, _Node):
                raise SchemaError(f"{where}: {fqn_of(path)!r} lies below a value.")
            node = child
        if path[-1] in node:
            raise SchemaError(f"{where}: {fqn_of(path)!r} is a value and holds others, or is there twice.")
        node[path[-1]] = leaf
    return {str(key): _plain(value) for key, value in root.items()}


class _Node(dict[str | int, object]):
    """A container while it is filled; its type tells it from leaves that are dicts."""


def _plain(value: object) -> object:
    if not isinstance(value, _Node):
        return value
    plain = {key: _plain(inner) for key, inner in value.items()}
    if all(isinstance(key, int) for key in plain):
        return [plain[key] for key in sorted(plain)]
    return plain
