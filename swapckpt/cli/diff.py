"""``swapckpt diff``."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from swapckpt.cli.options import AsJson
from swapckpt.cli.output import entry, plural, progress, say, say_json
from swapckpt.tools import diff as differences
from swapckpt.tools.diff import Kind
from swapckpt.tools.sources import open_content
from swapckpt.tools.values import json_number

if TYPE_CHECKING:
    from swapckpt.tools.content import Content
    from swapckpt.tools.diff import Comparison, Difference

_SHOWN = 40
_HELP = "A checkpoint, a .pt file or a .safetensors file: path or URL."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_HELP)],
    *,
    prefix_a: Annotated[str, typer.Option(help="Compare only what is below this name in A.")] = "",
    prefix_b: Annotated[str, typer.Option(help="The same for B.")] = "",
    show_all: Annotated[
        bool, typer.Option("--all", help=f"Show all differences, not the first {_SHOWN}.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints or files bit by bit, whatever their shards are. Runs no code of them.

    Exit status: 0 when all is the same, 1 when something differs or is damaged, 2 when one does not exist.
    """
    with (
        closing(open_content(a, prefix=prefix_a)) as left,
        closing(open_content(b, prefix=prefix_b)) as right,
    ):
        with progress("comparing", differences.shared_nbytes(left, right), quiet=as_json) as on_progress:
            found = differences.diff(left, right, on_progress=on_progress)
        if as_json:
            say_json(_record(left, right, found))
        else:
            _print(left, right, found, shown=None if show_all else _SHOWN)
    if found.differences:
        raise typer.Exit(1)


def _record(a: Content, b: Content, found: Comparison) -> dict[str, object]:
    return {
        "a": a.where,
        "b": b.where,
        "equal": not found.differences,
        "num_equal_tensors": found.num_equal_tensors,
        "num_equal_values": found.num_equal_values,
        "differences": [
            {
                "fqn": each.fqn,
                "kind": each.kind.value,
                "a": each.a,
                "b": each.b,
                "numel": each.numel,
                "num_differing": each.num_differing,
                "num_nan": each.num_nan,
                "max_abs": json_number(each.max_abs),
            }
            for each in found.differences
        ],
    }


def _print(a: Content, b: Content, found: Comparison, *, shown: int | None) -> None:
    same = f"{plural(found.num_equal_tensors, 'tensor')} and {plural(found.num_equal_values, 'value')}"
    if not found.differences:
        say(f"the same to the last bit: {same}", style="green")
        return
    say(f"A: {a.where}")
    say(f"B: {b.where}")
    for each in found.differences[:shown]:
        for line in entry(each.fqn, *_described(each)):
            say(line)
    left = len(found.differences) - len(found.differences[:shown])
    if left:
        say(f"  and {left:,} more; --all shows them")
    say(f"{plural(len(found.differences), 'difference')}; the same: {same}", style="red")


def _described(each: Difference) -> list[str]:
    if each.kind is Kind.ELEMENTS:
        text = f"{each.a}, {each.num_differing:,} of {each.numel:,} elements differ"
        if each.max_abs is not None:
            text += f", by at most {each.max_abs:.3g}"
        return [f"{text}, {each.num_nan:,} of them NaN" if each.num_nan else text]
    if each.kind in {Kind.ONLY_IN_A, Kind.ONLY_IN_B}:
        return [f"{each.kind.value}: {each.a or each.b}"]
    return [f"{each.a} in A", f"{each.b} in B"]
