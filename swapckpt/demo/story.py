"""The story: a reference run, the swapped run that is killed inside a save, the run that resumes it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING

from swapckpt.demo.checkpoints import complete_steps, data_nbytes, is_complete, step_folder
from swapckpt.demo.ranks import Ranks
from swapckpt.demo.records import Finished, Saved, Saving, Started, Stepped
from swapckpt.demo.verdict import Kill, RunLog, Story
from swapckpt.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from swapckpt.demo.config import DemoConfig
    from swapckpt.demo.display import Display
    from swapckpt.demo.records import Event, TrainConfig
    from swapckpt.demo.verdict import Check

RECORDS_NAME = "records.json"
_RECORDS_BEGIN = '{\n "made_by": "swapckpt demo",'
_FOLDERS = ("checkpoints", "logs")
_FILES = ("loss.png", "memory.png", "timeline.json")
_KEEP_CHECKPOINTS = 2


def tell(config: DemoConfig, display: Display) -> Story:
    """Run all three runs, one after the other, and show them while they run.

    Raises:
        RanksFailedError: A rank failed on its own; no process is left.
    """
    display.chapter("1/3 reference", "plain AdamW, state on the device, no saves")
    reference = _run_to_end("reference", config.reference_run(), config=config, display=display)
    display.chapter("2/3 swapped", f"{config.swap_times} batches, a save every {config.save_every} steps")
    swapped, kill = _run_to_kill(config, display)
    display.chapter("3/3 resumed", "the same command again")
    resumed = _run_to_end("resumed", config.swapped_run(), config=config, display=display)
    return Story(reference, swapped, resumed, kill)


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
            _note(event, log, config=config, display=display)
    return log


def _run_to_kill(config: DemoConfig, display: Display) -> tuple[RunLog, Kill | None]:
    log = RunLog("swapped")
    kill = None
    with Ranks(config.swapped_run(), world=config.ranks, folder=config.logs / log.name) as ranks:
        for event in ranks.events():
            _note(event, log, config=config, display=display)
            if isinstance(event, Saving) and event.step >= config.kill_step:
                kill = _try_to_kill(ranks, event.step, config=config)
                display.kill(event.step, kill)
    return log, kill


def _try_to_kill(ranks: Ranks, step: int, *, config: DemoConfig) -> Kill | None:
    folder = step_folder(config.checkpoints, step)
    newest_complete = complete_steps(config.checkpoints)[-1]
    half_nbytes = data_nbytes(step_folder(config.checkpoints, newest_complete)) // 2
    written_nbytes = ranks.kill_inside_save(folder, at_nbytes=half_nbytes)
    if written_nbytes is None:
        return None
    return Kill(
        step=step,
        written_nbytes=written_nbytes,
        incomplete=not is_complete(folder),
        newest_complete=newest_complete,
    )


def _note(event: Event, log: RunLog, *, config: DemoConfig, display: Display) -> None:
    match event:
        case Started():
            log.start = event.start
        case Stepped():
            log.steps.append(event)
        case Saved():
            log.save_secs[event.step] = event.secs
            _drop_old_checkpoints(config.checkpoints)
        case Finished():
            log.finished = event
    display.event(log, event)


def _drop_old_checkpoints(root: Path) -> None:
    for step in complete_steps(root)[:-_KEEP_CHECKPOINTS]:
        shutil.rmtree(step_folder(root, step))
