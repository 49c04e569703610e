"""The story: a reference run, the swapped run that is killed inside a save, the run that resumes it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING

from swapckpt.demo.checkpoints import progress
from swapckpt.demo.ranks import Ranks
from swapckpt.demo.records import Finished, Saved, Saving, Started, Stepped
from swapckpt.demo.verdict import Kill, RunLog, Story
from swapckpt.errors import ConfigError
from swapckpt.storage import committed_steps, list_checkpoints

if TYPE_CHECKING:
    from pathlib import Path

    from swapckpt.demo.config import DemoConfig
    from swapckpt.demo.display import Display
    from swapckpt.demo.records import Event, TrainConfig
    from swapckpt.demo.verdict import Check
    from swapckpt.storage import Files

RECORDS_NAME = "records.json"
_RECORDS_BEGIN = '{\n "made_by": "swapckpt demo",'
_FOLDERS = ("checkpoints", "logs")
_FILES = ("loss.png", "memory.png", "timeline.json")


def tell(config: DemoConfig, files: Files, display: Display) -> Story:
    """Run all three runs, one after the other, and show them while they run.

    Raises:
        RanksFailedError: A rank failed on its own; no process is left.
    """
    display.chapter("1/3 reference", "plain AdamW, state on the device, no saves")
    reference = _run_to_end("reference", config.reference_run(), config=config, display=display)
    display.chapter("2/3 swapped", f"{config.swap_times} batches, a save every {config.save_every} steps")
    swapped, kill = _run_to_kill(config, files, display)
    display.chapter("3/3 resumed", "the same command again")
    resumed = _run_to_end("resumed", config.swapped_run(), config=config, display=display)
    return Story(reference, swapped, resumed, kill, tuple(committed_steps(files)))


def prepare_folder(config: DemoConfig) -> None:
    """Make ``config.out`` an empty demo folder; what an earlier demo left there is removed.

    Raises:
        ConfigError: The folder holds something else. Nothing was removed.
    """
    out = config.out
    if out.exists() and not _may_be_emptied(out):
        msg = f"--out {out} exists and was not made by the demo. Give a new or an empty folder."
        raise ConfigError(msg)
    out.mkdir(parents=True, exist_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in _FILES:
        (out / name).unlink(missing_ok=True)
    _write_records(out, {"config": asdict(config)})  # also marks the folder as ours


def _may_be_emptied(out: Path) -> bool:
    """Whether ``out`` is an empty folder, or holds what a demo wrote."""
    if not out.is_dir():
        return False
    records = out / RECORDS_NAME
    if not records.exists():
        return not any(out.iterdir())
    # Others write records.json too. Ours may be cut off where a demo was killed: look at its beginning only.
    return records.read_bytes().startswith(_RECORDS_BEGIN.encode())


def write_records(config: DemoConfig, story: Story, checks: tuple[Check, ...]) -> Path:
    """Everything that was measured, for other tools: ``records.json``."""
    return _write_records(
        config.out,
        {"config": asdict(config), "story": asdict(story), "verdict": [asdict(check) for check in checks]},
    )


def _write_records(out: Path, content: dict[str, object]) -> Path:
    path = out / RECORDS_NAME
    path.write_text(_RECORDS_BEGIN + json.dumps(content, indent=1, default=str)[1:] + "\n")
    return path


def _run_to_end(name: str, train: TrainConfig, *, config: DemoConfig, display: Display) -> RunLog:
    log = RunLog(name)
    with Ranks(train, world=config.ranks, folder=config.logs / name) as ranks:
        for event in ranks.events():
            _note(event, log, display)
    return log


def _run_to_kill(config: DemoConfig, files: Files, display: Display) -> tuple[RunLog, Kill | None]:
    log = RunLog("swapped")
    kill = None
    with Ranks(config.swapped_run(), world=config.ranks, folder=config.logs / log.name) as ranks:
        for event in ranks.events():
            _note(event, log, display)
            if kill is None and isinstance(event, Saving) and event.step >= config.kill_step:
                kill = _try_to_kill(ranks, files, event.step)
                if kill is None:
                    display.missed(event.step)
    if kill is not None:
        display.killed(kill)
    return log, kill


def _try_to_kill(ranks: Ranks, files: Files, step: int) -> Kill | None:
    whole_nbytes = progress(files, committed_steps(files)[-1]).nbytes
    written_nbytes = ranks.kill_inside_save(files, step, at_nbytes=whole_nbytes // 2)
    if written_nbytes is None:
        return None
    return Kill(step, written_nbytes, whole_nbytes, tuple(list_checkpoints(files)))


def _note(event: Event, log: RunLog, display: Display) -> None:
    match event:
        case Started():
            log.start = event.start
        case Stepped():
            log.steps.append(event)
        case Saved():
            log.saves.append(event)
        case Finished():
            log.finished = event
    display.event(log, event)
