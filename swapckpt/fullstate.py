"""The state of all owners on every rank, for consumers that need it: moved once, through one bounded buffer.

[Note: full state] Owners describe what they have; everybody else makes room for it on the host. Then tensors
travel in parcels through one device buffer: owner's mirror -> its buffer -> the replicas' buffers, dimension
by dimension -> their host memory. Keys, shapes and dtypes are the owner's: a step counter or a maximum that
only some optimizers have goes the same way as a moment.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from swapckpt._torch import local_of, spec_like, spec_of, wrap_local
from swapckpt.errors import ShardError
from swapckpt.memory import HostArena
from swapckpt.ownership import pack
from swapckpt.plan import TensorSpec, lay_out
from swapckpt.state import byte_view, is_dense, tensor_spec
from swapckpt.swap import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed.tensor.placement_types import Placement

    from swapckpt.broadcast import ParameterBroadcast
    from swapckpt.ownership import Coordinate, Parcel
    from swapckpt.replicas import ReplicaSet
    from swapckpt.statedict import StateView, Values
    from swapckpt.swap import Swap


@dataclass(frozen=True, slots=True)
class Described:
    """What receivers have to know of one state value. Travels by pickle."""

    spec: TensorSpec | None  # of the local tensor; None for a value that is no tensor
    placements: tuple[Placement, ...] | None = None  # of a DTensor, with its global geometry
    whole: TensorSpec | None = None
    value: object = None
    is_created: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Traveller:
    """One state tensor, and whom it comes from."""

    param: Tensor
    key: str
    described: Described
    spec: TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tensors of one owner that travel in a few parcels, all of them complete at the end."""

    replicas: ReplicaSet
    owner: Coordinate
    parcels: tuple[Parcel, ...]
    travellers: tuple[Traveller, ...]  # by item of the parcels
    items: tuple[int, ...]  # that are complete now

    @property
    def is_ours(self) -> bool:
        return self.replicas.here == self.owner


class FullState:
    """One journey of the state of an optimizer's parameters to all of their replicas.

    Call sequence (every rank; the training thread, between steps): iterate ``batches()`` to its end.
    """

    def __init__(self, swap: Swap, view: StateView, sharing: ParameterBroadcast, *, max_nbytes: int) -> None:
        self._device = swap.device
        self._view = view
        self._relay, self._replicas = sharing.relay, sharing.replicas
        self._max_nbytes = max_nbytes
        self._params = [param for _, param in view.everything()]
        self.created: set[Tensor] = set()
        """Parameters of others whose state exists, and is not a template. Known after the first batch."""

    def batches(self) -> Iterator[dict[Tensor, Values]]:
        """State by parameter, a part of it at a time; the same parts on all replicas of a parameter.

        First come plain values, empty tensors and the state of parameters without replicas. Own state is
        aliased, that of others lies in host memory of its own until the next part is asked for.

        Raises:
            ReplicaError: Another rank failed, or a transfer did. Nothing was changed.
            HostMemoryError: This rank has no room for what it would receive.
        """
        with self._relay.all_or_none("describe its state"):
            mine = self._described()
        described = self._exchanged(mine)
        yield self._at_once(described)
        batches = self._plan(described)
        largest = max((parcel.nbytes for batch in batches for parcel in batch.parcels), default=0)
        with self._relay.all_or_none("allocate a device buffer for the full state"):
            buffer = self._device.allocate(largest)
        try:
            for batch in batches:
                yield self._move(batch, buffer)
        finally:
            self._device.release(buffer)

    def _described(self) -> dict[int, dict[str, Described]]:
        """What this rank owns of replicated parameters, by position."""
        state = self._view.optimizer.state
        return {
            position: {
                key: _describe(param, value, is_created=bool(state.get(param)))
                for key, value in self._view.values(param).items()
            }
            for position, param in enumerate(self._params)
            if self._replicas.owner_of(param) is not None and self._replicas.owns(param)
        }

    def _exchanged(self, mine: dict[int, dict[str, Described]]) -> dict[int, dict[str, Described]]:
        """What all owners have, by position."""
        owned = [self._replicas.owner_of(param) for param in self._params]
        everything: dict[int, dict[str, Described]] = {}
        for replicas in dict.fromkeys(each[0] for each in owned if each is not None):
            known = {at: each for at, each in mine.items() if (own := owned[at]) and own[0] is replicas}
            for hop in replicas.hops:
                parts: list[dict[int, dict[str, Described]]] = [{}] * len(hop.ranks)
                dist.all_gather_object(parts, known, group=hop.group)
                known = {at: each for part in parts for at, each in part.items()}
            everything |= known
        self.created = {
            self._params[at]
            for at, values in everything.items()
            if values and all(each.is_created for each in values.values())
        }
        return dict(sorted(everything.items()))

    def _at_once(self, described: dict[int, dict[str, Described]]) -> dict[Tensor, Values]:
        found: dict[Tensor, Values] = {}
        for position, param in enumerate(self._params):
            if self._replicas.owner_of(param) is None:
                found[param] = dict(self._view.values(param))
                continue
            own = self._view.values(param) if self._replicas.owns(param) else {}
            small = found[param] = {}
            for key, each in described[position].items():
                if each.spec is None:
                    small[key] = each.value
                elif each.spec.numel == 0:
                    small[key] = own[key] if own else _wrapped(param, each, _empty(each.spec))
        return {param: values for param, values in found.items() if values}

    def _plan(self, described: dict[int, dict[str, Described]]) -> list[Batch]:
        queues: dict[tuple[ReplicaSet, Coordinate, torch.dtype], list[Traveller]] = {}
        for position, values in described.items():
            owned = self._replicas.owner_of(self._params[position])
            assert owned is not None
            for key, each in values.items():
                if each.spec is not None and each.spec.numel:
                    traveller = Traveller(self._params[position], key, each, each.spec)
                    queues.setdefault((*owned, each.spec.dtype), []).append(traveller)
        batches = []
        for (replicas, owner, _), queue in queues.items():
            parcels = pack([each.spec.nbytes for each in queue], self._max_nbytes)
            for together, items in _complete(parcels, [each.spec.nbytes for each in queue]):
                batches.append(Batch(replicas, owner, together, tuple(queue), items))
        return batches

    def _move(self, batch: Batch, buffer: Tensor) -> dict[Tensor, Values]:
        groups = [hop.group for hop in batch.replicas.hops]
        with self._relay.all_or_none("allocate host memory for the full state", groups):
            values = self._own(batch) if batch.is_ours else self._receivers(batch)
            content = {item: _wire(local_of(value)) for item, value in values.items()}
        for parcel in batch.parcels:
            parts = [
                (
                    buffer.narrow(0, piece.region.offset_nbytes, piece.region.nbytes),
                    content[piece.item].narrow(0, piece.start_nbytes, piece.region.nbytes),
                )
                for piece in parcel.pieces
            ]
            if batch.is_ours:
                for packed, own in parts:
                    packed.copy_(own)
            sent = buffer.narrow(0, 0, parcel.nbytes)
            self._relay.wait(self._relay.send(sent, batch.replicas, batch.owner))
            if not batch.is_ours:
                for packed, own in parts:
                    own.copy_(packed)
        found: dict[Tensor, Values] = {}
        for item, value in values.items():
            traveller = batch.travellers[item]
            found.setdefault(traveller.param, {})[traveller.key] = value
        return found

    def _own(self, batch: Batch) -> dict[int, Tensor]:
        own = {}
        for item in batch.items:
            value = self._view.values(batch.travellers[item].param)[batch.travellers[item].key]
            assert isinstance(value, torch.Tensor)
            own[item] = value
        return own

    def _receivers(self, batch: Batch) -> dict[int, Tensor]:
        specs = {item: batch.travellers[item].spec for item in batch.items}
        layout = lay_out(spec.nbytes for spec in specs.values())
        segment = HostArena(self._device).allocate(layout, own_slab=True)
        received = {}
        for (item, spec), region in zip(specs.items(), layout.regions, strict=True):
            traveller = batch.travellers[item]
            received[item] = _wrapped(traveller.param, traveller.described, segment.mirror(region, spec))
        return received


def _complete(
    parcels: Sequence[Parcel], sizes_nbytes: Sequence[int]
) -> Iterator[tuple[tuple[Parcel, ...], tuple[int, ...]]]:
    """Parcels up to where no item is left in the middle, with the items that they complete."""
    together: list[Parcel] = []
    for parcel in parcels:
        together.append(parcel)
        last = parcel.pieces[-1]
        if last.start_nbytes + last.region.nbytes == sizes_nbytes[last.item]:
            yield (
                tuple(together),
                tuple(dict.fromkeys(piece.item for each in together for piece in each.pieces)),
            )
            together = []


def _describe(param: Tensor, value: object, *, is_created: bool) -> Described:
    if not isinstance(value, torch.Tensor):
        return Described(None, value=value, is_created=is_created)
    local, placed, owner = local_of(value), spec_of(value), spec_of(param)
    spec = tensor_spec(local if is_dense(local) else local.contiguous())
    if placed is None:
        return Described(spec, is_created=is_created)
    if owner is None or placed.mesh != owner.mesh:
        msg = (
            f"State of shape {list(value.shape)} is placed on another mesh than its parameter: {placed.mesh}."
        )
        raise ShardError(msg)
    whole = TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype)
    return Described(spec, tuple(placed.placements), whole, is_created=is_created)


def _wrapped(param: Tensor, described: Described, local: Tensor) -> Tensor:
    if described.placements is None or described.whole is None:
        return local
    whole = described.whole
    like = torch.empty_strided(whole.shape, whole.stride, dtype=whole.dtype, device="meta")
    return wrap_local(local, spec_like(param, described.placements, like=like))


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")


def _wire(local: Tensor) -> Tensor:
    """The bytes of a tensor as they travel."""
    return byte_view(local if is_dense(local) else local.contiguous())


# ------------------------------------------------------------------ what a manager offers


@contextmanager
def shown_in_full(swap: Swap, view: StateView, *, max_nbytes: int) -> Iterator[None]:
    """While it is open, ``view`` and ``optimizer.state`` have the state of all parameters.

    (all ranks; between steps) Leaving it, in whatever way, frees what was received.
    """
    state, before = view.optimizer.state, swap.phase
    bound: list[Tensor] = []
    swap.phase = Phase.SHOWING
    try:
        if swap.sharing is not None:
            journey = FullState(swap, view, swap.sharing, max_nbytes=max_nbytes)
            view.received.update(_received(journey, swap.sharing))
            bound += (param for param in view.received if param in journey.created)
            state.update((param, dict(view.received[param])) for param in bound)
        yield
    finally:
        for param in bound:
            state.pop(param, None)
        view.received.clear()
        swap.phase = before


def _received(journey: FullState, sharing: ParameterBroadcast) -> dict[Tensor, Values]:
    received: dict[Tensor, Values] = {}
    for part in journey.batches():
        for param, values in part.items():
            if not sharing.replicas.owns(param):
                received.setdefault(param, {}).update(values)
    return received


def stream(swap: Swap, view: StateView, *, max_nbytes: int) -> Iterator[dict[Tensor, Values]]:
    """As ``FullState.batches``. Whoever stops early still takes part in what the others wait for."""
    if swap.sharing is None:
        yield {param: dict(view.values(param)) for _, param in view.params()}
        return
    parts = FullState(swap, view, swap.sharing, max_nbytes=max_nbytes).batches()
    before, swap.phase = swap.phase, Phase.SHOWING
    try:
        for part in parts:  # noqa: UP028 - `yield from` would close what the others wait for
            yield part
    except GeneratorExit:
        for _ in parts:
            pass
        raise
    finally:
        swap.phase = before
