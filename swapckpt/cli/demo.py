"""``swapckpt demo``."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from swapckpt.demo.config import DemoConfig, default_device, default_ranks
from swapckpt.demo.corpus import load_corpus
from swapckpt.demo.display import Display
from swapckpt.demo.store import opened_store
from swapckpt.demo.story import prepare_folder, tell, write_records
from swapckpt.demo.verdict import judge

T = TypeVar("T")

if TYPE_CHECKING:
    from swapckpt.demo.verdict import Story


def demo(  # noqa: PLR0913 - to typer every parameter is an option
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and few steps: half a minute.")
    ] = False,
    params: Annotated[str | None, typer.Option(help="Size of the model (default: 10M; quick 1M).")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes to shard over (default: 2).")] = None,
    data: Annotated[Path | None, typer.Option(help="Text to train on instead of Python's own docs.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps (default: 20; quick 12).")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between saves (default: 4; quick 3).")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step (default: 8; quick 4).")] = None,
    time: Annotated[int | None, typer.Option(help="Bytes per sequence (default: 128; quick 64).")] = None,
    swap_times: Annotated[int, typer.Option(help="Batches the optimizer step is divided into.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, npu, .. (default: what torch has).")] = None,
    store: Annotated[str, typer.Option(help="Checkpoints go to: disk, or s3 (a local server).")] = "disk",
    out: Annotated[Path, typer.Option(help="Folder for pictures, records and checkpoints.")] = Path(
        "demo-output"
    ),
) -> None:
    """Train, swap, get killed inside a save, resume: the losses must be those of an untouched run."""
    base = DemoConfig.quick() if quick else DemoConfig()
    device = device or default_device()
    config = replace(
        base,
        params=_or(params, base.params),
        ranks=_or(ranks, default_ranks(device)),
        steps=_or(steps, base.steps),
        save_every=_or(save_every, base.save_every),
        batch=_or(batch, base.batch),
        time=_or(time, base.time),
        data=data,
        swap_times=swap_times,
        seed=seed,
        device=device,
        out=out,
        store=store,
    )
    if not run_demo(config, Console()):
        raise typer.Exit(1)


def run_demo(config: DemoConfig, console: Console) -> bool:
    """Tell the story on ``console``, write its files, and say whether every check of the verdict is ok."""
    corpus = load_corpus(config.data, min_nbytes=config.time + 1)
    with opened_store(config) as files:
        prepare_folder(config)
        console.print(
            f"Llama of {config.shape.params:,} parameters ({config.shape})\n"
            f"on {corpus.name} ({len(corpus.tokens):,} bytes), FSDP2 over {config.ranks} x {config.device}\n"
            f"checkpoints in {config.checkpoints}\n"
            "below: optimizer state of rank 0, on the device (now and peak) and on the host;\n"
            "seconds of a step, by which its save stalled training, until it was committed",
            highlight=False,
            soft_wrap=True,
        )
        with Display(console, config) as display:
            story = tell(config, files, display)
    checks = judge(story)
    display.verdict(checks)
    write_records(config, story, checks)
    _draw(config, story, console)
    for path in sorted(path for path in config.out.iterdir() if path.is_file()):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return all(check.ok for check in checks)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _draw(config: DemoConfig, story: Story, console: Console) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no pictures: matplotlib is missing (pip install 'swapckpt[plot]')", markup=False)
        return
    from swapckpt.demo.pictures import draw_pictures

    draw_pictures(story, config.out)
