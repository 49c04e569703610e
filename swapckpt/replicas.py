"""Which ranks hold copies of a parameter, which of them owns its optimizer state, and how they talk.

A parameter is replicated along the dimensions of its mesh whose placement is ``Replicate`` (HSDP: FSDP2 over
a mesh of two dimensions), and over the process group of the ``DistributedDataParallel`` module it is in. Its
optimizer state is kept by one of those ranks, its *owner*; the others get the updated parameter from it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from swapckpt._torch import local_of, spec_of
from swapckpt.errors import ConfigError, ReplicaError
from swapckpt.ownership import assign_owners, split_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence

    from torch import Tensor, nn

    from swapckpt.ownership import Coordinate


@dataclass(frozen=True, slots=True)
class Hop:
    """One replicate dimension: its process group, and the global ranks along it by coordinate."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    here: int

    @classmethod
    def over(cls, group: dist.ProcessGroup, ranks: Sequence[int]) -> Hop:
        """The dimension along ``ranks``, which this process is one of."""
        return cls(group, tuple(ranks), list(ranks).index(dist.get_rank()))


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaSet:
    """The ranks that hold the same values of a parameter as this one, in a grid of replicate dimensions."""

    hops: tuple[Hop, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Size of each replicate dimension."""
        return tuple(len(hop.ranks) for hop in self.hops)

    @property
    def here(self) -> Coordinate:
        """Where this rank is in the grid."""
        return tuple(hop.here for hop in self.hops)


def data_parallel_groups(model: nn.Module) -> dict[Tensor, dist.ProcessGroup]:
    """The process group that averages the gradient of each parameter: those of the DDP modules in
    ``model``."""
    groups: dict[Tensor, dist.ProcessGroup] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            for name, param in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    groups[param] = module.process_group
    return groups


class Replicas:
    """Owners of the parameters of one optimizer. Every rank that holds them computes the same ones.

    Args:
        group_size: As ``SwapConfig.replica_group_size``.
        groups: Process groups of parameters that are replicated outside of any mesh.
        timeout_secs: Bound of the creation of process groups, which only ``group_size`` makes necessary.
    """

    def __init__(
        self,
        *,
        group_size: int | None,
        groups: Mapping[Tensor, dist.ProcessGroup],
        timeout_secs: float,
    ) -> None:
        self.groups: list[dist.ProcessGroup] = []
        """Every process group that a rank has to be told through, so that all of them know of a failure."""
        self._group_size = group_size
        self._data_parallel = groups
        self._timeout_secs = timeout_secs
        self._sets: dict[object, ReplicaSet | None] = {}
        # Weak, and what an owner held is never given back: ranks do not learn at the same time that a
        # parameter is gone, and have to go on counting alike.
        self._owners: MutableMapping[Tensor, tuple[ReplicaSet, Coordinate] | None] = WeakTensorKeyDictionary()
        self._held_numel: dict[ReplicaSet, Counter[Coordinate]] = {}

    def follow(self, params: Iterable[Tensor]) -> None:
        """Choose owners for parameters that are new. Owners never change.

        Raises:
            ConfigError: ``group_size`` does not fit the replicas of a parameter.
        """
        fresh: dict[ReplicaSet, list[Tensor]] = {}
        for param in params:
            if param in self._owners:
                continue
            replicas = self._set_of(param)
            if replicas is None:
                self._owners[param] = None
            else:
                fresh.setdefault(replicas, []).append(param)
        for replicas, replicated in fresh.items():
            held = self._held_numel.setdefault(replicas, Counter())
            owners = assign_owners([param.numel() for param in replicated], replicas.grid, held_numel=held)
            for param, owner in zip(replicated, owners, strict=True):
                self._owners[param] = (replicas, owner)
                held[owner] += param.numel()

    def rebind(self, new_of: Mapping[Tensor, Tensor]) -> None:
        """Let new parameters of the same geometry take the place of old ones, under the same owners."""
        for old, new in new_of.items():
            if old in self._owners:
                self._owners[new] = self._owners.pop(old)

    def owner_of(self, param: Tensor) -> tuple[ReplicaSet, Coordinate] | None:
        """Who holds ``param`` and which of them owns it; None for one that is not replicated."""
        return self._owners[param]

    def owns(self, param: Tensor) -> bool:
        """True when this rank keeps the state of ``param``."""
        owned = self._owners[param]
        return owned is None or owned[0].here == owned[1]

    def _set_of(self, param: Tensor) -> ReplicaSet | None:
        spec, group = spec_of(param), self._data_parallel.get(param)
        if not local_of(param).is_contiguous():
            return None  # every rank steps it: only whole blocks of memory travel
        placements = () if spec is None else spec.placements
        key = (None if spec is None else spec.mesh, placements, group)
        if key not in self._sets:
            hops = replicate_hops(param)
            if group is not None and dist.get_world_size(group) > 1:
                hops.append(Hop.over(group, dist.get_process_group_ranks(group)))
            self._note_groups(param, group)
            hops = self._split(hops)
            same = (each for each in self._sets.values() if each is not None and each.hops == tuple(hops))
            self._sets[key] = next(same, ReplicaSet(tuple(hops))) if hops else None
        return self._sets[key]

    def _note_groups(self, param: Tensor, group: dist.ProcessGroup | None) -> None:
        spec = spec_of(param)
        found = [group] if group is not None else []
        if spec is not None and spec.mesh.get_coordinate() is not None:
            found += [spec.mesh.get_group(dim) for dim in range(spec.mesh.ndim)]
        self.groups += [each for each in found if dist.get_world_size(each) > 1 and each not in self.groups]

    def _split(self, hops: list[Hop]) -> list[Hop]:
        if self._group_size is None or not hops:
            return hops
        if len(hops) > 1:
            msg = (
                f"replica_group_size splits one replicate dimension, and a parameter has {len(hops)}. Give "
                "its mesh one more dimension instead."
            )
            raise ConfigError(msg)
        (hop,) = hops
        parts = split_ranks(hop.ranks, self._group_size)
        (ranks,) = (part for part in parts if dist.get_rank() in part)
        if len(parts) == 1:
            return hops
        if len(ranks) == 1:
            return []
        group = dist.new_group(
            list(ranks), timeout=timedelta(seconds=self._timeout_secs), use_local_synchronization=True
        )
        assert isinstance(group, dist.ProcessGroup)
        return [Hop.over(group, ranks)]


def replicate_hops(param: Tensor) -> list[Hop]:
    """The dimensions of its mesh along which ``param`` is replicated."""
    spec = spec_of(param)
    here = None if spec is None else spec.mesh.get_coordinate()
    if spec is None or here is None:
        return []
    hops = []
    for dim, placement in enumerate(spec.placements):
        if placement.is_replicate() and spec.mesh.size(dim) > 1:
            along = tuple(slice(None) if each == dim else index for each, index in enumerate(here))
            hops.append(Hop.over(spec.mesh.get_group(dim), spec.mesh.mesh[along].tolist()))
    return hops


class Relay:
    """Bounded exchanges between ranks. After one has failed no other is tried: see ``is_broken``.

    Args:
        device: Of the tensors that travel.
        groups: Every process group that a failure is told through. It may grow.
        timeout_secs: Bound of every wait.
    """

    def __init__(
        self, device: torch.device, groups: Sequence[dist.ProcessGroup], *, timeout_secs: float
    ) -> None:
        self._device = device
        self._groups = groups
        self._timeout_secs = timeout_secs
        self.is_broken = False

    def send(self, buffer: Tensor, replicas: ReplicaSet, owner: Coordinate) -> dist.Work | None:
        """Bring the content that ``buffer`` has at ``owner`` to all of ``replicas``. (all of them, alike)

        Goes dimension by dimension: in each of them the ranks take part that are at the owner's place in all
        later ones. Only the last hop may still be running afterwards: wait for the work that is returned.

        Raises:
            ReplicaError: A hop failed, or did not complete in time.
        """
        work: dist.Work | None = None
        for dim, hop in enumerate(replicas.hops):
            if replicas.here[dim + 1 :] == owner[dim + 1 :]:
                self.wait(work)
                source = hop.ranks[owner[dim]]
                try:
                    work = dist.broadcast(buffer, source, hop.group, async_op=True)
                except RuntimeError as error:
                    raise self._failure(error) from error
        return work

    def exchange(self, operations: Iterable[dist.P2POp]) -> None:
        """Send and receive, and wait until all of it is done. (whoever the operations name)

        Raises:
            ReplicaError: One failed, or did not complete in time.
        """
        batches: dict[dist.ProcessGroup | None, list[dist.P2POp]] = {}
        for each in operations:  # torch takes those of one group at a time
            batches.setdefault(each.group, []).append(each)
        try:
            works = [work for batch in batches.values() for work in dist.batch_isend_irecv(batch)]
        except RuntimeError as error:
            raise self._failure(error) from error
        for work in works:
            self.wait(work)

    def wait(self, work: dist.Work | None) -> None:
        """Wait until ``work`` is done.

        Raises:
            ReplicaError: It failed, or did not complete in time.
        """
        try:
            if work is not None:
                work.wait(timedelta(seconds=self._timeout_secs))
        except RuntimeError as error:
            raise self._failure(error) from error

    @contextmanager
    def all_or_none(self, what: str, groups: Sequence[dist.ProcessGroup] | None = None) -> Iterator[None]:
        """Leave the block only if no rank has failed in it. (all ranks of ``groups``, default all of them)

        Raises:
            ReplicaError: Another rank has failed to do ``what``.
        """
        self.is_broken = False
        try:
            yield
        except Exception:
            with suppress(ReplicaError):  # what this rank has to say comes first
                self.first_failed(failed=True, groups=groups)
            raise
        rank = self.first_failed(failed=False, groups=groups)
        if rank is not None:
            msg = f"Rank {rank} could not {what}. Nothing was updated, on any rank."
            raise ReplicaError(msg)

    def first_failed(self, *, failed: bool, groups: Sequence[dist.ProcessGroup] | None = None) -> int | None:
        """A rank that has failed, the same one on all ranks of ``groups``. (all of them, alike)

        Raises:
            ReplicaError: A rank did not answer in time.
        """
        code = dist.get_rank() + 1 if failed and dist.is_initialized() else 0
        told = torch.tensor([code], dtype=torch.int32, device=self._device)
        for group in self._groups if groups is None else groups:
            try:
                work = dist.all_reduce(told, dist.ReduceOp.MAX, group, async_op=True)
            except RuntimeError as error:
                raise self._failure(error) from error
            self.wait(work)
        worst = int(told.item())
        return worst - 1 if worst else None

    def _failure(self, error: RuntimeError) -> ReplicaError:
        self.is_broken = True
        return ReplicaError(
            f"Rank {dist.get_rank()} could not exchange data with other ranks within "
            f"{self._timeout_secs:g} s: {error} Another rank has ended, hangs, or did not take this step."
        )
