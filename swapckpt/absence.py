"""How a state dict says that state does not exist yet.

[Note: not created] State that has never been created is not zero: the next step of SGD with dampening, NAdam,
Rprop, Adagrad or ASGD starts differently from absent state than from zeros. A state dict still needs a tensor
for it, since DCP reads only into what the destination offers. Such a template is filled with *negative zero*:
numerically zero to every other reader, and a mark that survives resharding, both layouts and ``torch.save``.
A parameter whose floating-point state is all negative zero is restored as absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapckpt._torch import local_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark_not_created(local: Tensor) -> None:
    """Fill with negative zero (see [Note: not created])."""
    local.fill_(-0.0 if local.is_floating_point() else 0)


def is_marked(local: Tensor) -> bool:
    """True when every element is negative zero. Looks at one element unless that one is."""
    integer = _INT_OF_SIZE[local.element_size()]
    bits, sign_only = local.view(integer), torch.iinfo(integer).min
    return bool(bits[(0,) * bits.dim()] == sign_only) and bool((bits == sign_only).all())


def is_not_created(values: Mapping[str, object]) -> bool:
    """True when the floating-point state of a parameter is all marked."""
    locals_ = [local_of(value) for value in values.values() if isinstance(value, torch.Tensor)]
    marked = [is_marked(local) for local in locals_ if local.is_floating_point() and local.numel()]
    return bool(marked) and all(marked)
