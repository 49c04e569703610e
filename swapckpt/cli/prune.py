"""``swapckpt prune``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from swapckpt import storage
from swapckpt.cli.options import AsJson, Folder
from swapckpt.cli.output import columns, plural, say, say_json
from swapckpt.report import format_nbytes
from swapckpt.storage.catalog import MIN_AGE_SECS
from swapckpt.tools.location import folder_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapckpt.storage.catalog import Removal


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
    of_any_age = storage.prune(
        files, keep_latest=keep_latest, keep_every=keep_every, min_age_secs=0, dry_run=True
    )
    removals = storage.prune(
        files, keep_latest=keep_latest, keep_every=keep_every, min_age_secs=min_age_secs, dry_run=not yes
    )
    nbytes = sum(removal.nbytes for removal in removals)
    paths = {removal.path for removal in removals}
    left = [removal for removal in of_any_age if removal.path not in paths]
    if as_json:
        say_json(
            {
                "folder": files.url,
                "removed": yes,
                "nbytes": nbytes,
                "removals": list(map(_record, removals)),
                "left": list(map(_record, left)),
            }
        )
        return
    if removals:
        _print(removals, nbytes, removed=yes)
    else:
        say(f"nothing to remove in {files.url}")
    if left:
        say(f"left, changed in the last {min_age_secs:g} s, perhaps by a save that goes on:")
        for each in left:
            say(f"  {each.path}")
        say("  (--min-age-secs 0 takes them too)")


def _record(removal: Removal) -> dict[str, object]:
    return {"path": removal.path, "nbytes": removal.nbytes, "reason": removal.reason}


def _print(removals: Sequence[Removal], nbytes: int, *, removed: bool) -> None:
    rows = [(each.path, format_nbytes(each.nbytes), each.reason) for each in removals]
    title, *lines = columns([("path", "size", "reason"), *rows], right=frozenset({1}))
    say(title, style="bold")
    for line in lines:
        say(line)
    what = f"{plural(len(removals), 'entry').replace('entrys', 'entries')}, {format_nbytes(nbytes)}"
    say(f"removed {what}" if removed else f"would remove {what}; nothing was removed. Remove with --yes.")
