"""Update whole matrices under sharding: each is gathered on one rank, stepped there, and scattered again.

Torch's Muon steps a sharded matrix through DTensor operations, whose result differs from that of the whole
matrix by rounding. Here the owner of a matrix steps the whole of it with the optimizer's own step on plain
tensors, which gives the bits of one process. Momenta stay sharded: what is swapped and saved is the same.

An owner is one of all ranks that hold the matrix. It gathers the rows of its own replica, scatters them
there, and the ranks of that replica send what they got to the other replicas. With ``shard_replicas=True``
replicas share the parameters among themselves, so that only the ranks of one replica are asked.

[Note: same exchanges] Every rank goes through the same matrices in the same batches, because batches are cut
by global sizes then, and through the tensors of a matrix in the same order.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from swapckpt._torch import local_of, spec_for, spec_of, wrap_local
from swapckpt.errors import UnsupportedOptimizerError, listing
from swapckpt.ownership import assign_owners
from swapckpt.replicas import Relay, ReplicaSet, replicate_hops

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from swapckpt.device import Device
    from swapckpt.ownership import Coordinate
    from swapckpt.state import OptimizerState

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, slots=True)
class Rows:
    """How the rows of a matrix lie on the ranks of one mesh dimension: equal chunks, the last one shorter."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]  # global, by coordinate
    here: int
    num_rows: int

    def of(self, whole: Tensor, coordinate: int) -> Tensor:
        """The rows of ``whole`` at a coordinate; none where there are more ranks than chunks."""
        chunk = -(-self.num_rows // len(self.ranks))
        start = min(coordinate * chunk, self.num_rows)
        return whole.narrow(0, start, min(chunk, self.num_rows - start))


def rows_of(param: Tensor) -> Rows | None:
    """How ``param`` is sharded; None for one that every rank holds in full.

    Raises:
        UnsupportedOptimizerError: It is sharded in another way than by rows along one mesh dimension.
    """
    spec = spec_of(param)
    if spec is None:
        return None
    sharded = [dim for dim, each in enumerate(spec.placements) if not each.is_replicate()]
    if not sharded:
        return None
    dim, placement = sharded[0], spec.placements[sharded[0]]
    if len(sharded) > 1 or type(placement) is not Shard or placement.dim != 0:
        msg = f"placed as {spec.placements}, expected rows sharded along one dimension of the mesh"
        raise UnsupportedOptimizerError(msg)
    if not local_of(param).is_contiguous():
        msg = "its shard is not contiguous"
        raise UnsupportedOptimizerError(msg)
    group, coordinate = spec.mesh.get_group(dim), spec.mesh.get_coordinate()
    assert coordinate is not None
    return Rows(group, tuple(dist.get_process_group_ranks(group)), coordinate[dim], param.shape[0])


@dataclass(frozen=True, slots=True)
class MatrixOwner:
    """Where a matrix is stepped: the coordinate of its replica, and that of its rows there."""

    rows: Rows
    replicas: ReplicaSet
    coordinate: Coordinate

    @property
    def replica(self) -> Coordinate:
        """Which of the replicas gathers the matrix."""
        return self.coordinate[:-1]

    @property
    def row(self) -> int:
        """Whose rows the owner holds itself."""
        return self.coordinate[-1]

    @property
    def in_our_replica(self) -> bool:
        """True on the ranks that hold the rows that are gathered."""
        return self.replicas.here == self.replica

    @property
    def is_here(self) -> bool:
        """True on the rank that steps the matrix."""
        return self.in_our_replica and self.rows.here == self.row


class Gathering:
    """Who owns which matrix, and the exchange around an update.

    Call sequence (the thread that steps; all ranks that hold the parameters, alike): ``follow`` when
    parameters were added, ``whole(params, state)`` around the update of every batch.

    Args:
        device: Where the whole matrices are.
        over_replicas: Choose owners among all replicas. False: every replica for itself.
        timeout_secs: Bound of every wait for another rank.
    """

    def __init__(self, device: Device, *, over_replicas: bool, timeout_secs: float) -> None:
        self._device = device
        self._over_replicas = over_replicas
        self._relay = Relay(device.device, (), timeout_secs=timeout_secs)
        self._owners: dict[Tensor, MatrixOwner | None] = {}
        # What an owner held is never given back, as with replicas: ranks have to go on counting alike.
        self._held_numel: dict[object, Counter[Coordinate]] = {}

    @staticmethod
    def concerns(kind: type[Optimizer]) -> bool:
        """True for the optimizers that look at whole matrices."""
        return kind is torch.optim.Muon

    def follow(self, params: Iterable[Tensor]) -> None:
        """Choose owners for parameters that are new, and forget those that are gone.

        Raises:
            UnsupportedOptimizerError: Lists the parameters that cannot be gathered.
        """
        known, problems = {}, []
        fresh: dict[object, list[tuple[Tensor, Rows, ReplicaSet]]] = {}
        for index, param in enumerate(params):
            known[param] = self._owners.get(param)
            if param in self._owners:
                continue
            try:
                rows = rows_of(param)
            except UnsupportedOptimizerError as error:
                problems.append(f"parameter {index}, shape {list(param.shape)}: {error}")
                continue
            if rows is not None:
                replicas = ReplicaSet(tuple(replicate_hops(param)) if self._over_replicas else ())
                everyone = (rows.ranks, *(hop.ranks for hop in replicas.hops))
                fresh.setdefault(everyone, []).append((param, rows, replicas))
        if problems:
            msg = f"gather_matrices=True cannot gather {len(problems)} parameters:{listing(problems)}"
            raise UnsupportedOptimizerError(msg)
        self._owners = known
        for ranks, added in fresh.items():
            _, rows, replicas = added[0]
            grid = (*replicas.grid, len(rows.ranks))
            if grid.count(1) == len(grid):  # one rank has it all
                continue
            held = self._held_numel.setdefault(ranks, Counter())
            owners = assign_owners([param.numel() for param, *_ in added], grid, held_numel=held)
            for (param, rows, replicas), owner in zip(added, owners, strict=True):
                self._owners[param] = MatrixOwner(rows, replicas, owner)
                held[owner] += param.numel()

    def owner_of(self, param: Tensor) -> MatrixOwner | None:
        """Who steps ``param``; None for one that every rank steps as it is."""
        return self._owners.get(param)

    def rebind(self, new_of: Mapping[Tensor, Tensor]) -> None:
        """Let new parameters take the place of old ones, under the same owners."""
        self._owners = {new_of.get(param, param): owned for param, owned in self._owners.items()}

    @contextmanager
    def whole(
        self, params: Mapping[Tensor, Tensor | None], state: OptimizerState
    ) -> Iterator[Mapping[Tensor, Tensor | None]]:
        """What to step in the place of sharded ``params``: the whole matrix on its owner, nothing elsewhere.

        ``params`` maps each parameter to what is stepped for it so far (itself, or its master). Leaving
        normally brings the rows of all results to where they belong.

        Raises:
            ReplicaError: Another rank did not take part in time.
        """
        exchanges = {
            param: _Exchange(stepped, state, owner)
            for param, stepped in params.items()
            if stepped is not None and (owner := self._owners.get(param)) is not None
        }
        held: list[Tensor] = []
        try:
            self._relay.exchange(op for each in exchanges.values() for op in each.gather())
            for each in exchanges.values():
                for tensor in each.wholes:
                    self._device.hold(tensor)
                    held.append(tensor)
                each.take_place()
            yield {param: each.matrix for param, each in exchanges.items()}
            self._relay.exchange(op for each in exchanges.values() for op in each.scatter())
            works = [work for each in exchanges.values() for work in each.pass_on(self._relay)]
            for work in works:
                self._relay.wait(work)
        finally:
            for each in exchanges.values():
                each.give_back()
            for tensor in held:
                self._device.drop(tensor)


class _Exchange:
    """One matrix on its way to its owner and back: the parameter, its gradient and its momentum."""

    def __init__(self, param: Tensor, state: OptimizerState, owner: MatrixOwner) -> None:
        self.param, self._state, self._rows, self._owner = param, state, owner.rows, owner
        assert param.grad is not None
        values = state[param]
        if MOMENTUM not in values:  # as Muon's first step would make it
            zeros = torch.zeros_like(local_of(param.grad))
            values[MOMENTUM] = wrap_local(zeros, spec_for(param, zeros.dtype))
        momentum = values[MOMENTUM]
        assert isinstance(momentum, torch.Tensor)
        self._locals = [local_of(param.detach()), local_of(param.grad).contiguous(), local_of(momentum)]
        self.wholes: list[Tensor] = []

    @property
    def matrix(self) -> Tensor | None:
        """The whole parameter on its owner."""
        return self.wholes[0] if self.wholes else None

    def gather(self) -> Iterator[dist.P2POp]:
        """Rows to the owner."""
        if not self._owner.is_here:
            yield from self._with_owner(self._locals)
            return
        shape = self.param.shape
        self.wholes = [torch.empty(shape, dtype=each.dtype, device=each.device) for each in self._locals]
        for whole, local in zip(self.wholes, self._locals, strict=True):
            self._rows.of(whole, self._owner.row).copy_(local)
            yield from self._with_others(whole, receives=True)

    def scatter(self) -> Iterator[dist.P2POp]:
        """Rows of the updated parameter and momentum from the owner."""
        if not self._owner.is_here:
            yield from self._with_owner(self._changed, receives=True)
            return
        for whole, local in zip((self.wholes[0], self.wholes[2]), self._changed, strict=True):
            local.copy_(self._rows.of(whole, self._owner.row))
            yield from self._with_others(whole)

    def pass_on(self, relay: Relay) -> Iterator[dist.Work | None]:
        """The same rows to the other replicas."""
        for local in self._changed:
            if local.numel():
                packed = local.view(-1).view(torch.uint8)
                yield relay.send(packed, self._owner.replicas, self._owner.replica)

    @property
    def _changed(self) -> tuple[Tensor, Tensor]:
        """What an update changes, on this rank."""
        param, _, momentum = self._locals
        return param, momentum

    def take_place(self) -> None:
        """Let the whole matrix have gradient and state, on its owner."""
        if self.wholes:
            matrix, grad, momentum = self.wholes
            matrix.grad = grad
            self._state[matrix] = {**self._state[self.param], MOMENTUM: momentum}

    def give_back(self) -> None:
        """Undo ``take_place``."""
        if self.wholes:
            self.wholes[0].grad = None
            self._state.pop(self.wholes[0], None)

    def _with_owner(self, tensors: Iterable[Tensor], *, receives: bool = False) -> Iterator[dist.P2POp]:
        for tensor in tensors:
            if self._owner.in_our_replica and tensor.numel():
                yield dist.P2POp(
                    dist.irecv if receives else dist.isend,
                    tensor,
                    self._rows.ranks[self._owner.row],
                    self._rows.group,
                )

    def _with_others(self, whole: Tensor, *, receives: bool = False) -> Iterator[dist.P2POp]:
        for coordinate, rank in enumerate(self._rows.ranks):
            part = self._rows.of(whole, coordinate)
            if coordinate != self._rows.here and part.numel():
                yield dist.P2POp(dist.irecv if receives else dist.isend, part, rank, self._rows.group)
