"""Planners that know of ranks: values that all must agree on, and keys that belong to others."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from swapckpt._torch import spec_of
from swapckpt.checkpointer.parts import ManagerPart
from swapckpt.checkpointer.trees import Whole
from swapckpt.errors import CheckpointError, SchemaError, SwapCkptError, UnsafePickleError, listing
from swapckpt.planner import StrictLoadPlanner
from swapckpt.storage import SwapSavePlanner
from swapckpt.storage.encoding import encoded
from swapckpt.storage.values import ALLOWED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import BuiltinFunctionType, FunctionType

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from swapckpt.checkpointer.parts import Part

SHARED_NBYTES = 1 << 20
"""Plain tensors up to this size are compared among ranks like plain values."""


class RankSavePlanner(SwapSavePlanner):
    """Keeps plans, and refuses to keep one rank's value where ranks have different ones.

    Args:
        parts: What is saved, by its name.
        allowed_globals: What values may name beyond what is harmless, when they are loaded.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        *,
        allowed_globals: Sequence[type | FunctionType | BuiltinFunctionType] = (),
    ) -> None:
        super().__init__()
        self._shared = {name for name, part in parts.items() if part.ranks_agree}
        self._allowed = ALLOWED.extended(*allowed_globals)
        self._encoded: dict[str, bytes] = {}

    def create_local_plan(self) -> SavePlan:
        """This rank's plan, with digests of what all ranks must have alike. (all ranks)

        Raises:
            UnsafePickleError: A load would refuse values; all keys are listed.
            CheckpointError: Values cannot be pickled; all keys are listed.
        """
        self._encode()
        plan = super().create_local_plan()
        shared = [key for key, path in self.mappings.items() if path[0] in self._shared]
        digests = {key: digest for key in shared if (digest := _digest(self.state_dict[key])) is not None}
        return replace(plan, storage_data=digests)

    def _encode(self) -> None:
        """Pickle all that could be refused, before anything is written."""
        self._encoded = {}
        problems: list[SwapCkptError] = []
        for key, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) or _is_plain(value):
                continue
            content = value.value if isinstance(value, Whole) else value
            try:
                self._encoded[key] = encoded(content, self._allowed, name=key)
            except (UnsafePickleError, CheckpointError) as problem:
                problems.append(problem)
        if problems:
            kind = type(problems[0])
            raise kind("\n".join(map(str, problems))) from problems[0]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What is written for an item."""
        value = self.state_dict.get(write_item.index.fqn)
        if type(value) is torch.Tensor:  # nearly all are
            return value
        resolved: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        return resolved

    def transform_object(self, write_item: WriteItem, object: object) -> object:  # noqa: A002 - DCP's name
        """What is written for an item: bytes that were made with the plan, where they were."""
        data = self._encoded.get(write_item.index.fqn) if write_item.type is WriteItemType.BYTE_IO else None
        return io.BytesIO(data) if data is not None else super().transform_object(write_item, object)

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
    if isinstance(value, Whole):
        return _digest(value.value)
    if isinstance(value, torch.Tensor):
        return _digest_of_tensor(value)
    if _is_plain(value):
        return _hash(repr(value).encode())
    if type(value) in (dict, Counter, OrderedDict):
        entries = list(cast("Mapping[object, object]", value).items())
    elif type(value) in (list, tuple):
        entries = list(enumerate(cast("Sequence[object]", value)))
    else:
        return None
    digests = [_digest(each) for _, each in entries]
    if None in digests or not all(_is_plain(key) for key, _ in entries):
        return None
    return _hash(repr((type(value).__name__, [key for key, _ in entries], digests)).encode())


def _digest_of_tensor(value: torch.Tensor) -> bytes | None:
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
        names: All states of the job, also those that this rank finds nothing of.
        allow_cast: As in ``StrictLoadPlanner``.
        allow_partial: As in ``StrictLoadPlanner``.
    """

    def __init__(
        self, parts: Mapping[str, Part], *, names: Collection[str], allow_cast: bool, allow_partial: bool
    ) -> None:
        managers = [part.manager for part in parts.values() if isinstance(part, ManagerPart)]
        super().__init__(*managers, allow_cast=allow_cast, allow_partial=allow_partial)
        self._parts = parts
        self._names = frozenset(names)

    def unexpected(self, metadata: Metadata) -> list[str]:
        """Keys under the names that are loaded which this rank should read and has no place for, and states
        that the job does not have."""
        found = super().unexpected(metadata)
        keys = [key for key in found if all(part.is_read(key) for part in self._of(key))]
        if self.allow_partial_load:
            return keys
        saved = {key.partition(".")[0] for key in metadata.state_dict_metadata}  # names have no dots
        return keys + sorted(saved - self._names)

    def _of(self, key: str) -> list[Part]:
        return [part for name, part in self._parts.items() if key.startswith(f"{name}.")]
