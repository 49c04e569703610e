"""``swapckpt convert``."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from swapckpt.cli.options import AsJson
from swapckpt.cli.output import plural, progress, say, say_json
from swapckpt.report import format_nbytes
from swapckpt.tools import convert as conversion
from swapckpt.tools.sources import open_content


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint, or a .pt, .safetensors or .safetensors.index.json file: path or URL.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="x.pt, .pth, .bin, .ckpt: torch.save. x.safetensors. Else: a checkpoint."
        ),
    ],
    *,
    prefix: Annotated[
        str, typer.Option(help="Only what is below this name, for example 'model'; it is left out.")
    ] = "",
    drop_values: Annotated[
        bool, typer.Option("--drop-values", help="Leave out values that the format cannot hold.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint to another format, a piece at a time. Runs no code of it.

    Exit status: 0, 1 when the source is damaged or does not fit the format, 2 when there is none, or the
    target exists.
    """
    with closing(open_content(source, prefix=prefix)) as content:
        nbytes = sum(info.nbytes for info in content.tensors.values())
        with progress("converting", nbytes, quiet=as_json) as on_progress:
            done = conversion.convert(
                content, target, overwrite=overwrite, drop_values=drop_values, on_progress=on_progress
            )
    if as_json:
        say_json(
            {
                "source": source,
                "target": target,
                "format": done.form.name.lower(),
                "num_tensors": done.num_tensors,
                "num_values": done.num_values,
                "nbytes": done.nbytes,
                "dropped": done.dropped,
            }
        )
        return
    for fqn in done.dropped:
        say(f"left out: {fqn}", style="yellow")
    what = f"{plural(done.num_tensors, 'tensor')}, {plural(done.num_values, 'value')}"
    say(f"wrote {target}, {done.form.value}: {what}, {format_nbytes(done.nbytes)}")
