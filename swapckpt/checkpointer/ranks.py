"""The ranks that save together: a process group of their own, and what they agree on."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from swapckpt.errors import CheckpointError, SwapCkptError, listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Said:
    """What one rank tells the others."""

    value: object
    error: SwapCkptError | None


class Ranks:
    """All ranks of a job, over gloo groups that nothing else uses.

    A save in a background thread must not share a group with training: collectives of two threads on one
    group meet in any order, which hangs or aborts the process. For the same reason there are two: ``group``
    is that of the save, ``front`` that of the training thread, which asks whether to begin one. Gloo, for
    what travels is small and lies on the host.

    Every method is called by all ranks, in the same order; making one is a collective call too. Without
    ``torch.distributed`` there is one rank, and nothing waits.

    Args:
        process_group: The ranks; default all.
        timeout_secs: Bound of each collective call: a rank that is gone is an error on the others within it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, timeout_secs: float) -> None:
        self.group: dist.ProcessGroup | None = None
        self.front: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            members = None if process_group is None else dist.get_process_group_ranks(process_group)

            def new_group() -> dist.ProcessGroup:
                made = dist.new_group(
                    members,
                    backend="gloo",
                    timeout=timedelta(seconds=timeout_secs),
                    use_local_synchronization=members is not None,  # other ranks do not come here
                )
                return cast("dist.ProcessGroup", made)

            self.group, self.front = new_group(), new_group()
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def is_coordinator(self) -> bool:
        """True on the rank that commits, lists and removes."""
        return self.rank == 0

    def agree(self, what: str, value: object = None, *, error: BaseException | None = None) -> None:
        """Go on only if no rank has an error and all have the same value (for example the step). (training
        thread, at any time)

        Raises:
            SwapCkptError: On every rank the same: the error of the first rank that has one, if all errors are
                of one kind; a CheckpointError that lists them, if they are not. An interrupt stays what it is
                on its own rank.
            CheckpointError: Ranks differ, or one is gone.
        """
        self._agree(self.front, what, value, error=error)

    def agree_in_save(self, what: str, *, error: BaseException | None) -> None:
        """As ``agree``, on the thread of a save."""
        self._agree(self.group, what, None, error=error)

    def _agree(
        self, group: dist.ProcessGroup | None, what: str, value: object, *, error: BaseException | None
    ) -> None:
        mine = _Said(value, _portable(error))
        said = [mine]
        if group is not None:
            answers: list[_Said | None] = [None] * self.world_size
            try:
                dist.all_gather_object(answers, mine, group=group)
            except RuntimeError as lost:  # gloo: connection closed by peer, or timed out
                raise self.lost(what, lost) from (error or lost)
            said = [answer for answer in answers if answer is not None]
        if error is not None and not isinstance(error, Exception):
            raise error
        errors = {rank: each.error for rank, each in enumerate(said) if each.error is not None}
        if errors:
            raise _first_or_all(what, errors) from error
        if any(each.value != value for each in said):
            differing = [f"rank {rank}: {each.value!r}" for rank, each in enumerate(said)]
            raise CheckpointError(f"{what}: ranks do not agree:{listing(differing)}")

    def from_coordinator(self, what: str, value: T, *, error: BaseException | None = None) -> T:
        """The coordinator's value, or its error raised on every rank."""
        box: list[object] = [_Said(value, _portable(error))]
        if self.front is not None:
            try:
                dist.broadcast_object_list(box, src=dist.get_global_rank(self.front, 0), group=self.front)
            except RuntimeError as lost:
                raise self.lost(what, lost) from (error or lost)
        (said,) = box
        assert isinstance(said, _Said)
        if said.error is not None:
            raise said.error from error
        return cast("T", said.value)

    @staticmethod
    def lost(what: str, error: BaseException) -> CheckpointError:
        """The error to raise when a collective call failed."""
        return CheckpointError(f"{what}: a rank is gone or does not answer in time ({error}).")

    @contextmanager
    def raising(self, what: str) -> Iterator[None]:
        """Around a call of DCP: raises its errors as ours, and the loss of a rank as such.

        Raises:
            SwapCkptError: As :meth:`agree` says.
        """
        try:
            yield
        except CheckpointException as failure:
            raise unwrapped(failure, what=what, rank=self.rank) from failure
        except RuntimeError as lost:
            if isinstance(lost, SwapCkptError):
                raise
            raise self.lost(what, lost) from lost

    def close(self, *, together: bool = True) -> None:
        """Leave: together, for a rank that goes while others still talk makes them fail; or at once."""
        front, self.front = self.front, None
        group, self.group = self.group, None
        if not dist.is_available() or not dist.is_initialized():
            return  # never was, or the job has left already
        if together and front is not None:
            with suppress(RuntimeError):  # a rank may be gone already; this one has nothing to say to it
                dist.barrier(front)
        for each in (front, group):
            if each is not None:
                dist.destroy_process_group(each)


def unwrapped(failure: CheckpointException, *, what: str, rank: int) -> BaseException:
    """What ``rank`` raises for an error of DCP, which is a BaseException and says of each rank what went
    wrong. An interrupt stays what it is on its own rank."""
    own, _ = failure.failures.get(rank, (None, None))
    if own is not None and not isinstance(own, Exception):
        return own
    errors = {rank: error for rank, (caught, _) in failure.failures.items() if (error := _portable(caught))}
    return _first_or_all(what, errors) if errors else CheckpointError(f"{what} failed: {failure}")


def _first_or_all(what: str, errors: Mapping[int, SwapCkptError]) -> SwapCkptError:
    first = errors[min(errors)]
    if all(type(error) is type(first) for error in errors.values()):
        return first
    return CheckpointError(f"{what} failed:{listing(f'rank {rank}: {errors[rank]}' for rank in errors)}")


def _portable(error: BaseException | None) -> SwapCkptError | None:
    """``error`` in a form that other processes can unpickle: ours have nothing but a message."""
    if error is None:
        return None
    if isinstance(error, SwapCkptError):
        return type(error)(str(error))
    return CheckpointError(f"{type(error).__name__}: {error}")
