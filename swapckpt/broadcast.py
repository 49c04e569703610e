"""Brings updated parameters from their owners to the replicas, while the owners update the next batch.

[Note: same collectives] Ranks own different parameters, some own nothing, one may have failed. If they did
not issue the same collectives in the same order, all of them would hang. So nothing that only one rank knows
decides what is sent: not which parameters have gradients (all are sent), not how it has cut its parameters
into batches, and not whether its update failed. A rank that fails goes on sending, and tells at the end.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapckpt._torch import local_of
from swapckpt.errors import ReplicaError
from swapckpt.ownership import pack, take_turns
from swapckpt.replicas import Relay
from swapckpt.submesh import largest_shard_numel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from swapckpt.device import Device
    from swapckpt.ownership import Coordinate, Parcel
    from swapckpt.replicas import Replicas, ReplicaSet

_BUFFERS = 2
"""One is on its way while the next one is filled."""


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """One parcel with parameters of one owner."""

    replicas: ReplicaSet
    owner: Coordinate
    parcel: Parcel
    params: tuple[Tensor, ...]  # by item of the parcel

    @property
    def is_ours(self) -> bool:
        """True on the rank that sends it."""
        return self.replicas.here == self.owner

    def parts(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Per piece its bytes in the buffer and in the parameter."""
        for piece in self.parcel.pieces:
            flat = local_of(self.params[piece.item]).detach().view(-1).view(torch.uint8)
            nbytes = min(piece.region.nbytes, flat.nbytes - piece.start_nbytes)
            if nbytes > 0:  # the room is that of the largest shard
                yield (
                    buffer.narrow(0, piece.region.offset_nbytes, nbytes),
                    flat.narrow(0, piece.start_nbytes, nbytes),
                )


def plan_deliveries(params: Iterable[Tensor], owners: Replicas, *, max_nbytes: int) -> list[Delivery]:
    """What a step sends, in the order in which every rank sends it: owners take turns.

    Parameters of one owner go in the order of ``params``, which is the order in which they are updated. All
    ranks that hold shards of the same parameters plan the same: see [Note: one program per replica].
    """
    queues: dict[tuple[ReplicaSet, Coordinate, torch.dtype], list[Tensor]] = {}
    for param in params:
        owned = owners.owner_of(param)
        if owned is not None:
            queues.setdefault((*owned, param.dtype), []).append(param)
    waiting = [
        [
            Delivery(replicas, owner, parcel, tuple(queue))
            for parcel in pack([_room_nbytes(param) for param in queue], max_nbytes)
        ]
        for (replicas, owner, _), queue in queues.items()
    ]
    return [waiting[queue][position] for queue, position in take_turns([len(each) for each in waiting])]


def _room_nbytes(param: Tensor) -> int:
    return largest_shard_numel(param) * param.element_size()


class ParameterBroadcast:
    """The part of a step that ranks take together.

    Call sequence (the thread that steps; every rank of the job):

    1. ``all_or_none()`` around what can fail before the first update, with ``begin(params)`` last: if any
       rank fails there, none goes on.
    2. ``together()`` around the update, with ``advance(params)`` after every batch. Whatever happens inside,
       the rank issues all collectives of the step; leaving it means that every rank has succeeded.
    """

    def __init__(
        self, replicas: Replicas, device: Device, *, bucket_nbytes: int, timeout_secs: float
    ) -> None:
        self.replicas = replicas
        self._device = device
        self._bucket_nbytes = bucket_nbytes
        self.relay = Relay(device.device, replicas.groups, timeout_secs=timeout_secs)
        self._params: list[Tensor] = []
        self._deliveries: list[Delivery] = []
        self._buffers: list[Tensor] = []
        self._updated: set[Tensor] = set()
        self._sent: list[tuple[Delivery, dist.Work | None]] = []
        self._settled = 0

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Leave the block only if no rank has failed in it.

        Raises:
            ReplicaError: Another rank has. Nothing was updated.
        """
        with ExitStack() as stack:
            stack.callback(self._release)
            with self.relay.all_or_none("begin the step"):
                yield
            stack.pop_all()

    def begin(self, params: Sequence[Tensor]) -> None:
        """Get ready to send ``params``. No communication."""
        if len(params) != len(self._params) or any(
            one is not other for one, other in zip(params, self._params, strict=True)
        ):
            self._deliveries = plan_deliveries(params, self.replicas, max_nbytes=self._bucket_nbytes)
            self._params = list(params)
        largest = max((delivery.parcel.nbytes for delivery in self._deliveries), default=0)
        for _ in range(min(_BUFFERS, len(self._deliveries))):
            self._buffers.append(self._device.allocate(largest))

    @contextmanager
    def together(self, *, is_joint: bool = False) -> Iterator[None]:
        """Take part in every collective of the step, and leave the block only if all ranks have succeeded.

        Where ranks communicate inside an update too (``is_joint``), one that fails cannot take part in the
        rest: it would answer collectives of an update with others. Whoever waits for it finds out in time.

        Raises:
            ReplicaError: Another rank failed. Parameters and state may be torn, on every rank.
        """
        try:
            try:
                yield
            except Exception:
                self.relay.is_broken |= is_joint
                with suppress(ReplicaError):  # the first cause is being raised
                    self._finish(failed=True)
                raise
            self._finish(failed=False)
        finally:
            self._release()

    def advance(self, params: Iterable[Tensor]) -> None:
        """``params`` have been updated (on the compute stream): send what is complete.

        Raises:
            ReplicaError: A collective failed.
        """
        self._updated.update(params)
        while len(self._sent) < len(self._deliveries):
            delivery = self._deliveries[len(self._sent)]
            items = {piece.item for piece in delivery.parcel.pieces}
            if delivery.is_ours and not all(delivery.params[item] in self._updated for item in items):
                return
            self._send(delivery)

    def _send(self, delivery: Delivery) -> None:
        number = len(self._sent)
        if number >= len(self._buffers):
            self._settle_next()  # the one that used this buffer before
        buffer = self._buffers[number % len(self._buffers)].narrow(0, 0, delivery.parcel.nbytes)
        if delivery.is_ours:
            for packed, own in delivery.parts(buffer):
                packed.copy_(own)
        self._sent.append((delivery, self.relay.send(buffer, delivery.replicas, delivery.owner)))

    def _settle_next(self) -> None:
        delivery, work = self._sent[self._settled]
        self.relay.wait(work)
        if not delivery.is_ours:
            for packed, own in delivery.parts(self._buffers[self._settled % len(self._buffers)]):
                own.copy_(packed)
        self._settled += 1

    def _finish(self, *, failed: bool) -> None:
        if self.relay.is_broken:
            return  # whoever waits for this rank finds out in time
        for delivery in self._deliveries[len(self._sent) :]:
            self._send(delivery)
        while self._settled < len(self._sent):
            self._settle_next()
        rank = self.relay.first_failed(failed=failed)
        if rank is not None and not failed:
            msg = (
                f"The step failed on rank {rank}. Parameters and state may be partly updated on every rank: "
                "restore both from a checkpoint."
            )
            raise ReplicaError(msg)

    def _release(self) -> None:
        for buffer in self._buffers:
            self._device.release(buffer)
        self._buffers, self._sent, self._settled = [], [], 0
        self._updated.clear()
