"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of checkpoints: a path or URL.")]
Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint: a path or URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON (keys: docs/tools.md).")]
