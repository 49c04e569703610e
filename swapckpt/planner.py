"""A load planner for DCP that compares a checkpoint with its destination before a byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from swapckpt._torch import DTensor, local_of, spec_of
from swapckpt.collector import collector_paused
from swapckpt.errors import SchemaError, listing
from swapckpt.flatten import Flattener

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from typing import TypeGuard

    from torch.distributed.checkpoint.metadata import Metadata

    from swapckpt._torch import DTensorSpec


class Destination(Protocol):
    """What is told that a load overwrites it. A ``StateManager`` is one.

    Call sequence (by the planner, on the thread of ``dcp.load``): ``begin_load()`` once per load, on every
    rank, after the plans of all ranks were made and before the first byte is read.
    """

    def begin_load(self) -> None:
        """Count as torn until the load has finished."""
        ...


class PartOfState(dict[str, object]):
    """Optimizer state of which other ranks hold the rest: that of the parameters named ``elsewhere``.

    A checkpoint has all of it. What belongs to others is not unexpected here, and is not read.
    """

    def __init__(self, state_dict: Mapping[str, object], *, elsewhere: Collection[str]) -> None:
        super().__init__(state_dict)
        self.elsewhere = frozenset(elsewhere)

    @classmethod
    def like(cls, original: Mapping[str, object], content: Mapping[str, object]) -> dict[str, object]:
        """``content``, as a part of the same whole that ``original`` is a part of, if it is one."""
        return cls(content, elsewhere=original.elsewhere) if isinstance(original, cls) else dict(content)

    def is_elsewhere(self, path: Sequence[object]) -> bool:
        """True for a key of the other ranks' part, by its path from here (nested or flat layout)."""
        kind, _, rest = ".".join(map(str, path)).partition(".")
        return kind == "state" and any(name in self.elsewhere for name in _prefixes(rest))


def _prefixes(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


class StrictLoadPlanner(DefaultLoadPlanner):
    """Reads only a checkpoint that fits, and says about one that does not everything that is wrong with it.

    Stock's planner stops at the first entry it cannot read and casts dtypes without a word (an int64 300
    becomes 44 in an int8 destination). This one is passed to ``dcp.load(..., planner=StrictLoadPlanner())``.

    Reading happens in place. Named here, a ``StateManager`` knows when a read did not finish, and refuses
    to go on with half of a checkpoint: ``planner=StrictLoadPlanner(manager)``.

    DCP gathers the errors of all ranks and raises them, on every rank and in a single process too, wrapped in
    a ``torch.distributed.checkpoint.api.CheckpointException``. That is a ``BaseException``: ``except
    Exception`` does not catch it. The SchemaError of a rank is in ``failures``::

        try:
            dcp.load({"optimizer": manager}, checkpoint_id=path, planner=StrictLoadPlanner())
        except CheckpointException as error:
            for rank, (problem, _) in error.failures.items():
                print(rank, problem)

    Args:
        destinations: State managers that this load reads into.
        allow_cast: Let DCP cast to the destination's dtype. Values may be rounded or wrap around.
        allow_partial: Leave destinations that the checkpoint does not have as they are, and what else it has
            unread. State of a ``StateManager`` that was never created stays so, then.
        flatten_state_dict: As in ``DefaultLoadPlanner``.

    Raises:
        SchemaError: From planning, before anything is read: lists every entry that is missing, misshaped or
            wrongly typed, or that the checkpoint has and the destination lacks, sorted, with what was
            expected and what was found. Other top-level names of the checkpoint are not looked at.
    """

    def __init__(
        self,
        *destinations: Destination,
        allow_cast: bool = False,
        allow_partial: bool = False,
        flatten_state_dict: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict=flatten_state_dict, allow_partial_load=allow_partial)
        self._destinations = destinations
        self._allow_cast = allow_cast

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - the signature is DCP's
    ) -> None:
        """Flatten the state dict. (all ranks)"""
        flat = Flattener().flattened(state_dict) if self.flatten_state_dict else None
        if flat is None or any(
            isinstance(value, torch.Tensor) and value.is_meta for value in flat[0].values()
        ):
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The reads of this rank. Called by DCP on every rank, after ``set_up_planner``."""
        try:
            plan = self._create_plan()
        except (RuntimeError, ValueError) as error:  # about the first entry that does not fit
            self._raise_problems(cause=error)
            raise
        self._raise_problems(cause=None)
        return plan

    def _create_plan(self) -> LoadPlan:
        """As stock torch makes it, which takes 100 us for each tensor and a tenth of that in here."""
        assert self.metadata is not None  # DCP has set it up
        if not self.state_dict.keys() <= self.metadata.state_dict_metadata.keys():
            # Perhaps torch 2.3 saved it, which spelled some keys differently: stock torch finds out.
            return super().create_local_plan()
        with collector_paused():
            return LoadPlan(self._reads(self.metadata))

    def _reads(self, metadata: Metadata) -> list[ReadItem]:
        items: list[ReadItem] = []
        shards = _Shards()
        for fqn, value in self.state_dict.items():
            item = _read_of_one(fqn, value, metadata.state_dict_metadata[fqn], shards=shards)
            if item is not None:
                items.append(item)
            else:
                items += create_default_local_load_plan({fqn: value}, metadata).items
        return items

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor that an item is read into."""
        value = self.state_dict.get(index.fqn)
        return local_of(value) if _is_of_torch(value) else super().lookup_tensor(index)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a local tensor that an item is read into."""
        return tensor if read_item.lengths == tensor.shape else super().transform_tensor(read_item, tensor)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Called by DCP on every rank when all ranks have a plan; reading is next."""
        plan = super().finish_plan(new_plan)
        for destination in self._destinations:
            destination.begin_load()
        return plan

    def _raise_problems(self, *, cause: Exception | None) -> None:
        assert self.metadata is not None  # DCP has set it up
        problems = [
            f"{key}: {problem}"
            for key, destination in self.state_dict.items()
            if (problem := self._problem(key, destination, allow_cast=self._allow_cast)) is not None
        ]
        problems += [f"{key}: unexpected" for key in self.unexpected(self.metadata)]
        if problems:
            msg = (
                f"The checkpoint does not fit; nothing was read.{self._advice(problems)} "
                f"{len(problems)} entries:{listing(problems)}"
            )
            raise SchemaError(msg) from cause

    def _advice(self, problems: Sequence[str]) -> str:
        """The options under which less would be wrong."""
        advice = ""
        if any(problem.endswith((": missing", ": unexpected")) for problem in problems):
            advice += " allow_partial=True leaves out what is missing or unexpected."
        if not self._allow_cast and any(
            self._problem(key, each, allow_cast=False) != self._problem(key, each, allow_cast=True)
            for key, each in self.state_dict.items()
        ):
            advice += " allow_cast=True converts where only the dtype differs."
        return advice

    def unexpected(self, metadata: Metadata) -> list[str]:
        """What the checkpoint has under the names that are loaded and the destination does not."""
        if self.allow_partial_load:
            return []
        loaded = {path[0] for path in self.mappings.values() if len(path) > 1}
        found = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        return [
            key
            for key in metadata.state_dict_metadata
            if key not in self.state_dict
            and found.get(key, (None,))[0] in loaded
            and not _is_elsewhere(self.original_state_dict, found[key])
        ]

    def _problem(self, key: str, destination: object, *, allow_cast: bool) -> str | None:
        assert self.metadata is not None
        entries = self.metadata.state_dict_metadata
        if key not in entries:
            return None if self.allow_partial_load else "missing"
        found = entries[key]
        if isinstance(found, TensorStorageMetadata) != isinstance(destination, torch.Tensor):
            return f"expected {_kind(destination)}, found {_kind(found)}"
        if not isinstance(destination, torch.Tensor) or not isinstance(found, TensorStorageMetadata):
            return None
        wrong_shape = tuple(found.size) != tuple(destination.shape)
        wrong_dtype = found.properties.dtype != destination.dtype and not allow_cast
        return f"expected {_kind(destination)}, found {_kind(found)}" if wrong_shape or wrong_dtype else None


class _Shards:
    """Which part of a tensor this rank has. Most have one of a few geometries: each is computed once."""

    def __init__(self) -> None:
        self._known: dict[torch.Size | DTensorSpec, ChunkStorageMetadata | None] = {}

    def of(self, value: torch.Tensor) -> ChunkStorageMetadata | None:
        """None where this rank has no part, an empty one, or several."""
        geometry = spec_of(value) or value.shape
        if geometry not in self._known:
            self._known[geometry] = _shard_of(value)
        return self._known[geometry]


def _shard_of(value: torch.Tensor) -> ChunkStorageMetadata | None:
    if not isinstance(value, DTensor):
        shards = [ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)]
    elif value.device_mesh.get_coordinate() is None:
        return None
    else:
        shards = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return shards[0] if len(shards) == 1 and shards[0].sizes.numel() else None


def _is_of_torch(value: object) -> TypeGuard[torch.Tensor]:
    """True for plain tensors and DTensors of plain tensors: others may know better how they are read."""
    return isinstance(value, torch.Tensor) and type(local_of(value)) is torch.Tensor


def _read_of_one(fqn: str, value: object, entry: object, *, shards: _Shards) -> ReadItem | None:
    """The read of a tensor, or of this rank's shard, that was saved in one piece; None for anything else."""
    if not _is_of_torch(value) or not isinstance(entry, TensorStorageMetadata) or len(entry.chunks) != 1:
        return None
    (saved,), shard = entry.chunks, shards.of(value)
    if shard is None or not saved.sizes == entry.size == value.shape:
        return None
    start = saved.offsets  # zeros: it is as large as the whole
    return ReadItem(
        LoadItemType.TENSOR,
        dest_index=MetadataIndex(fqn, shard.offsets, 0),
        dest_offsets=start,
        storage_index=MetadataIndex(fqn, start, 0),
        storage_offsets=shard.offsets,
        lengths=shard.sizes,
    )


def _is_elsewhere(state_dict: Mapping[str, object], path: Sequence[object]) -> bool:
    """True for what belongs to a part of the state that other ranks hold."""
    place: object = state_dict
    for depth, key in enumerate(path):
        if isinstance(place, PartOfState):
            return place.is_elsewhere(path[depth:])
        if not isinstance(place, Mapping) or key not in place:
            return False
        place = place[key]
    return False


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, TensorStorageMetadata):
        return f"{value.properties.dtype} {list(value.size)}"
    return "a value that is not a tensor"
