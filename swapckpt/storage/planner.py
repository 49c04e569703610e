"""``SwapSavePlanner``: plans a save once, and again only when the structure of the state has changed.

[Note: what travels] DCP gathers every rank's plan on the coordinator and scatters the global one. A rank
whose structure is that of the last save sends an empty plan, and gets one back: both sides have it already.
Whether it is the same is decided by comparing the structure itself (names, kinds, dtypes, shapes,
placements), not a hash of it nor, as in stock torch, the class of the planner: two planners share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from swapckpt._torch import spec_of
from swapckpt.errors import PlanError
from swapckpt.storage.collector import collector_paused

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

_Path: TypeAlias = "tuple[str | int, ...]"


class SwapSavePlanner(DefaultSavePlanner):
    """A planner for ``dcp.save`` that keeps its plan. Use one instance for all saves of a job, on every rank.

    Args:
        flatten_state_dict: As in ``DefaultSavePlanner``.
        dedup_save_to_lowest_rank: As in ``DefaultSavePlanner``.
    """

    def __init__(self, *, flatten_state_dict: bool = True, dedup_save_to_lowest_rank: bool = False) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict, dedup_save_to_lowest_rank=dedup_save_to_lowest_rank
        )
        self._structure: list[Hashable] | None = None  # of the kept plan
        self._next_structure: list[Hashable] | None = None  # of a plan that is not agreed on yet
        self._final_plan: SavePlan | None = None
        self._local_plans: list[SavePlan] = []  # of all ranks; the coordinator's
        self._global: tuple[list[SavePlan], Metadata] | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - the signature is DCP's
    ) -> None:
        """Flatten the state dict. (all ranks)"""
        with collector_paused():
            flattened = _flattened(state_dict) if self.flatten_state_dict else None
            if flattened is None:
                super().set_up_planner(state_dict, storage_meta, is_coordinator)
            else:
                self.state_dict, self.mappings = flattened
                self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> object:
        """What an item of the plan refers to."""
        value = self.state_dict[index.fqn]
        return value if type(value) is torch.Tensor else super().lookup_object(index)

    def create_local_plan(self) -> SavePlan:
        """This rank's plan, empty when it is that of the last save. (all ranks)"""
        with collector_paused():
            structure = _structure_of(self.state_dict)
            if self._next_structure is not None:  # the last save failed: the coordinator may have its plan
                self._structure = None
            if structure is not None and structure == self._structure:
                return SavePlan([], usable=False)
            self._next_structure = structure
            return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans of all ranks, empty when none has changed, and the metadata. (coordinator)"""
        if self._global is not None and not any(plan.usable for plan in all_plans):
            return [SavePlan([], usable=False) for _ in all_plans], self._global[1]
        with collector_paused():
            local_plans = self._merged(all_plans)
            self._global = super().create_global_plan(local_plans)
            self._local_plans = local_plans
        return self._global

    def _merged(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """``plans``, with those of the last save in place of empty ones."""
        if all(plan.usable for plan in plans):
            return list(plans)
        if len(plans) != len(self._local_plans):
            raise PlanError(
                "A rank refers to a plan of the last save that this SwapSavePlanner has not seen. Use one "
                "instance for all saves, on every rank, with one process group."
            )
        return [plan if plan.usable else kept for plan, kept in zip(plans, self._local_plans, strict=True)]

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's part of the global plan. (all ranks)"""
        if new_plan.usable:
            self._structure, self._next_structure = self._next_structure, None
            self._final_plan = new_plan
        elif self._final_plan is None:
            raise PlanError("The coordinator refers to a plan of the last save that this rank has not seen.")
        assert self._final_plan is not None
        self.plan = replace(self._final_plan, storage_data=new_plan.storage_data)
        return self.plan


def _flattened(state_dict: Mapping[str, object]) -> tuple[dict[str, object], dict[str, _Path]] | None:
    """``state_dict`` by FQN, and the path of each, as stock torch has it. None where two have one FQN or
    something has shards of its own: stock torch knows what becomes of these."""
    flat: dict[str, object] = {}
    paths: dict[str, _Path] = {}

    def visit(entries: Iterable[tuple[str | int, object]], prefix: _Path, name: str) -> bool:
        for key, value in entries:
            path, fqn = (*prefix, key), f"{name}{key}"
            if type(value) is not torch.Tensor:  # nearly all are
                within = _entries(value)
                if within is not None:
                    if not visit(within, path, f"{fqn}."):
                        return False
                    continue
                if hasattr(value, "local_shards"):
                    return False
            if fqn in flat:
                return False
            flat[fqn] = value
            paths[fqn] = path
        return True

    return (flat, paths) if visit(_entries(state_dict) or (), (), "") else None


def _entries(value: object) -> Iterable[tuple[str | int, object]] | None:
    """What is saved one by one of a mapping or list; None for what is saved as it is."""
    if isinstance(value, Mapping):
        return ((str(key), each) for key, each in value.items())
    if isinstance(value, list) and any(map(_is_taken_apart, value)):
        return enumerate(value)
    return None


def _is_taken_apart(value: object) -> bool:
    """True for what makes stock torch save the entries of a list that it is in one by one."""
    if isinstance(value, torch.Tensor | Mapping):
        return True
    return isinstance(value, list) and any(map(_is_taken_apart, value))


def _structure_of(state_dict: dict[str, object]) -> list[Hashable] | None:
    """All that a plan depends on; None when something has parts that this module does not know of."""
    structure: list[Hashable] = []
    for fqn, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            structure.append(fqn)
            if hasattr(value, "__create_write_items__") or hasattr(value, "local_shards"):
                return None
        else:
            structure.append((fqn, value.dtype, value.shape, value.layout, spec_of(value)))
    return structure
