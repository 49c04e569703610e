"""``swapckpt ls``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from swapckpt.cli.options import AsJson, Folder
from swapckpt.cli.output import age, columns, plural, say, say_json
from swapckpt.report import format_nbytes
from swapckpt.storage import CheckpointState, list_checkpoints
from swapckpt.storage.catalog import leftovers
from swapckpt.tools.location import folder_at

if TYPE_CHECKING:
    from swapckpt.storage import CheckpointInfo, Files, Removal

STYLES = {CheckpointState.COMPLETE: "", CheckpointState.INCOMPLETE: "yellow", CheckpointState.CORRUPT: "red"}


def ls(folder: Folder, *, as_json: AsJson = False) -> None:
    """List the checkpoints of a folder, and what saves left that did not finish.

    Exit status: 0, or 1 when a checkpoint is corrupt, 2 when there is no such folder.
    """
    files = folder_at(folder)
    checkpoints = list_checkpoints(files)
    listed = {info.folder for info in checkpoints}
    left = [
        each for each in leftovers(files, checkpoints, before_secs=time.time()) if each.path not in listed
    ]
    if as_json:
        say_json(_record(files, checkpoints, left))
    else:
        _print(files, checkpoints, left)
    if any(info.state is CheckpointState.CORRUPT for info in checkpoints):
        raise typer.Exit(1)


def _record(files: Files, checkpoints: list[CheckpointInfo], left: list[Removal]) -> dict[str, object]:
    return {
        "folder": files.url,
        "checkpoints": [
            {
                "name": info.name,
                "folder": info.folder,
                "step": info.step,
                "state": info.state.value,
                "nbytes": info.nbytes,
                "modified_secs": info.modified_secs,
                "world_size": info.world_size,
                "problem": info.problem,
            }
            for info in checkpoints
        ],
        "leftovers": [{"path": each.path, "nbytes": each.nbytes, "reason": each.reason} for each in left],
    }


def _print(files: Files, checkpoints: list[CheckpointInfo], left: list[Removal]) -> None:
    if not checkpoints and not left:
        say(f"no checkpoints in {files.url}")
        return
    rows = [
        (
            info.name,
            info.state.value,
            format_nbytes(info.nbytes),
            age(info.modified_secs),
            "-" if info.world_size is None else str(info.world_size),
        )
        for info in checkpoints
    ]
    title, *lines = columns(
        [("checkpoint", "state", "size", "age", "ranks"), *rows], right=frozenset({2, 3, 4})
    )
    if checkpoints:
        say(title, style="bold")
    for info, line in zip(checkpoints, lines, strict=True):
        say(line, style=STYLES[info.state])
        if info.folder != info.name:
            say(f"    in {info.folder}")
        for problem in info.problem.splitlines():
            say(f"    {problem}")
    if left:
        say(f"{plural(len(left), 'leftover')}, {format_nbytes(sum(each.nbytes for each in left))}:")
        for each in left:
            say(f"    {each.path}: {each.reason}", style="yellow")
    unfinished = [info for info in checkpoints if info.state is CheckpointState.INCOMPLETE]
    if left or unfinished:
        say(f"What is an hour old goes away with: swapckpt prune {files.url} --yes")
