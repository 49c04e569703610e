"""The judgement: were the killed and the resumed run the reference run, bit for bit?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swapckpt.demo.units import human_nbytes

if TYPE_CHECKING:
    from swapckpt.demo.records import Finished, Stepped


@dataclass(slots=True)
class RunLog:
    """What one run reported. ``save_secs`` maps a saved step to the seconds its save took."""

    name: str
    start: int = 0
    steps: list[Stepped] = field(default_factory=list)
    save_secs: dict[int, float] = field(default_factory=dict)
    finished: Finished | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of all ranks while the save of ``step`` was being written.

    ``written_nbytes`` of data were in its folder; ``incomplete`` says that DCP's ``.metadata`` was not.
    """

    step: int
    written_nbytes: int
    incomplete: bool
    newest_complete: int


@dataclass(frozen=True, slots=True)
class Story:
    """The three runs and the kill between the last two. ``kill`` None: no save could be caught."""

    reference: RunLog
    swapped: RunLog
    resumed: RunLog
    kill: Kill | None


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict."""

    claim: str
    ok: bool
    evidence: str


def judge(story: Story) -> tuple[Check, ...]:
    """Compare the runs. The demo succeeds only if every check is ok."""
    return (
        _check_kill(story.kill),
        _check_losses("losses before the kill", story.reference, story.swapped),
        _check_start(story.kill, story.resumed),
        _check_losses("losses after the resume", story.reference, story.resumed),
        _check_end(story.reference, story.resumed),
        _check_idle(story.swapped, story.resumed),
    )


def differing_steps(reference: RunLog, run: RunLog) -> list[int]:
    """Steps of ``run`` whose loss is not, as bits, the loss of the reference."""
    expected = {record.step: record.loss_hex for record in reference.steps}
    return [record.step for record in run.steps if expected.get(record.step) != record.loss_hex]


def _check_kill(kill: Kill | None) -> Check:
    claim = "killed inside a save"
    if kill is None:
        return Check(claim, ok=False, evidence="every save completed before the kill")
    torn = kill.incomplete and kill.written_nbytes > 0
    state = "no .metadata" if kill.incomplete else "complete after all"
    return Check(claim, torn, f"step {kill.step}: {human_nbytes(kill.written_nbytes)}, {state}")


def _check_start(kill: Kill | None, resumed: RunLog) -> Check:
    claim = "resumed from a complete save"
    if kill is None:
        return Check(claim, ok=False, evidence="nothing was killed")
    return Check(
        claim,
        ok=0 < kill.newest_complete == resumed.start < kill.step,
        evidence=f"step {resumed.start} (newest complete: {kill.newest_complete})",
    )


def _check_losses(claim: str, reference: RunLog, run: RunLog) -> Check:
    differing = differing_steps(reference, run)
    equal = f"{len(run.steps) - len(differing)} of {len(run.steps)} equal to the last bit"
    evidence = f"{equal}; step {differing[0]} differs first" if differing else equal
    return Check(claim, bool(run.steps) and not differing, evidence)


def _check_end(reference: RunLog, resumed: RunLog) -> Check:
    claim = "final parameters and moments"
    if reference.finished is None or resumed.finished is None:
        return Check(claim, ok=False, evidence="a run did not reach its last step")
    params = reference.finished.params_digest == resumed.finished.params_digest
    state = reference.finished.state_digest == resumed.finished.state_digest
    words = {True: "equal", False: "different"}
    return Check(claim, params and state, f"parameters {words[params]}, moments {words[state]}")


def _check_idle(*runs: RunLog) -> Check:
    records = [record for run in runs for record in run.steps]
    idle = max((record.device_nbytes for record in records), default=0)
    peak = max((record.device_peak_nbytes for record in records), default=0)
    evidence = f"{human_nbytes(idle)}, within steps up to {human_nbytes(peak)}"
    return Check("state on the device between steps", bool(records) and idle == 0, evidence)
