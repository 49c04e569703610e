"""Settings, frozen and validated when they are made: a wrong value never reaches the step."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

from swapckpt.errors import ConfigError


def require_instance(name: str, value: object, kind: type) -> None:
    """Raise ConfigError unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        msg = f"{name} must be a {kind.__module__}.{kind.__name__}, got {type(value).__name__} {value!r:.60}."
        raise ConfigError(msg)


def require_int(name: str, value: object, *, minimum: int) -> None:
    """Raise ConfigError unless ``value`` is an int (not a bool) of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        msg = f"{name} must be an integer >= {minimum}, got {value!r}."
        raise ConfigError(msg)


def require_bool(name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a bool (a string "false" from a config file is not)."""
    if not isinstance(value, bool):
        msg = f"{name} must be True or False, got {value!r}."
        raise ConfigError(msg)


def require_positive(name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        msg = f"{name} must be a positive finite number, got {value!r}."
        raise ConfigError(msg)


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``; the nearest one is suggested."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}.{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapConfig:
    """How an optimizer's state is swapped between host and device.

    Attributes:
        swap_times: Number of batches a step is divided into (>= 1; clamped to the number of parameters).
            More batches: less staging memory, more per-batch overhead.
        state_keys: State keys to swap (for example ``("exp_avg",)``), or None for every eligible tensor.
            A key that the optimizer does not create is an error at adoption.
        min_numel: State tensors with fewer local elements stay where torch put them (>= 0).
        split_oversized: Step a parameter that is larger than a batch in slices, so that it does not decide
            how large the staging buffers are. None: for the optimizers of torch that are known to update each
            element on its own; True: for whatever optimizer this is (you know that it does); False: never.
        min_slice_numel: No slice has fewer elements than this (>= 1).
        packed: Move one contiguous run per batch (True) or one copy per tensor (False).
        staging_buffers: Device buffers the batches travel through (>= 2). The device holds at most
            ``staging_buffers`` x the largest batch of state during a step.
        release_staging: Give the staging buffers back between steps, so that an idle optimizer holds no
            device memory. False keeps them allocated: a little faster, ``staging_buffers`` batches held.
        spare_nbytes: Host memory that offloads may be redirected into while a snapshot reads the mirrors
            (>= 0 bytes; None: twice the largest batch). 0 makes every such offload wait for the reader.
        master_weights: Keep an fp32 master of every bf16 or fp16 parameter, swapped with the other state.
            The optimizer steps the masters, with gradients cast to fp32, and the parameters get the rounded
            result. They are saved and loaded under the state key ``master``.
        gather_matrices: For ``torch.optim.Muon`` over parameters sharded by rows: gather each matrix on one
            of all ranks that hold it, step the whole of it there, and bring the result to the others. False
            leaves sharded matrices to torch's own DTensor step, whose result differs by rounding. No effect
            on other optimizers.
        timeout_secs: Bound of every wait (> 0): for a copy (then
            :class:`~swapckpt.errors.TransferTimeoutError`), for the reader of a snapshot (then
            :class:`~swapckpt.errors.LeaseTimeoutError`) and for other ranks (then
            :class:`~swapckpt.errors.ReplicaError`).
        shard_replicas: Keep the state of a replicated parameter (HSDP, DDP) on one of its replicas only, its
            owner, which steps it and sends the result to the others. Every rank of the job has to call
            ``step()`` together. Muon under HSDP steps as under FSDP on the ranks of one replica.
        replica_group_size: With ``shard_replicas``: how many replicas share one copy of the state (it has to
            divide their number), for example those of one node. None: all of them.
        replica_bucket_nbytes: With ``shard_replicas``: updated parameters travel in buffers of this size
            (>= 512 bytes). A step holds at most two of them on the device.

    Raises:
        ConfigError: A value is outside its range.
    """

    swap_times: int = 16
    state_keys: tuple[str, ...] | None = None
    min_numel: int = 1024
    split_oversized: bool | None = None
    min_slice_numel: int = 1 << 18
    packed: bool = True
    staging_buffers: int = 3
    release_staging: bool = True
    spare_nbytes: int | None = None
    master_weights: bool = False
    gather_matrices: bool = False
    timeout_secs: float = 600.0
    shard_replicas: bool = False
    replica_group_size: int | None = None
    replica_bucket_nbytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        require_int("swap_times", self.swap_times, minimum=1)
        require_int("min_numel", self.min_numel, minimum=0)
        require_int("staging_buffers", self.staging_buffers, minimum=2)
        require_int("min_slice_numel", self.min_slice_numel, minimum=1)
        if self.split_oversized is not None:
            require_bool("split_oversized", self.split_oversized)
        if self.spare_nbytes is not None:
            require_int("spare_nbytes", self.spare_nbytes, minimum=0)
        require_bool("packed", self.packed)
        require_bool("release_staging", self.release_staging)
        require_bool("master_weights", self.master_weights)
        require_bool("gather_matrices", self.gather_matrices)
        require_positive("timeout_secs", self.timeout_secs)
        self._validate_replicas()
        self._validate_state_keys()

    def _validate_replicas(self) -> None:
        require_bool("shard_replicas", self.shard_replicas)
        require_int("replica_bucket_nbytes", self.replica_bucket_nbytes, minimum=512)
        if self.replica_group_size is None:
            return
        require_int("replica_group_size", self.replica_group_size, minimum=1)
        if not self.shard_replicas:
            msg = f"replica_group_size={self.replica_group_size} has no effect without shard_replicas=True."
            raise ConfigError(msg)

    @property
    def smallest_slice_numel(self) -> int:
        """Elements: smaller state than ``min_numel`` would not be swapped."""
        return max(self.min_slice_numel, self.min_numel)

    def _validate_state_keys(self) -> None:
        keys = cast("object", self.state_keys)  # whatever the caller passed
        if keys is None:
            return
        # A lone string is a sequence of letters: the most likely mistake, and a silent one.
        if not isinstance(keys, Sequence) or isinstance(keys, str) or not all(map(_is_name, keys)):
            msg = f"state_keys must be None or a sequence of non-empty strings, got {keys!r}."
            raise ConfigError(msg)
        if not keys:
            msg = f"state_keys must be None (every eligible tensor) or name at least one key, got {keys!r}."
            raise ConfigError(msg)
        object.__setattr__(self, "state_keys", tuple(map(str, keys)))


def _is_name(key: object) -> bool:
    return isinstance(key, str) and bool(key)


class AsyncMode(Enum):
    """Who writes a checkpoint, while what."""

    DISABLED = "disabled"  # the training thread; nothing is copied, training waits
    ASYNC = "async"  # a thread of the trainer; parameters are staged in host memory
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"  # another process, out of memory that it shares


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """How a ``Checkpointer`` saves and loads.

    Attributes:
        async_mode: ``disabled``, ``async`` or ``async_with_pinned_mem`` (see :class:`AsyncMode`).
        sync_files: Wait until the device has what was written. False survives a crash of the job, not of the
            machine.
        drop_page_cache_after_save: Forget cached pages of what was written. Direct I/O leaves none.
        empty_cache_after_save: Give cached memory of the device's allocator back after each save.
        keep_latest: Remove all but this many of the newest checkpoints, after each save (>= 1; None keeps
        all). keep_every: Never remove those whose step is a multiple of this (>= 1).
        threads: Threads (and files) per rank, at most (>= 1).
        verify_on_load: Compare what is read with its checksums.
        on_busy: What ``save`` does while the save before is still being written: ``wait`` or ``raise``.
        timeout_secs: Bound of every wait for another rank, a copy or a writer (> 0). A save of which a rank
            is lost fails on the others within it.

    Raises:
        ConfigError: A value is outside its range.
    """

    async_mode: AsyncMode | str = AsyncMode.ASYNC
    sync_files: bool = True
    drop_page_cache_after_save: bool = False
    empty_cache_after_save: bool = True
    keep_latest: int | None = None
    keep_every: int | None = None
    threads: int = 4
    verify_on_load: bool = True
    on_busy: str = "wait"
    timeout_secs: float = 600.0

    def __post_init__(self) -> None:
        modes = [mode.value for mode in AsyncMode]
        mode = self.async_mode.value if isinstance(self.async_mode, AsyncMode) else self.async_mode
        require_choice("async_mode", mode, modes)
        object.__setattr__(self, "async_mode", AsyncMode(mode))
        for name in ("sync_files", "drop_page_cache_after_save", "empty_cache_after_save", "verify_on_load"):
            require_bool(name, getattr(self, name))
        for name in ("keep_latest", "keep_every"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), minimum=1)
        require_int("threads", self.threads, minimum=1)
        require_choice("on_busy", self.on_busy, ["wait", "raise"])
        require_positive("timeout_secs", self.timeout_secs)
