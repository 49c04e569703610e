"""``SwapSavePlanner``: plans a save once, and again only when the structure of the state has changed.

[Note: what travels] DCP gathers every rank's plan on the coordinator and scatters the global one. A rank
whose structure is that of the last save sends an empty plan, and gets one back: both sides have it already.
Whether it is the same is decided by comparing the structure itself (names, kinds, dtypes, shapes,
placements), not a hash of it nor, as in stock torch, the class of the planner: two planners share nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from swapckpt._torch import spec_of
from swapckpt.collector import collector_paused
from swapckpt.errors import PlanError
from swapckpt.flatten import Flattener

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

    from swapckpt._torch import DTensorSpec

_Kind: TypeAlias = (
    "tuple[str, torch.dtype | None, torch.Size | None, torch.layout | None, DTensorSpec | None]"
)
"""Name and geometry of what is saved; of what is no tensor, the name."""


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
        self._flattener = Flattener()
        self._structure: list[_Kind] | None = None  # of the kept plan
        self._next_structure: list[_Kind] | None = None  # of a plan that is not agreed on yet
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
            flat = self._flattener.flattened(state_dict) if self.flatten_state_dict else None
            if flat is None:
                super().set_up_planner(state_dict, storage_meta, is_coordinator)
            else:
                self.state_dict, self.mappings = flat
                self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> object:
        """What an item of the plan refers to."""
        value = self.state_dict[index.fqn]
        return value if type(value) is torch.Tensor else super().lookup_object(index)

    def create_local_plan(self) -> SavePlan:
        """This rank's plan, empty when it is that of the last save. (all ranks)"""
        with collector_paused():
            if self._next_structure is not None:  # the last save failed: the coordinator may have its plan
                self._structure = None
            if self._structure is not None and _is_like(self._structure, self.state_dict):
                return SavePlan([], usable=False)
            self._next_structure = _structure_of(self.state_dict)
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


def _structure_of(state_dict: dict[str, object]) -> list[_Kind] | None:
    """All that a plan depends on; None when something has parts that this module does not know of."""
    structure: list[_Kind] = []
    for fqn, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            structure.append((fqn, value.dtype, value.shape, value.layout, spec_of(value)))
        elif _has_parts(value):
            return None
        else:
            structure.append((fqn, None, None, None, None))
    return structure


def _has_parts(value: object) -> bool:
    return hasattr(value, "__create_write_items__") or hasattr(value, "local_shards")


def _is_like(structure: list[_Kind], state_dict: dict[str, object]) -> bool:
    """True when ``structure`` is that of ``state_dict``: compared without making another one, which takes
    longer."""
    if len(structure) != len(state_dict):
        return False
    for (known, dtype, shape, layout, spec), (fqn, value) in zip(structure, state_dict.items(), strict=True):
        if fqn != known:
            return False
        if isinstance(value, torch.Tensor):
            same = value.dtype is dtype and value.shape == shape and value.layout is layout
            found = None if type(value) is torch.Tensor else spec_of(value)  # nearly all are plain
            if not same or found != spec:
                return False
        elif dtype is not None or _has_parts(value):
            return False
    return True
