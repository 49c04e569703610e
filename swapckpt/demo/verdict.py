"""The judgement: were the killed and the resumed run the reference run, bit for bit?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swapckpt.demo.records import KEEP_LATEST
from swapckpt.demo.units import human_nbytes
from swapckpt.storage import CheckpointState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapckpt.demo.records import Finished, Saved, Stepped
    from swapckpt.storage import CheckpointInfo


@dataclass(slots=True)
class RunLog:
    """What one run reported. ``saves`` are those that were committed."""

    name: str
    start: int = 0
    steps: list[Stepped] = field(default_factory=list)
    saves: list[Saved] = field(default_factory=list)
    finished: Finished | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of all ranks while the save of ``step`` was being written.

    Attributes:
        step: Whose save.
        written_nbytes: Data that was there; a whole checkpoint has ``whole_nbytes``.
        found: All checkpoints, whole or not, that the killed run left.
    """

    step: int
    written_nbytes: int
    whole_nbytes: int
    found: tuple[CheckpointInfo, ...]

    @property
    def leftovers(self) -> list[CheckpointInfo]:
        """What is no checkpoint that can be loaded."""
        return [info for info in self.found if info.state is not CheckpointState.COMPLETE]

    @property
    def newest_committed(self) -> int:
        """The step to resume from; 0 if there is none."""
        return max((info.step or 0 for info in self.found if info not in self.leftovers), default=0)


@dataclass(frozen=True, slots=True)
class Story:
    """The three runs and the kill between the last two. ``kill`` None: no save could be caught. ``kept`` are
    the steps whose checkpoints are there at the end."""

    reference: RunLog
    swapped: RunLog
    resumed: RunLog
    kill: Kill | None
    kept: tuple[int, ...]


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
        _check_leftovers(story.kill),
        _check_losses("losses before the kill", story.reference, story.swapped),
        _check_start(story.kill, story.resumed),
        _check_losses("losses after the resume", story.reference, story.resumed),
        _check_end(story.reference, story.resumed),
        _check_idle(story.swapped, story.resumed),
        _check_kept(story),
    )


def differing_steps(reference: RunLog, run: RunLog) -> list[int]:
    """Steps of ``run`` whose loss is not, as bits, the loss of the reference."""
    expected = {record.step: record.loss_hex for record in reference.steps}
    return [record.step for record in run.steps if expected.get(record.step) != record.loss_hex]


def _check_kill(kill: Kill | None) -> Check:
    claim = "killed inside a save"
    if kill is None:
        return Check(claim, ok=False, evidence="every save was committed before the kill")
    is_committed = kill.newest_committed >= kill.step
    nbytes = f"{human_nbytes(kill.written_nbytes)} of {human_nbytes(kill.whole_nbytes)}"
    evidence = "committed after all" if is_committed else f"{nbytes} written"
    return Check(claim, not is_committed and kill.written_nbytes > 0, f"step {kill.step}: {evidence}")


def _check_leftovers(kill: Kill | None) -> Check:
    claim = "its remainder is no checkpoint"
    if kill is None:
        return Check(claim, ok=False, evidence="nothing was killed")
    listed = [f"{info.name} is {info.state.value} ({human_nbytes(info.nbytes)})" for info in kill.leftovers]
    ok = [(info.step, info.state) for info in kill.leftovers] == [(kill.step, CheckpointState.INCOMPLETE)]
    return Check(claim, ok, "; ".join(listed) or "nothing is left of it")


def _check_start(kill: Kill | None, resumed: RunLog) -> Check:
    claim = "resumed from a committed save"
    if kill is None:
        return Check(claim, ok=False, evidence="nothing was killed")
    return Check(
        claim,
        ok=0 < kill.newest_committed == resumed.start < kill.step,
        evidence=f"step {resumed.start} (newest committed: {kill.newest_committed})",
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


def _check_kept(story: Story) -> Check:
    saved = {save.step for run in (story.swapped, story.resumed) for save in run.saves}
    if story.kill is not None:
        saved.add(story.kill.newest_committed)  # the killed run may not have come to report it
    newest = sorted(saved)[-KEEP_LATEST:]
    evidence = f"{_listed(story.kept)} of steps {_listed(sorted(saved))}"
    return Check(f"the last {KEEP_LATEST} saves are kept", list(story.kept) == newest, evidence)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
