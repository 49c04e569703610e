"""Values as a checkpoint holds them: taken apart where tensors are, whole where taking apart would lose keys
or types.

DCP saves the entries of mappings and lists one by one, under names. That makes strings of integer keys and
dicts of counters, and loses how long a list is and that a mapping is empty. Dicts with string keys come back
as they were; everything else without sharded tensors in it is handed to DCP as one value.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapckpt._torch import spec_of
from swapckpt.storage.values import FACTORIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Path = tuple[str | int, ...]
"""Where a value is: keys of mappings, and integers for places in lists."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A container that is saved as one value."""

    value: object


def packed(value: object) -> object:
    """``value`` in the form that DCP is given: what it would not bring back as it was is a :class:`Whole`."""
    if isinstance(value, Mapping):
        if not _is_kept(value):
            return packed(dict(value))
        if not (_is_faithful(value) or _must_be_apart(value)):
            return Whole(value)
        return {str(key): packed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [packed(each) for each in value] if has_tensors(value) else Whole(value)
    return value


def _is_kept(value: Mapping[object, object]) -> bool:
    """True for mappings whose kind a checkpoint keeps; others are saved as dicts."""
    if type(value) is defaultdict:
        return value.default_factory in FACTORIES
    return type(value) in (dict, OrderedDict, Counter)


def _is_faithful(value: Mapping[object, object]) -> bool:
    """True for dicts that come back from their keys' names alone."""
    return type(value) is dict and bool(value) and all(type(key) is str for key in value)


def _must_be_apart(value: Mapping[object, object]) -> bool:
    """True where each tensor needs a name: state dicts of modules, and sharded ones, which DCP alone can
    save."""
    has_names = bool(value) and all(type(key) is str for key in value)
    return (has_names and has_tensors(value)) or any(map(_is_sharded, tensors_of(value)))


def _is_sharded(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and (
        spec_of(tensor) is not None or hasattr(tensor, "local_shards")
    )


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """All tensors in mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def has_tensors(value: object) -> bool:
    """True when a tensor is in it."""
    return next(tensors_of(value), None) is not None


def leaves(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """What DCP saves one by one of a value that is ``packed``, with its path."""
    entries: Iterable[tuple[str | int, object]]
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    else:
        yield path, value
        return
    for key, each in entries:
        yield from leaves(each, (*path, key))


def rebuilt(found: Sequence[tuple[Path, object]], like: object) -> object:
    """The value whose leaves are ``found``.

    Args:
        found: Leaves, with paths below the value.
        like: The live value: keys and kinds of containers that names do not tell are as there. That matters
            for sharded tensors, and for files that other versions and stock torch wrote.
    """
    if not found:
        return like
    whole = [value for path, value in found if not path]
    if whole:
        return whole[0].value if isinstance(whole[0], Whole) else whole[0]
    below: dict[str | int, list[tuple[Path, object]]] = {}
    for path, value in found:
        below.setdefault(path[0], []).append((path[1:], value))
    if all(type(at) is int for at in below):
        there: dict[str | int, object] = dict(enumerate(like)) if isinstance(like, list) else {}
        return [rebuilt(below[at], there.get(at)) for at in sorted(below, key=int)]
    known: dict[object, object] = dict(like) if isinstance(like, Mapping) else {}
    named = {str(key): key for key in known}
    has_numbers = bool(known) and all(type(key) is int for key in known)
    entries: dict[object, object] = {}
    for name, each in below.items():
        is_number = has_numbers and isinstance(name, str) and name.removeprefix("-").isdecimal()
        key = named.get(str(name), int(name) if is_number else name)
        entries[key] = rebuilt(each, known.get(key))
    kind = next((each for each in (Counter, OrderedDict) if type(like) is each), dict)
    return kind(entries)
