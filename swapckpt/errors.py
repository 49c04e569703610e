"""Every exception of swapckpt and what the caller can do about it.

Each class derives from :class:`SwapCkptError` and from the builtin a caller would expect, so that both
``except swapckpt.errors.SwapCkptError`` and ``except ValueError`` work. Messages say what failed, which
parameter (FQN), rank or path, what was expected and found, and what to do. Where several entries are wrong
all of them are listed, sorted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def listing(offenders: Iterable[str]) -> str:
    """Sorted, one line each: the form in which an error names all offenders."""
    return "".join(f"\n  - {line}" for line in sorted(offenders))


class SwapCkptError(Exception):
    """Base of all errors raised by swapckpt."""


class ConfigError(SwapCkptError, ValueError):
    """A setting is outside its range. Nothing was changed; correct the setting."""


class PlanError(SwapCkptError, ValueError):
    """Planning got inconsistent input (negative cost, overlapping regions). A bug in the caller."""


class AdoptionError(SwapCkptError, ValueError):
    """The optimizer cannot be adopted as it stands. It was left unchanged; the message says what to
    change."""


class UnsupportedOptimizerError(AdoptionError, TypeError):
    """The optimizer cannot be stepped batch by batch (LBFGS, SparseAdam, capturable, differentiable, ...)."""


class FqnError(SwapCkptError, KeyError):
    """A parameter has no name in the model, or two optimizers hold the same one."""

    __str__ = Exception.__str__  # KeyError prints its argument with repr, which hides line breaks


class RebindError(SwapCkptError, ValueError):
    """The map of replaced parameters does not fit the optimizers. All offenders are listed; nothing was
    changed."""


class PhaseError(SwapCkptError, RuntimeError):
    """The call is not legal now (for example ``state_dict()`` inside a step). Call it when the step is
    over."""


class StateFailedError(PhaseError):
    """An update, copy or load failed midway: parameters and state are torn. The first cause is chained.

    Restore parameters and optimizer together from a checkpoint inside ``with manager.recovery():``.
    """


class GradientError(SwapCkptError, ValueError):
    """Gradients this step cannot use (sparse, other device or dtype). Found before the first update:
    parameters and state are unchanged."""


class StepError(SwapCkptError, RuntimeError):
    """The step failed in the named batch; the original error is chained as ``__cause__``."""


class TransferError(SwapCkptError, RuntimeError):
    """A copy between device and host failed. The affected mirrors were not published."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A copy did not complete within the bound. The device may have dropped it: nothing was published."""


class LeaseTimeoutError(SwapCkptError, TimeoutError):
    """A snapshot kept a segment leased for longer than the bound while a step wanted to overwrite it.
    Nothing was overwritten; release the snapshot, or allow more spare memory."""


class ReplicaError(SwapCkptError, RuntimeError):
    """Ranks that share optimizer state (``shard_replicas=True``) could not finish something together: another
    one failed, ended or hung. Raised on every rank within ``timeout_secs``. The message says whether anything
    was updated."""


class HostMemoryError(SwapCkptError, MemoryError):
    """Host memory for mirrors could not be allocated. Nothing was adopted."""


class SchemaError(SwapCkptError, ValueError):
    """A state dict or checkpoint does not fit the optimizer: missing, unexpected, misshaped or wrongly typed
    entries, all listed. Nothing was loaded."""


class ShardError(SchemaError):
    """A plain tensor stands where a sharded parameter needs a DTensor (its placement would be lost)."""


# -------------------------------------------------------------------------------------------------- storage


class StorageError(SwapCkptError, OSError):
    """The store refused or lost an operation (after retries where it was transient). Older checkpoints are
    untouched and nothing new is visible; the store's own error is chained."""


class CheckpointExistsError(StorageError, FileExistsError):
    """The name is taken: by a committed checkpoint (pass ``overwrite=True``) or by other files."""


class CheckpointNotFoundError(StorageError, FileNotFoundError):
    """No committed checkpoint has this name. The message says what is there instead, if anything."""


class CorruptCheckpointError(SwapCkptError, ValueError):
    """The bytes contradict their checksums, sizes or format, are gone, or cannot be read any more. The
    message names file, item and FQN.

    Destinations may have been overwritten in part: load another checkpoint into them before use."""


class UnsafePickleError(SwapCkptError, ValueError):
    """A pickle asks for a global that is not on the allow list. Nothing of it was run."""


class ReleasedStorageError(SwapCkptError, RuntimeError):
    """A tensor to be saved has no memory behind it any more. Nothing of this save is visible."""


class CheckpointError(SwapCkptError, RuntimeError):
    """A save or load failed on a rank, a rank is gone, or ranks do not agree; the message says which.
    Checkpoints committed before are untouched and nothing new is visible. Save again, or restart the job."""


class SaveInProgressError(SwapCkptError, RuntimeError):
    """``save`` was called with ``on_busy="raise"`` while the save before it is still being written. Nothing
    was begun: call it later, or wait for the handle of the other save."""
