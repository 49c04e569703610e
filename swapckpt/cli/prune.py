"""``swapckpt prune``."""

from __future__ import annotations

from typing import Annotated

import typer

from swapckpt import storage
from swapckpt.cli.options import AsJson, Folder
from swapckpt.cli.output import columns, plural, say, say_json
from swapckpt.report import format_nbytes
from swapckpt.storage.catalog import MIN_AGE_SECS
from swapckpt.tools.location import folder_at


def prune(
    folder: Folder,
    *,
    keep_latest: Annotated[
        int | None, typer.Option(min=1, help="Keep the newest N complete steps (default: all).")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Keep steps that are a multiple of this too.")
    ] = None,
    min_age_secs: Annotated[
        float, typer.Option(min=0, help="Leave unfinished saves that changed within this time.")
    ] = MIN_AGE_SECS,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it nothing is.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints, and what saves left that did not finish.

    Only says what it would do until it is given --yes. Corrupt checkpoints stay, and do not count as kept.

    Exit status: 0, or 2 when there is no such folder.
    """
    files = folder_at(folder)
    removals = storage.prune(
        files, keep_latest=keep_latest, keep_every=keep_every, min_age_secs=min_age_secs, dry_run=not yes
    )
    nbytes = sum(removal.nbytes for removal in removals)
    if as_json:
        listed = [{"path": each.path, "nbytes": each.nbytes, "reason": each.reason} for each in removals]
        say_json({"folder": files.url, "removed": yes, "nbytes": nbytes, "removals": listed})
        return
    if not removals:
        say(f"nothing to remove in {files.url}")
        return
    rows = [(each.path, format_nbytes(each.nbytes), each.reason) for each in removals]
    title, *lines = columns([("path", "size", "reason"), *rows], right=frozenset({1}))
    say(title, style="bold")
    for line in lines:
        say(line)
    what = f"{plural(len(removals), 'entry').replace('entrys', 'entries')}, {format_nbytes(nbytes)}"
    say(f"removed {what}" if yes else f"would remove {what}; nothing was removed. Remove with --yes.")
