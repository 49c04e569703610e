"""The registry of swapped state tensors and the only legal moves between host and device.

[Note: one truth] For each state tensor exactly one of {mirror, staging view} is authoritative; ``residency``
says which, and only the four moves ``start_load``, ``to_device``, ``start_offload`` and ``to_host`` change
it. What is authoritative, or about to be, is what ``optimizer.state`` is bound to: bindings are replaced,
storages never released or exchanged, so no tensor without memory can ever be reached.

[Note: idle is free] Between steps every tensor is HOST: ``optimizer.state`` holds mirrors, the device
nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, TypeGuard

import torch

from swapckpt._torch import DTensorSpec, local_of, spec_of, wrap_local
from swapckpt.plan import Region, StateId, TensorSpec, align_up, coalesce, lay_out
from swapckpt.precision import MASTER, is_low_precision
from swapckpt.shadow import Shadow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence

    from torch import Tensor

    from swapckpt.config import SwapConfig
    from swapckpt.device import CopyPair
    from swapckpt.memory import HostArena, HostSegment

    OptimizerState = MutableMapping[Tensor, dict[str, object]]


class Residency(Enum):
    """Where the truth about a state tensor is, and what memory it costs besides the mirror."""

    HOST = "host"  # the mirror; no device memory
    LOADING = "loading"  # the mirror; a staging buffer is being filled from it
    DEVICE = "device"  # the staging view or the tensor the update made; the mirror is stale
    OFFLOADING = "offloading"  # on its way into the mirror; the device memory is still needed


@dataclass(slots=True, eq=False)
class StateTensor:
    """One swapped state tensor of one parameter."""

    id: StateId
    param: Tensor
    spec: TensorSpec
    placement: DTensorSpec | None
    segment: HostSegment
    region: Region
    mirror: Tensor  # what optimizer.state holds when idle: a DTensor over it for a sharded parameter
    residency: Residency = Residency.HOST
    source: Tensor | None = (
        None  # local tensor the update made in place of the staging view; freed at to_host
    )
    bound: Tensor | None = None  # what optimizer.state holds while the batch is on the device
    staging_offset_nbytes: int = 0  # where it lies in the staging buffer, from place() to the offload
    address: int = field(init=False)  # of the region: every step compares it with the mirror's

    def __post_init__(self) -> None:
        self.address = self.segment.address(self.region)

    @property
    def host(self) -> Tensor:
        """The mirror's local shard: exact-size host memory."""
        return local_of(self.mirror)

    @property
    def is_intact(self) -> bool:
        """False after somebody gave the mirror other memory (``mirror.data = ...``)."""
        return local_of(self.mirror).data_ptr() == self.address

    def renew(self) -> None:
        """A fresh mirror over the region, which may be in another segment now."""
        self.address = self.segment.address(self.region)
        self.mirror = wrap_local(self.segment.mirror(self.region, self.spec), self.placement)

    def fits(self, value: object) -> TypeGuard[Tensor]:
        """True when a value that somebody put in place of ours fits the same region."""
        if not isinstance(value, torch.Tensor):
            return False
        return spec_of(value) == self.placement and tensor_spec(local_of(value)) == self.spec


@dataclass(slots=True, eq=False)
class ParamState:
    """One parameter, where it is stepped, and its swapped state by key."""

    name: str
    param: Tensor
    group: int
    batch: int
    has_master: bool = False  # the optimizer steps an fp32 copy in its place
    tensors: dict[str, StateTensor] = field(default_factory=dict)
    pending: dict[str, StateTensor] = field(default_factory=dict)  # reserved mirrors of state not created yet
    parked: set[str] = field(
        default_factory=set
    )  # small state that was loaded and goes to the device next step


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a segment and in staging, which one copy moves. ``first`` knows the segment: a redirect
    replaces it."""

    first: StateTensor
    region: Region
    staging_offset_nbytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """What place() worked out; it holds for every step that moves the same tensors."""

    tensors: list[StateTensor]
    runs: list[Run]
    nbytes: int  # of staging


NOTHING_PLACED = Placement([], [], 0)


@dataclass(slots=True, eq=False)
class Batch:
    """Parameters that are stepped together, and the host segments their state lies in."""

    index: int
    params: list[ParamState]
    shadow: Shadow
    segments: list[HostSegment] = field(default_factory=list)
    tensors: list[StateTensor] = field(default_factory=list)
    active: list[ParamState] = field(default_factory=list)  # with a gradient in this step
    moving: list[StateTensor] = field(default_factory=list)  # being loaded, updated or offloaded now
    placement: Placement = NOTHING_PLACED

    @property
    def staged_nbytes(self) -> int:
        """Bytes of staging that this batch needs."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def completes(self) -> list[Tensor]:
        """Parameters that this batch is the last one to step."""
        return [entry.param for entry in self.params]

    @property
    def sharing(self) -> Sequence[Batch]:
        """Everything whose tensors lie in the segments of this batch: what a redirect concerns."""
        return (self,)

    def bystanders(self, segment: HostSegment) -> list[StateTensor]:
        """Tensors in ``segment`` that this batch is not about to write: a redirect has to copy them."""
        return [each for each in self.tensors if each.segment is segment and each not in self.moving]

    def creates_state(self, state: OptimizerState) -> bool:
        """True when an active parameter has no state at all, so that its update will create some.

        Swapped state alone would not tell: a parameter that is too small for it never has any.
        """
        return any(
            (not entry.tensors and not state.get(entry.param))
            or (entry.has_master and MASTER not in state[entry.param])
            for entry in self.active
        )


@dataclass(slots=True, eq=False)
class Slice(Batch):
    """A range of elements of one oversized parameter, as a batch of its own for one step.

    Its only parameter is a view of the range, and its tensors are ranges of the mirrors of ``family[0]``, the
    batch of the whole parameter; the other members are all slices of it.
    """

    family: list[Batch] = field(default_factory=list)

    @property
    def staged_nbytes(self) -> int:
        return sum(align_up(tensor.region.nbytes) for tensor in self.tensors)

    @property
    def completes(self) -> list[Tensor]:
        return self.family[0].completes if self.family[-1] is self else []

    @property
    def sharing(self) -> Sequence[Batch]:
        return self.family

    def bystanders(self, segment: HostSegment) -> list[StateTensor]:
        return [each for each in self.family[0].tensors if each.segment is segment]


def ineligibility(tensor: object, *, key: str, config: SwapConfig, device: torch.device) -> str | None:
    """Why a state value stays where torch put it; None when it is swapped."""
    if not isinstance(tensor, torch.Tensor):
        return "not a tensor"
    if config.state_keys is not None and key not in (*config.state_keys, MASTER):
        return "not in state_keys"
    local = local_of(tensor)
    if tensor.dim() == 0 and device.type not in ("cpu", "meta"):
        return "a scalar: step counters are read on the host"
    if local.numel() < max(1, config.min_numel):
        return f"fewer than min_numel={config.min_numel} elements"
    if local.device != device and local.device.type != "cpu":
        return f"on {local.device}, not on {device}"
    return _unswappable(local)


def _unswappable(local: Tensor) -> str | None:
    """Why the bytes of a tensor cannot simply be moved."""
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.requires_grad:
        return f"a {type(local).__name__} with rules of its own"
    if not local.is_floating_point() or local.layout != torch.strided:
        return f"not a dense floating-point tensor ({local.dtype}, {local.layout})"
    if not is_dense(local) or local.untyped_storage().nbytes() != local.nbytes:
        return "not dense, or not the only tensor of its storage"
    return None


def is_dense(tensor: Tensor) -> bool:
    """True when the elements fill one block without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _unshared(
    batch: Batch, fresh: Sequence[tuple[ParamState, str, Tensor]]
) -> list[tuple[ParamState, str, Tensor]]:
    """Those that share no memory with each other, a parameter or a gradient: mirrors would part them."""
    if not fresh:
        return []
    uses = Counter(_address(value) for _, _, value in fresh)
    for entry in batch.active:
        uses.update(_address(each) for each in (entry.param, entry.param.grad) if each is not None)
    return [each for each in fresh if uses[_address(each[2])] == 1]


def _address(tensor: Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def tensor_spec(local: Tensor) -> TensorSpec:
    """Geometry of a local tensor."""
    return TensorSpec(tuple(local.shape), tuple(local.stride()), local.dtype)


def byte_view(local: Tensor) -> Tensor:
    """The bytes of a dense tensor, 1-D, in memory order. No copy."""
    return local.as_strided((local.numel(),), (1,)).view(torch.uint8)


class StateTable:
    """All parameters of one optimizer in step order, cut into batches, with their swapped state."""

    def __init__(self, config: SwapConfig, arena: HostArena, device: torch.device) -> None:
        self._config = config
        self._arena = arena
        self._device = device
        self.entries: dict[Tensor, ParamState] = {}
        self.batches: list[Batch] = []

    def add(self, params: Sequence[tuple[str, Tensor, int]], cuts: Iterable[range]) -> list[Batch]:
        """Append parameters ``(name, parameter, group index)`` as new batches, which are returned.

        Batches that exist keep their place: a layout never moves.
        """
        known = len(self.batches)
        for cut in cuts:
            batch = Batch(len(self.batches), [], Shadow(self._arena))
            for name, param, group in params[cut.start : cut.stop]:
                has_master = self._config.master_weights and is_low_precision(param)
                entry = ParamState(name, param, group, batch.index, has_master)
                self.entries[param] = entry
                batch.params.append(entry)
            self.batches.append(batch)
        return self.batches[known:]

    def keep(self, live: Mapping[Tensor, int], state: OptimizerState) -> None:
        """Let batches hold the parameters of ``live`` (with their group index), each in its own place.

        One that left its group and has no state any more is forgotten; one that has may come back.
        """
        for param in [param for param in self.entries if param not in live and param not in state]:
            entry = self.entries.pop(param)
            for tensor in (*entry.tensors.values(), *entry.pending.values()):
                self._drop(self.batches[entry.batch], tensor)
        for batch in self.batches:
            batch.params = []
        for param, entry in self.entries.items():
            if param in live:
                entry.group = live[param]
                self.batches[entry.batch].params.append(entry)

    def rebind(self, new_of: Mapping[Tensor, Tensor]) -> None:
        """Let new parameters take the place of old ones: batches, regions and mirrors stay."""
        for entry in self.entries.values():
            entry.param = new_of.get(entry.param, entry.param)
        for batch in self.batches:
            for tensor in batch.tensors:
                tensor.param = new_of.get(tensor.param, tensor.param)
        self.entries = {entry.param: entry for entry in self.entries.values()}

    def tensors(self) -> Iterator[StateTensor]:
        """Every swapped tensor that has been created, in step order."""
        for batch in self.batches:
            for entry in batch.params:
                yield from entry.tensors.values()

    @property
    def swapped_nbytes(self) -> int:
        """Bytes of swapped state, without alignment."""
        return sum(tensor.spec.nbytes for tensor in self.tensors())

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of staging that the largest batch needs."""
        return max((batch.staged_nbytes for batch in self.batches), default=0)

    @property
    def is_host(self) -> bool:
        """True when the device's own tensors are host memory, so that small state needs no shadow."""
        return self._device.type == "cpu"

    # ------------------------------------------------------------------ small state

    def upload_parked(self, batch: Batch, state: OptimizerState) -> None:
        """Move small state of active parameters, which a load left on the host, to the device."""
        for entry in batch.active:
            for key in entry.parked:
                value = state[entry.param][key]
                if isinstance(value, torch.Tensor):
                    local = local_of(value).to(self._device)
                    state[entry.param][key] = wrap_local(local, spec_of(value))
            entry.parked.clear()

    def shadow_small(self, batch: Batch, state: OptimizerState) -> list[CopyPair]:
        """Copies that bring the batch's small device state into its shadow (none on a host device)."""
        if self.is_host:
            return []
        small = {
            StateId(entry.name, key): value
            for entry in batch.params
            for key, value in state.get(entry.param, {}).items()
            if isinstance(value, torch.Tensor) and key not in entry.tensors and value.device == self._device
        }
        return batch.shadow.gather(small) if small else []

    # ------------------------------------------------------------------ the four moves

    def place(self, batch: Batch) -> int:
        """Choose what moves, and where it lies in staging: gapless, in the order of the host.

        Returns the bytes of staging it takes. Regions of inactive parameters take none, since the state that
        an update creates comes on top and both together are bounded by the batch.
        """
        batch.moving = [tensor for entry in batch.active for tensor in entry.tensors.values()]
        if batch.moving == batch.placement.tensors:
            return batch.placement.nbytes
        ranks = {segment: rank for rank, segment in enumerate(batch.segments)}
        end = 0
        for tensor in sorted(batch.moving, key=lambda each: (ranks[each.segment], each.region.offset_nbytes)):
            tensor.staging_offset_nbytes = end
            end = align_up(end + tensor.region.nbytes)
        batch.placement = Placement(batch.moving, self._runs(batch.moving), end)
        return end

    def start_load(self, batch: Batch, buffer: Tensor | None) -> list[CopyPair]:
        """HOST -> LOADING. Returns the copies from the mirrors of active parameters into ``buffer``."""
        if buffer is None or not batch.moving:
            return []
        for tensor in batch.moving:
            tensor.residency = Residency.LOADING
        return [(staged, host) for host, staged in _copies(batch.placement.runs, buffer)]

    def to_device(self, batch: Batch, buffer: Tensor | None, state: OptimizerState) -> None:
        """LOADING -> DEVICE. Binds the staging views; the compute stream is ordered after the load."""
        if buffer is None:
            return
        typed: dict[torch.dtype, Tensor] = {}
        for entry in batch.active:
            values = state[entry.param] if entry.tensors else {}
            for key, tensor in entry.tensors.items():
                spec = tensor.spec
                dtype, itemsize = spec.dtype, spec.dtype.itemsize
                if dtype not in typed:
                    typed[dtype] = buffer[: buffer.nbytes - buffer.nbytes % itemsize].view(dtype)
                begin = tensor.staging_offset_nbytes // itemsize
                local = typed[dtype].as_strided(spec.shape, spec.stride, begin)
                tensor.bound = values[key] = wrap_local(local, tensor.placement)
                tensor.residency = Residency.DEVICE

    def discover(self, batch: Batch, state: OptimizerState) -> list[StateTensor]:
        """After the update: adopt state it created, replaced or removed. Returns tensors with a new source.

        State is discovered, not declared: whatever tensors the update left in ``optimizer.state`` and are
        eligible get a mirror; the next load brings them back.
        """
        fresh: list[tuple[ParamState, str, Tensor]] = []
        replaced: list[StateTensor] = []
        smallest = self._config.min_numel
        for entry in batch.active:
            values = state.get(entry.param, {})
            for key, known in list(entry.tensors.items()):
                value = values.get(key)
                if value is known.bound:
                    continue
                if known.fits(value):
                    known.source = local_of(value)
                    replaced.append(known)
                else:
                    self.set_aside(entry, key)
            for key, value in values.items():
                if key in entry.tensors or not isinstance(value, torch.Tensor):
                    continue
                if value.numel() < smallest:  # the step counter of every parameter: no reason is asked for
                    continue
                if ineligibility(value, key=key, config=self._config, device=self._device) is None:
                    fresh.append((entry, key, value))
        created = self._reserve_for(batch, _unshared(batch, fresh))
        batch.moving = [tensor for entry in batch.active for tensor in entry.tensors.values()]
        return replaced + created

    def start_offload(self, batch: Batch, buffer: Tensor | None) -> list[CopyPair]:
        """DEVICE -> OFFLOADING. Returns the copies from staging, and from created state, into the mirrors."""
        pairs: list[CopyPair] = []
        if buffer is not None:
            staged = [tensor for tensor in batch.moving if tensor.source is None]
            known = staged == batch.placement.tensors
            pairs += _copies(batch.placement.runs if known else self._runs(staged), buffer)
        for tensor in batch.moving:
            if tensor.source is not None:
                pairs.append((tensor.segment.bytes(tensor.region), byte_view(tensor.source)))
            tensor.residency = Residency.OFFLOADING
        return pairs

    def bind_mirrors(self, batch: Batch, state: OptimizerState) -> None:
        """Rebind everything that moves to its mirror. The content counts only after ``to_host``."""
        for entry in batch.active:
            if entry.tensors:
                values = state[entry.param]
                for key, tensor in entry.tensors.items():
                    values[key] = tensor.mirror
                    tensor.bound = tensor.source = None

    def to_host(self, batch: Batch) -> None:
        """OFFLOADING -> HOST. The caller has host-waited for the event that covers the copies."""
        for tensor in batch.moving:
            tensor.residency = Residency.HOST
        batch.moving = []

    def abandon(self, state: OptimizerState, *, torn: Batch | None) -> None:
        """After a failure: whatever was in flight is HOST again, with the content its mirror happens to
        have. State that the update of ``torn`` was creating, and that has no mirror yet, is absent again."""
        for entry in torn.active if torn is not None else ():
            if not entry.tensors:
                state.pop(entry.param, None)
            self._drop_undiscovered(entry, state.get(entry.param, {}))
        for batch in self.batches:
            batch.active = [entry for entry in batch.params if entry.tensors and entry.param in state]
            self.bind_mirrors(batch, state)
            for entry in batch.active:
                for tensor in entry.tensors.values():
                    tensor.residency = Residency.HOST
            batch.active, batch.moving = [], []

    def _drop_undiscovered(self, entry: ParamState, values: dict[str, object]) -> None:
        for key, value in list(values.items()):
            eligible = ineligibility(value, key=key, config=self._config, device=self._device) is None
            if eligible and key not in entry.tensors:
                del values[key]

    # ------------------------------------------------------------------ registration

    def reserve(
        self, batch: Batch, wanted: Sequence[tuple[ParamState, str, TensorSpec, DTensorSpec | None]]
    ) -> list[StateTensor]:
        """Mirrors for new state of one batch, in one segment. They are not registered with their
        parameter."""
        if not wanted:
            return []
        layout = lay_out(spec.nbytes for _, _, spec, _ in wanted)
        segment = self._arena.allocate(layout)
        batch.segments.append(segment)
        reserved = []
        for (entry, key, spec, placement), region in zip(wanted, layout.regions, strict=True):
            mirror = wrap_local(segment.mirror(region, spec), placement)
            name = StateId(entry.name, key)
            reserved.append(StateTensor(name, entry.param, spec, placement, segment, region, mirror))
        batch.tensors += reserved
        return reserved

    def set_aside(self, entry: ParamState, key: str) -> None:
        """State that is absent now; its mirror is kept for when it is created again."""
        entry.pending[key] = entry.tensors.pop(key)

    def forget(self, entry: ParamState, key: str) -> None:
        """Drop one state tensor; its region stays reserved, so that the layout does not move."""
        self._drop(self.batches[entry.batch], entry.tensors.pop(key))

    @staticmethod
    def _drop(batch: Batch, tensor: StateTensor) -> None:
        batch.tensors.remove(tensor)
        if all(other.segment is not tensor.segment for other in batch.tensors):
            batch.segments.remove(tensor.segment)

    def redirect(self, batch: Batch, old: HostSegment, new: HostSegment, *, state: OptimizerState) -> None:
        """Let ``new`` take the place of ``old``: its regions become the mirrors, in ``state`` too.

        Tensors handed out stay valid with the old content until the readers of ``old`` are done.
        """
        batch.segments[batch.segments.index(old)] = new
        for tensor in batch.tensors:
            if tensor.segment is old:
                before, tensor.segment = tensor.mirror, new
                tensor.renew()
                values = state.get(tensor.param, {})
                if values.get(tensor.id.key) is before:
                    values[tensor.id.key] = tensor.mirror

    def _reserve_for(
        self, batch: Batch, fresh: Sequence[tuple[ParamState, str, Tensor]]
    ) -> list[StateTensor]:
        created: list[StateTensor] = []
        wanted, sources = [], []
        for entry, key, value in fresh:
            pending = entry.pending.pop(key, None)
            if pending is not None and pending.fits(value):
                pending.source = local_of(value)
                entry.tensors[key] = pending
                created.append(pending)
                continue
            if pending is not None:
                self._drop(batch, pending)
            wanted.append((entry, key, tensor_spec(local_of(value)), spec_of(value)))
            sources.append(local_of(value))
        reserved = self.reserve(batch, wanted)
        for (entry, key, _, _), tensor, source in zip(wanted, reserved, sources, strict=True):
            tensor.source = source
            entry.tensors[key] = tensor
        return created + reserved

    def _runs(self, tensors: Iterable[StateTensor]) -> list[Run]:
        """What lies in staging, in as few copies as the settings and the gaps between regions allow."""
        runs = []
        ordered = sorted(tensors, key=attrgetter("staging_offset_nbytes"))
        for _, neighbours in groupby(ordered, key=attrgetter("segment")):
            at = {tensor.region.offset_nbytes: tensor for tensor in neighbours}
            regions = [tensor.region for tensor in at.values()]
            for region in coalesce(regions) if self._config.packed else regions:
                first = at[region.offset_nbytes]
                runs.append(Run(first, region, first.staging_offset_nbytes))
        return runs


def _copies(runs: Iterable[Run], buffer: Tensor) -> list[CopyPair]:
    """Per run its bytes on the host, and in staging."""
    return [
        (run.first.segment.bytes(run.region), buffer.narrow(0, run.staging_offset_nbytes, run.region.nbytes))
        for run in runs
    ]
