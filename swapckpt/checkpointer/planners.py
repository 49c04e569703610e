"""Planners that know of ranks: values that all must agree on, and keys that belong to others."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from swapckpt._torch import spec_of
from swapckpt.checkpointer.parts import ManagerPart
from swapckpt.errors import SchemaError, listing
from swapckpt.planner import StrictLoadPlanner
from swapckpt.storage import SwapSavePlanner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    from swapckpt.checkpointer.parts import Part

SHARED_NBYTES = 1 << 20
"""Plain tensors up to this size are compared among ranks like plain values."""


class RankSavePlanner(SwapSavePlanner):
    """Keeps plans, and refuses to keep one rank's value where ranks have different ones.

    Args:
        parts: What is saved, by its name.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self._shared = {name for name, part in parts.items() if part.ranks_agree}

    def create_local_plan(self) -> SavePlan:
        """This rank's plan, with digests of what all ranks must have alike. (all ranks)"""
        plan = super().create_local_plan()
        digests = {
            key: digest
            for key, value in self.state_dict.items()
            if self.mappings[key][0] in self._shared and (digest := _digest(value)) is not None
        }
        return replace(plan, storage_data=digests)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As in ``SwapSavePlanner``. (coordinator)

        Raises:
            SchemaError: Ranks have different values under one key; all keys are listed.
        """
        _compare([plan.storage_data for plan in all_plans])
        return super().create_global_plan([replace(plan, storage_data=None) for plan in all_plans])


def _digest(value: object) -> bytes | None:
    """Of a value that is saved once for all ranks; None for what cannot be compared (sharded, too large to be
    a mistake, or of a class whose equal objects may be written differently)."""
    if not isinstance(value, torch.Tensor):
        return _hash(repr(value).encode()) if _is_plain(value) else None
    is_strided = spec_of(value) is None and value.is_cpu and value.layout is torch.strided
    if is_strided and value.nbytes <= SHARED_NBYTES:
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return _hash(plain.flatten().view(torch.uint8).numpy().tobytes())
    return None


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, cast("Sequence[object]", value)))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    return type(value) in (int, float, bool, str, bytes, type(None))


def _compare(digests: Sequence[Mapping[str, bytes]]) -> None:
    problems = []
    for key in sorted(set().union(*digests)):
        ranks: dict[bytes, list[int]] = {}
        for rank, of_rank in enumerate(digests):
            if key in of_rank:
                ranks.setdefault(of_rank[key], []).append(rank)
        if len(ranks) > 1:
            groups = ", ".join("/".join(map(str, members)) for members in ranks.values())
            problems.append(f"{key}: ranks {groups} differ")
    if problems:
        raise SchemaError(
            "Ranks have different values where the checkpoint keeps one. Wrap what belongs to a rank in "
            f"swapckpt.PerRank:{listing(problems)}"
        )


class PartLoadPlanner(StrictLoadPlanner):
    """Passes over what parts do not read: values of other ranks.

    Args:
        parts: What is loaded, by its name.
        allow_cast: As in ``StrictLoadPlanner``.
        allow_partial: As in ``StrictLoadPlanner``.
    """

    def __init__(self, parts: Mapping[str, Part], *, allow_cast: bool, allow_partial: bool) -> None:
        managers = [part.manager for part in parts.values() if isinstance(part, ManagerPart)]
        super().__init__(*managers, allow_cast=allow_cast, allow_partial=allow_partial)
        self._parts = parts

    def unexpected(self, metadata: Metadata) -> list[str]:
        """Keys under the names that are loaded which this rank should read and has no place for."""
        found = super().unexpected(metadata)
        return [key for key in found if all(part.is_read(key) for part in self._of(key))]

    def _of(self, key: str) -> list[Part]:
        return [part for name, part in self._parts.items() if key.startswith(f"{name}.")]
