"""What a checkpoint holds, as a tree of FQNs with shapes, dtypes, shards and bytes. Reads its metadata only.

[Note: not created] State that a parameter does not have yet is saved as negative zero (``statedict.py``).
:func:`not_created` recognises it by one element per parameter: its ``step`` where there is one.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from swapckpt.storage.fetch import Box
from swapckpt.tools.content import TensorInfo
from swapckpt.tools.dcp import DcpContent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from swapckpt.storage import OpenCheckpoint

_DATA_FILE = re.compile(r"__(\d+)_\d+(\.[0-9a-f]{32})?\.distcp")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or value.

    Attributes:
        fqn: Its name.
        info: Dtype and shape; None for a value.
        chunks: Number of shards; 1 for a value.
        ranks: Which ranks wrote them, as far as file names tell.
        files: Where they are.
        nbytes: Of all elements; for a value its length in the file.
    """

    fqn: str
    info: TensorInfo | None
    chunks: int
    ranks: tuple[int, ...]
    files: tuple[str, ...]
    nbytes: int


@dataclass(slots=True)
class Node:
    """Everything below a name."""

    name: str
    fqn: str
    leaf: Leaf | None = None
    children: dict[str, Node] = field(default_factory=dict)
    num_tensors: int = 0
    num_values: int = 0
    nbytes: int = 0

    def walk(self) -> Iterator[Node]:
        """All nodes below this one, each before what is below it."""
        for child in self.children.values():
            yield child
            yield from child.walk()


def leaves(checkpoint: OpenCheckpoint, *, pattern: str | None = None) -> list[Leaf]:
    """All tensors and values whose FQN fits a pattern (``*`` fits anything), by name."""
    found: dict[str, list[tuple[str, int]]] = {}
    for index, place in checkpoint.metadata.storage_data.items():
        found.setdefault(index.fqn, []).append((place.relative_path, place.length))
    return [
        _leaf(fqn, entry, found.get(fqn, []))
        for fqn, entry in sorted(
            checkpoint.metadata.state_dict_metadata.items(), key=lambda item: _natural(item[0])
        )
        if pattern is None or fnmatch.fnmatchcase(fqn, pattern)
    ]


def tree(found: Iterable[Leaf]) -> Node:
    """The tree of some leaves. A leaf may have others below it."""
    root = Node("", "")
    for leaf in found:
        node, path = root, [root]
        for key in leaf.fqn.split("."):
            fqn = f"{node.fqn}.{key}" if node.fqn else key
            node = node.children.setdefault(key, Node(key, fqn))
            path.append(node)
        node.leaf = leaf
        for each in path:
            each.num_tensors += leaf.info is not None
            each.num_values += leaf.info is None
            each.nbytes += leaf.nbytes
    return root


def not_created(checkpoint: OpenCheckpoint, root: Node) -> set[str]:
    """FQNs of parameters below ``state`` whose state is marked as not created (see the note at the top).

    Raises:
        CorruptCheckpointError: A tensor that was looked at is damaged.
        StorageError: The store failed.
    """
    content = DcpContent(checkpoint)
    try:
        return {
            node.fqn
            for node in root.walk()
            if "state" in node.fqn.split(".") and (marks := _marks(node)) and _all_marked(content, marks)
        }
    finally:
        content.close()


def _marks(node: Node) -> list[Leaf]:
    """The tensors by which a node is known to be a parameter's state that was not created."""
    if not node.children or any(child.leaf is None for child in node.children.values()):
        return []
    tensors = [
        child.leaf
        for child in node.children.values()
        if child.leaf and child.leaf.info and child.leaf.info.dtype.is_floating_point and child.leaf.nbytes
    ]
    return [leaf for leaf in tensors if leaf.fqn.endswith(".step")] or tensors


def _all_marked(content: DcpContent, marks: list[Leaf]) -> bool:
    return all(_is_negative_zero(content, leaf) for leaf in marks)


def _is_negative_zero(content: DcpContent, leaf: Leaf) -> bool:
    assert leaf.info is not None
    dims = len(leaf.info.shape)
    first = torch.empty((1,) * dims, dtype=leaf.info.dtype)
    content.read(leaf.fqn, Box((0,) * dims, (1,) * dims), first)
    value = first.float()
    return bool((value == 0) & value.signbit())


def _leaf(fqn: str, entry: object, places: list[tuple[str, int]]) -> Leaf:
    files = tuple(sorted({name for name, _ in places}, key=_natural))
    ranks = tuple(sorted({int(match[1]) for name in files if (match := _DATA_FILE.fullmatch(name))}))
    if not isinstance(entry, TensorStorageMetadata):
        return Leaf(fqn, None, 1, ranks, files, sum(nbytes for _, nbytes in places))
    info = TensorInfo(entry.properties.dtype, tuple(entry.size))
    return Leaf(fqn, info, len(entry.chunks), ranks, files, info.nbytes)


def _natural(text: str) -> list[tuple[int, int | str]]:
    """Orders ``layers.2`` before ``layers.10``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text)]
