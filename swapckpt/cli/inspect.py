"""``swapckpt inspect``."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from swapckpt.cli.options import AsJson, Checkpoint
from swapckpt.cli.output import columns, plural, say, say_json
from swapckpt.errors import ConfigError
from swapckpt.report import format_nbytes
from swapckpt.storage import open_checkpoint
from swapckpt.tools.dcp import DcpContent
from swapckpt.tools.location import checkpoint_at
from swapckpt.tools.tree import leaves, not_created, tree
from swapckpt.tools.values import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapckpt.storage import OpenCheckpoint
    from swapckpt.tools.tree import Leaf, Node


def inspect(
    checkpoint: Checkpoint,
    *,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of names to show (default: all).")] = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", help="Only names that fit, for example '*.exp_avg'.")
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Read and show what is no tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint: names, dtypes, shapes, shards, ranks, bytes. Runs no code of it.

    Reads the metadata; in a local folder also one element per parameter, to tell state that was not created.

    Exit status: 0, 1 when the checkpoint is damaged, 2 when there is none.
    """
    location = checkpoint_at(checkpoint)
    opened = open_checkpoint(location.files, location.name)
    found = leaves(opened, pattern=pattern)
    if not found and pattern is not None:
        raise ConfigError(f"No name in {location.url} fits {pattern!r}.")
    root = tree(found)
    # One read per parameter: not worth the round trips of an object store.
    absent = not_created(opened, root) if location.files.renames or values else set()
    view = _View(opened, found, root, absent, read=_values(opened, found) if values else {}, depth=depth)
    if as_json:
        say_json(_record(view))
        return
    for line in (*_header(opened, root), *_lines(view)):
        say(line)


@dataclass(frozen=True, slots=True)
class _View:
    """What is shown: parameters that are not created, the values that were read, and down to which level."""

    opened: OpenCheckpoint
    found: list[Leaf]
    root: Node
    absent: set[str]
    read: dict[str, str]
    depth: int | None


def _values(opened: OpenCheckpoint, found: list[Leaf]) -> dict[str, str]:
    with closing(DcpContent(opened)) as content:
        return {leaf.fqn: shown(content.value(leaf.fqn)) for leaf in found if leaf.info is None}


def _record(view: _View) -> dict[str, object]:
    opened, root, manifest = view.opened, view.root, view.opened.manifest
    return {
        "checkpoint": opened.where("").rstrip("/"),
        "step": None if manifest is None else manifest.step,
        "world_size": None if manifest is None else manifest.world_size,
        "saved_at": None if manifest is None else manifest.saved_at.isoformat(),
        "versions": {} if manifest is None else dict(manifest.versions),
        "has_checksums": manifest is not None,
        "num_tensors": root.num_tensors,
        "num_values": root.num_values,
        "nbytes": root.nbytes,
        "file_nbytes": sum(opened.nbytes.values()),
        "not_created": sorted(view.absent),
        "entries": [_entry(leaf, view.read) for leaf in view.found],
    }


def _entry(leaf: Leaf, read: dict[str, str]) -> dict[str, object]:
    return {
        "fqn": leaf.fqn,
        "kind": "value" if leaf.info is None else "tensor",
        "dtype": None if leaf.info is None else str(leaf.info.dtype).removeprefix("torch."),
        "shape": None if leaf.info is None else list(leaf.info.shape),
        "chunks": leaf.chunks,
        "ranks": list(leaf.ranks),
        "files": list(leaf.files),
        "nbytes": leaf.nbytes,
        "value": read.get(leaf.fqn),
    }


def _header(opened: OpenCheckpoint, root: Node) -> Iterator[str]:
    manifest = opened.manifest
    if manifest is None:
        yield f"{opened.folder}: written by stock torch, without checksums of its own"
    else:
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        saved = f"{manifest.saved_at:%Y-%m-%d %H:%M} UTC"
        yield f"{opened.folder}: saved {saved} by {plural(manifest.world_size, 'rank')}, {versions}"
    counts = f"{plural(root.num_tensors, 'tensor')}, {plural(root.num_values, 'value')}"
    files = f"{plural(len(opened.nbytes), 'file')} of {format_nbytes(sum(opened.nbytes.values()))}"
    yield f"{counts}, {format_nbytes(root.nbytes)}; {files}"
    yield ""


def _lines(view: _View) -> list[str]:
    rows = list(_rows(view, view.root, level=1))
    return columns([("name", "bytes", "shards", "ranks", "what"), *rows], right=frozenset({1, 2, 3}))


def _rows(view: _View, node: Node, *, level: int) -> Iterator[tuple[str, str, str, str, str]]:
    for child in node.children.values():
        leaf = child.leaf
        name = f"{'  ' * (level - 1)}{child.name}"
        is_folded = level == view.depth and bool(child.children)
        if leaf is None or is_folded:
            summary = _summary(view, child, is_folded=is_folded)
            yield name, format_nbytes(child.nbytes), "", "", summary
        else:
            shards = str(leaf.chunks) if leaf.chunks > 1 else ""
            what = str(leaf.info) if leaf.info else view.read.get(leaf.fqn, "value")
            yield name, format_nbytes(leaf.nbytes), shards, _ranges(leaf.ranks), what
        if not is_folded:
            yield from _rows(view, child, level=level + 1)


def _summary(view: _View, node: Node, *, is_folded: bool) -> str:
    counts = [(node.num_tensors, "tensor"), (node.num_values, "value")] if is_folded else []
    parts = [plural(count, noun) for count, noun in counts if count]
    return ", ".join([*parts, "not created yet"] if node.fqn in view.absent else parts)


def _ranges(numbers: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` as ``"0-2,5"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
