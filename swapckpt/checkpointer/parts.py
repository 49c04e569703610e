"""The entries of a checkpoint: what each is saved as, what a load reads into, and what becomes of that."""

from __future__ import annotations

import copy
import logging
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from swapckpt._torch import local_of
from swapckpt.checkpointer.trees import Path, Whole, has_tensors, leaves, packed, rebuilt
from swapckpt.checkpointer.values import KEY, PerRank, rank_key
from swapckpt.errors import CheckpointError, ConfigError, SwapCkptError
from swapckpt.fqn import named_parameters
from swapckpt.manager import StateManager
from swapckpt.planner import PartOfState
from swapckpt.snapshot import Snapshot, host_copy
from swapckpt.storage.items import check_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from swapckpt.checkpointer.staging import Staging

logger = logging.getLogger(__name__)

Tree = dict[str, object]


class Part(ABC):
    """One entry of a checkpoint, under its name.

    Call sequence (per rank): a save calls ``live`` or ``captured`` on the training thread. A load calls
    ``destination``, lets DCP read into what it gets, and calls ``restored`` with it.
    """

    ranks_agree = False
    """True where all ranks must save the same plain values: one of them is kept."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def live(self) -> object:
        """The present content, as aliases: valid until training goes on."""

    @abstractmethod
    def captured(self, staging: Staging) -> object:
        """The present content, valid while training goes on. Tensors from ``staging`` are filled later."""

    def destination(self, metadata: Metadata, *, allow_partial: bool) -> object | None:
        """What a load reads into; None when the checkpoint has nothing for this part that is to be read."""
        del metadata, allow_partial
        return self.live()

    @abstractmethod
    def restored(self, loaded: object, *, allow_partial: bool) -> None:
        """Take what was read."""

    def is_read(self, key: str) -> bool:
        """False for keys of the checkpoint below this part's name that a load passes over on purpose."""
        del key
        return True

    def release(self) -> None:  # noqa: B027 - most hold nothing
        """The save that ``captured`` was called for has ended."""

    def torn(self, error: BaseException) -> None:  # noqa: B027 - only optimizers can refuse to go on
        """A load failed after some parts had taken what was read."""


class ModulePart(Part):
    """A module: parameters and persistent buffers by FQN, as ``get_model_state_dict`` has them."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name)
        self.module = module

    def live(self) -> Tree:
        return dict(get_model_state_dict(self.module))

    def captured(self, staging: Staging) -> Tree:
        # Buffers change in the next forward, parameters not before the next step: only they can wait.
        late = {alias for names in named_parameters(self.module).values() for alias in names}
        return {
            key: staging.copy(value, name=key)
            if key in late and isinstance(value, torch.Tensor)
            else _copied(value, host_copy, name=f"{self.name}.{key}")
            for key, value in self.live().items()
        }

    def restored(self, loaded: object, *, allow_partial: bool) -> None:
        del allow_partial  # what the checkpoint does not have was left as it is
        set_model_state_dict(self.module, loaded)  # type: ignore[arg-type] # what get_model_state_dict gave


class ManagerPart(Part):
    """The optimizers of a state manager: mirrors are leased, the rest is copied."""

    def __init__(self, name: str, manager: StateManager) -> None:
        super().__init__(name)
        self.manager = manager
        self._snapshot: Snapshot | None = None

    def live(self) -> Tree:
        return self.manager.state_dict()

    def captured(self, staging: Staging) -> Tree:
        self._snapshot = self.manager.snapshot(copy_tensor=staging.copy)
        return self._snapshot.state_dict

    def written(self, tensor: Tensor) -> None:
        """A tensor of the snapshot is needed no more; from any thread."""
        if self._snapshot is not None:
            self._snapshot.written(tensor)

    def release(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def torn(self, error: BaseException) -> None:
        """No step with half of a checkpoint: refuse until another load."""
        for swap in self.manager.swaps():
            swap.fail(error)

    def destination(self, metadata: Metadata, *, allow_partial: bool) -> Tree | None:
        """In the layout that the checkpoint has, without the parameters that had no state when it was saved.

        Stock torch saves nothing for these. A parameter that is missing because it has another name is
        found out by what the checkpoint has too much.
        """
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        saved = {key for key in metadata.state_dict_metadata if key.startswith(f"{self.name}.")}
        kinds = {str(path[1]) for key in saved if len(path := paths.get(key, ())) > 1}
        is_flat = kinds.isdisjoint({"state", "param_groups"}) if kinds else self.manager.flat
        tree = self.manager.state_dict(flat=is_flat)
        created = {key.rpartition(".")[0] for key in saved}
        wanted = (
            {self._owner(key) for key in tree if key.startswith("state.")}
            if is_flat
            else {f"{self.name}.state.{fqn}" for fqn, each in cast("Tree", tree["state"]).items() if each}
        )
        if lacking := sorted(wanted - created):
            logger.warning(
                "The checkpoint has no optimizer state of %d parameters (%s%s). It has none of those that "
                "had no gradient yet when it was saved; these start without, and with allow_partial all stay "
                "as they are.",
                len(lacking),
                ", ".join(lacking[:3]),
                ", ..." if len(lacking) > 3 else "",
            )
        if allow_partial:
            return tree
        if is_flat:
            read = {
                key: tree[key] for key in tree if not key.startswith("state.") or self._owner(key) in created
            }
            return PartOfState.like(tree, read)
        state = cast("Tree", tree["state"])
        read = {fqn: state[fqn] for fqn in state if f"{self.name}.state.{fqn}" in created}
        return PartOfState.like(tree, {**tree, "state": read})

    def _owner(self, key: str) -> str:
        return f"{self.name}.{key}".rpartition(".")[0]

    def restored(self, loaded: object, *, allow_partial: bool) -> None:
        del allow_partial
        self.manager.load_state_dict(cast("Tree", loaded), allow_missing=True)


class ContentPart(Part):
    """Mappings of plain values and tensors. A load reads all that was saved, whatever is there now."""

    ranks_agree = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._paths: dict[str, Path] = {}
        self._before: object = None

    @abstractmethod
    def content(self) -> object:
        """The present content, with keys and types as its owner has them."""

    @abstractmethod
    def take(self, content: object, *, allow_partial: bool) -> None:
        """Give its owner what was loaded."""

    def live(self) -> object:
        return packed(self.content())

    def captured(self, staging: Staging) -> object:
        del staging  # nobody says when it changes: it is copied at once
        return packed(_copied(self.content(), host_copy, name=self.name))

    def destination(self, metadata: Metadata, *, allow_partial: bool) -> object:
        del allow_partial
        self._before = self.content()
        live = {_key(path): (path, value) for path, value in leaves(packed(self._before), (self.name,))}
        saved = {key: path for key, path in _paths(metadata).items() if self._is_mine(key)}
        self._paths = {
            **saved,
            **{key: path for key, (path, value) in live.items() if _is_wanted(path, value, saved)},
        }
        entries = metadata.state_dict_metadata
        read = {key: _place(live[key][1] if key in live else None, entries.get(key)) for key in self._paths}
        if self.name in read:
            return Whole(None) if read[self.name] is None else read[self.name]  # None says: nothing to read
        return {key[len(self.name) + 1 :]: value for key, value in read.items()}

    def _is_mine(self, key: str) -> bool:
        return key == self.name or (key.startswith(f"{self.name}.") and self.is_read(key))

    def restored(self, loaded: object, *, allow_partial: bool) -> None:
        values = (
            {self.name: loaded}
            if self.name in self._paths
            else {f"{self.name}.{key}": value for key, value in cast("Tree", loaded).items()}
        )
        found = [(self._paths[key][1:], value) for key, value in values.items()]
        before, self._before = self._before, None
        self.take(rebuilt(found, before), allow_partial=allow_partial)


class StatefulPart(ContentPart):
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, data loaders, progress."""

    def __init__(self, name: str, stateful: Stateful) -> None:
        super().__init__(name)
        self.stateful = stateful

    def content(self) -> object:
        with _named(f"state_dict() of states[{self.name!r}]"):
            return self.stateful.state_dict()

    def take(self, content: object, *, allow_partial: bool) -> None:
        del allow_partial
        with _named(f"load_state_dict() of states[{self.name!r}]"):
            self.stateful.load_state_dict(cast("Tree", content))


class PerRankPart(StatefulPart):
    """A value of each rank: ``PerRank`` and ``RngState``."""

    ranks_agree = False

    def __init__(self, name: str, stateful: PerRank[object]) -> None:
        super().__init__(name, stateful)
        self._mine = f"{name}.{rank_key()}"

    def destination(self, metadata: Metadata, *, allow_partial: bool) -> object | None:
        keys = metadata.state_dict_metadata
        if not any(self.is_read(key) for key in keys if key.startswith(f"{self.name}.")):
            saved = {key.split(".")[1] for key in keys if key.startswith(f"{self.name}.{KEY}")}
            if saved or allow_partial:
                warnings.warn(
                    f"The checkpoint has {self.name!r} of {len(saved)} ranks and none of {rank_key()}, which "
                    "keeps what it has.",
                    stacklevel=2,
                )
                return None
        return super().destination(metadata, allow_partial=allow_partial)

    def is_read(self, key: str) -> bool:
        return key == self._mine or key.startswith(f"{self._mine}.")


class ValuePart(ContentPart):
    """A plain value, or mappings of plain values and tensors. What is loaded is put back into the mapping of
    states, and into the value itself where that is a mapping."""

    def __init__(self, name: str, states: Mapping[str, object]) -> None:
        super().__init__(name)
        self._states = states

    def content(self) -> object:
        return self._states[self.name]

    def take(self, content: object, *, allow_partial: bool) -> None:
        value = self._states[self.name]
        if isinstance(value, MutableMapping) and isinstance(content, Mapping):
            if not allow_partial:
                value.clear()
            for key, each in list(content.items()):  # update() of a Counter adds
                value[key] = each
        elif isinstance(self._states, MutableMapping):
            self._states[self.name] = content


def part_for(name: str, states: Mapping[str, object]) -> Part:
    """The part that saves ``states[name]``.

    Raises:
        ConfigError: It is an optimizer, or a value of a kind that a checkpoint cannot hold.
    """
    value = states[name]
    if isinstance(value, StateManager):
        return ManagerPart(name, value)
    if isinstance(value, Optimizer):
        raise ConfigError(
            f"states[{name!r}] is a {type(value).__name__}. Names of parameters come from the model: pass "
            "swapckpt.StateManager(model, optimizer), with or without a SwapConfig."
        )
    if isinstance(value, nn.Module):
        return ModulePart(name, value)
    if isinstance(value, PerRank):
        return PerRankPart(name, value)
    if isinstance(value, Stateful):
        return StatefulPart(name, value)
    if not isinstance(states, MutableMapping) and not isinstance(value, MutableMapping):
        raise ConfigError(
            f"states[{name!r}] is a plain value, which cannot be written back by a load: states is a "
            f"{type(states).__name__}. Pass a dict."
        )
    return ValuePart(name, states)


def recovery_of(parts: Mapping[str, Part]) -> list[AbstractContextManager[None]]:
    """Failed optimizers may be loaded where their model is loaded with them: parameters are torn too."""
    modules = {part.module for part in parts.values() if isinstance(part, ModulePart)}
    return [
        part.manager.recovery() if part.manager.model in modules else nullcontext()
        for part in parts.values()
        if isinstance(part, ManagerPart)
    ]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Says of code that is not ours which state it belongs to."""
    try:
        yield
    except SwapCkptError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what} failed: {type(error).__name__}: {error}") from error


def _copied(value: object, copy_tensor: Callable[[Tensor], Tensor], *, name: str) -> object:
    """``value`` with nothing in it that training could change."""
    if isinstance(value, torch.Tensor):
        check_storage(local_of(value), name=name)
        return copy_tensor(value)
    if not has_tensors(value):
        with _named(f"copying {name!r} for the save"):
            return copy.deepcopy(value)
    if isinstance(value, Mapping):
        copies = {key: _copied(each, copy_tensor, name=f"{name}.{key}") for key, each in value.items()}
        return OrderedDict(copies) if type(value) is OrderedDict else copies
    assert isinstance(value, list | tuple)  # nothing else is looked into for tensors
    entries = [_copied(each, copy_tensor, name=f"{name}.{at}") for at, each in enumerate(value)]
    if isinstance(value, list):
        return entries
    return value._make(entries) if hasattr(value, "_make") else tuple(entries)  # a named tuple


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _paths(metadata: Metadata) -> dict[str, Path]:
    """The path of every key; by its dots where the checkpoint does not say."""
    found = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return {
        key: path
        if isinstance(path := found.get(key), tuple) and _key(path) == key
        else tuple(key.split("."))
        for key in metadata.state_dict_metadata
    }


def _is_wanted(path: Path, live: object, saved: Mapping[str, Path]) -> bool:
    """True for what is there now and must be in the checkpoint too, or is missing from it.

    A value that is no tensor takes whatever was saved at its place: a list of another length, a mapping with
    other keys. What is empty was not saved at all by other versions and by stock torch.
    """
    key = _key(path)
    if key in saved or live == Whole({}) or live == Whole([]):
        return False
    if not isinstance(live, torch.Tensor):
        return not any(each.startswith(f"{key}.") or key.startswith(f"{each}.") for each in saved)
    return not any(_is_behind(path[: at + 1], saved) for at in range(len(path)) if type(path[at]) is int)


def _is_behind(place: Path, saved: Mapping[str, Path]) -> bool:
    """True for a place in a list that was saved without it."""
    lists = [path for path in saved.values() if path[: len(place) - 1] == place[:-1]]
    return bool(lists) and all(path[: len(place)] != place for path in lists)


def _place(live: object, entry: object) -> object:
    """What an entry of the checkpoint is read into. What does not fit is left for the planner to find."""
    if isinstance(live, torch.Tensor):
        return live
    if live is None and isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    return live
