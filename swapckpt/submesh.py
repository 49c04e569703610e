"""Step DTensors on the mesh of one replica: over the same memory, and without its replicate dimensions.

What an optimizer computes with whole DTensors (the products of Muon, a norm), torch computes on all ranks of
their mesh, and it divides the work among replicas too. An owner steps without its replicas: it is given
DTensors whose mesh ends at its own replica. So the ranks that hold the shards of one replica, and own the
same parameters, communicate with each other and with nobody else, as under plain FSDP on these ranks.

[Note: one program per replica] The ranks of a replica wait for each other inside an update, and for owners of
other parameters between updates. If they did not do both in the same places, they could wait in a circle.
So batches and parcels are cut by ``largest_shard_numel``, which is the same on all of them, and not by what a
rank happens to hold.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from swapckpt._torch import DTensorSpec, local_of, spec_of, wrap_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    from torch import Tensor
    from torch.distributed.tensor import Shard

    State = MutableMapping[Tensor, dict[str, object]]


def largest_shard_numel(tensor: Tensor) -> int:
    """Elements on the rank that holds most of ``tensor``; the same number on all ranks of its mesh."""
    shape, spec = list(tensor.shape), spec_of(tensor)
    for dim, placement in enumerate(() if spec is None else spec.placements):
        if not placement.is_replicate() and not placement.is_partial():
            assert spec is not None
            sharded = cast("Shard", placement).dim  # or strided: FSDP2 over tensor parallel
            shape[sharded] = -(-shape[sharded] // spec.mesh.size(dim))
    numel = torch.Size(shape).numel()
    assert local_of(tensor).numel() <= numel
    return numel


class Submeshes:
    """Makes what an owner steps in the place of its DTensors.

    Call sequence (the thread that steps; all ranks of a replica, alike): ``alone`` around every update.
    """

    def __init__(self, *, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs
        self._parts: dict[tuple[DeviceMesh, tuple[int, ...]], _Part] = {}

    @contextmanager
    def alone(
        self, params: Mapping[Tensor, Tensor | None], state: State
    ) -> Iterator[Mapping[Tensor, Tensor]]:
        """Per parameter with replicas on its mesh what to step in its place.

        ``params`` maps each parameter to what is stepped for it so far: itself, its master, or nothing.
        Inside, ``state`` is that of the stand-ins. Leaving brings home what the update made of it.
        """
        standins: dict[Tensor, _StandIn] = {}
        try:
            for param, stepped in params.items():
                part = self._part_of(stepped) if stepped is not None else None
                if stepped is not None and part is not None:
                    standins[param] = _StandIn(stepped, part)
                    standins[param].take_place(state)
            yield {param: each.tensor for param, each in standins.items()}
        finally:
            for each in standins.values():
                each.give_back(state)

    def _part_of(self, tensor: Tensor) -> _Part | None:
        """None where no dimension has to be left out."""
        spec = spec_of(tensor)
        placements = () if spec is None else spec.placements
        kept = tuple(
            dim
            for dim, placement in enumerate(placements)
            if spec is not None and (spec.mesh.size(dim) == 1 or not placement.is_replicate())
        )
        if spec is None or len(kept) == len(placements):
            return None
        if (spec.mesh, kept) not in self._parts:
            self._parts[spec.mesh, kept] = _Part(spec.mesh, self._submesh(spec.mesh, kept), kept)
        return self._parts[spec.mesh, kept]

    def _submesh(self, mesh: DeviceMesh, kept: tuple[int, ...]) -> DeviceMesh:
        """The part of ``mesh`` that this rank is in, along the dimensions ``kept``. No communication."""
        here = mesh.get_coordinate()
        assert here is not None
        if not kept:
            limit = timedelta(seconds=self._timeout_secs)
            only = dist.new_group([dist.get_rank()], timeout=limit, use_local_synchronization=True)
            return DeviceMesh.from_group(only, mesh.device_type)
        names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
        return DeviceMesh.from_group(
            [mesh.get_group(dim) for dim in kept],
            mesh.device_type,
            mesh.mesh[tuple(slice(None) if dim in kept else index for dim, index in enumerate(here))],
            mesh_dim_names=tuple(names[dim] for dim in kept),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A mesh, and the part of it along the dimensions ``kept``; this rank alone where that is none."""

    mesh: DeviceMesh
    submesh: DeviceMesh
    kept: tuple[int, ...]

    def narrow(self, tensor: Tensor) -> Tensor:
        """The same memory on the part. What is not on the mesh stays as it is."""
        spec = spec_of(tensor)
        if spec is None or spec.mesh != self.mesh:
            return tensor
        placements = tuple(spec.placements[dim] for dim in self.kept) or (Replicate(),)
        return wrap_local(local_of(tensor), DTensorSpec(self.submesh, placements, spec.tensor_meta))

    def widen(self, tensor: Tensor) -> Tensor:
        """The same memory on the whole mesh. What is not on the part stays as it is."""
        spec = spec_of(tensor)
        if spec is None or spec.mesh != self.submesh:
            return tensor
        known = dict(zip(self.kept, spec.placements, strict=False))  # nothing is kept, and one dimension is
        placements = tuple(known.get(dim, Replicate()) for dim in range(self.mesh.ndim))
        return wrap_local(local_of(tensor), DTensorSpec(self.mesh, placements, spec.tensor_meta))


class _StandIn:
    """What is stepped in the place of one tensor, with its gradient and state."""

    def __init__(self, whole: Tensor, part: _Part) -> None:
        assert whole.grad is not None
        self._whole, self._part = whole, part
        self.tensor = part.narrow(whole.detach())
        self.tensor.grad = part.narrow(whole.grad)
        self._given: dict[str, tuple[object, Tensor]] = {}  # per key what was there, and what stands for it

    def take_place(self, state: State) -> None:
        values = state.get(self._whole)
        if values:
            self._given = {
                key: (value, self._part.narrow(value))
                for key, value in values.items()
                if isinstance(value, torch.Tensor)
            }
            state[self.tensor] = values | {key: given for key, (_, given) in self._given.items()}

    def give_back(self, state: State) -> None:
        self.tensor.grad = None
        values = state.pop(self.tensor, None)
        if values is None:
            return
        for key, value in values.items():
            before, given = self._given.get(key, (None, None))
            if value is given:  # the same object: who holds it finds it again
                values[key] = before
            elif isinstance(value, torch.Tensor):
                values[key] = self._part.widen(value)
        known = state.setdefault(self._whole, values)
        if known is not values:
            known.clear()
            known.update(values)
