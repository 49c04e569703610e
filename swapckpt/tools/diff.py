"""What differs between two checkpoints or files, bit by bit, in memory for two pieces of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from swapckpt.tools.content import pieces
from swapckpt.tools.values import same_value, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from swapckpt.tools.content import Content


class Kind(Enum):
    """How two entries of one name differ."""

    ONLY_IN_A = "only in A"
    ONLY_IN_B = "only in B"
    KIND = "tensor and value"
    DTYPE = "dtype"
    SHAPE = "shape"
    ELEMENTS = "elements"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that is not the same.

    Attributes:
        fqn: Which.
        kind: How.
        a: What A has: dtype and shape, or a value; empty when nothing.
        b: What B has.
        numel: Elements of each tensor; 0 unless the kind is ELEMENTS, like what follows.
        num_differing: Elements whose bits differ.
        num_nan: Those of them that are NaN in A or B.
        max_abs: Largest absolute difference of the others, in float64; None when there are none, or where
            the dtype is not numeric.
    """

    fqn: str
    kind: Kind
    a: str
    b: str
    numel: int = 0
    num_differing: int = 0
    num_nan: int = 0
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences by name, and the number of entries that are the same to the last bit."""

    differences: list[Difference]
    num_equal_tensors: int
    num_equal_values: int


def shared_nbytes(a: Content, b: Content) -> int:
    """Bytes of the tensors that :func:`diff` compares, in each of the two."""
    return sum(info.nbytes for fqn, info in a.tensors.items() if b.tensors.get(fqn) == info)


def diff(a: Content, b: Content, *, on_progress: Callable[[int], None] = lambda _nbytes: None) -> Comparison:
    """Compare everything of two contents; shards need not be the same.

    Args:
        a: One.
        b: The other.
        on_progress: Called with the bytes of each compared piece.

    Raises:
        CorruptCheckpointError: One of them is damaged.
        UnsafePickleError: A value asks for code.
        StorageError: A store failed.
    """
    differences = []
    num_equal = {True: 0, False: 0}
    for fqn in sorted(a.paths.keys() | b.paths.keys()):
        found = _compared(a, b, fqn, on_progress)
        if found is None:
            num_equal[fqn in a.tensors] += 1
        else:
            differences.append(found)
    return Comparison(differences, num_equal[True], num_equal[False])


def _compared(a: Content, b: Content, fqn: str, on_progress: Callable[[int], None]) -> Difference | None:
    if fqn not in b.paths:
        return Difference(fqn, Kind.ONLY_IN_A, _described(a, fqn), "")
    if fqn not in a.paths:
        return Difference(fqn, Kind.ONLY_IN_B, "", _described(b, fqn))
    left, right = a.tensors.get(fqn), b.tensors.get(fqn)
    if left is not None and left == right:
        return _compared_elements(a, b, fqn, on_progress)
    if left is None and right is None:
        one, other = a.value(fqn), b.value(fqn)
        return None if same_value(one, other) else Difference(fqn, Kind.VALUE, shown(one), shown(other))
    kind = Kind.KIND
    if left is not None and right is not None:
        kind = Kind.DTYPE if left.shape == right.shape else Kind.SHAPE
    return Difference(fqn, kind, _described(a, fqn), _described(b, fqn))


def _compared_elements(
    a: Content, b: Content, fqn: str, on_progress: Callable[[int], None]
) -> Difference | None:
    tally = _Tally()
    for one, other in zip(pieces(a, fqn), pieces(b, fqn), strict=True):
        tally.add(one, other)
        on_progress(one.nbytes)
    if not tally.num_differing:
        return None
    info = a.tensors[fqn]
    return Difference(
        fqn,
        Kind.ELEMENTS,
        str(info),
        str(info),
        numel=math.prod(info.shape),
        num_differing=tally.num_differing,
        num_nan=tally.num_nan,
        max_abs=tally.max_abs,
    )


def _described(content: Content, fqn: str) -> str:
    return str(content.tensors[fqn]) if fqn in content.tensors else shown(content.value(fqn))


class _Tally:
    """Differences counted over the pieces of a tensor."""

    def __init__(self) -> None:
        self.num_differing = 0
        self.num_nan = 0
        self.max_abs: float | None = None

    def add(self, a: Tensor, b: Tensor) -> None:
        """Two pieces of one dtype and shape, dense and contiguous."""
        left, right = _bits(a), _bits(b)
        if torch.equal(left, right):
            return
        differing = (left != right).any(dim=1)
        self.num_differing += int(differing.count_nonzero())
        try:
            # Equal bits are left out: the difference of two infinities is NaN.
            distance = (_wide(a)[differing] - _wide(b)[differing]).abs()
        except (RuntimeError, NotImplementedError):  # packed dtypes have no arithmetic, and no conversion
            return
        is_nan = distance.isnan()
        self.num_nan += int(is_nan.count_nonzero())
        distance = distance[~is_nan]
        if distance.numel():
            self.max_abs = max(self.max_abs or 0.0, float(distance.max()))


def _bits(tensor: Tensor) -> Tensor:
    """One row per element, of integers that together are all its bits."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64)
    return tensor.reshape(-1).view(width).view(tensor.numel(), -1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).to(torch.complex128 if tensor.is_complex() else torch.float64)
