"""``Checkpointer``: when a job's state is saved, where, and from which checkpoint it goes on.

[Note: threads] ``save`` captures on the training thread and leaves the rest to one background thread, which
talks to those of other ranks over a group of its own. One save is under way at a time. What the next step
must not change yet is fenced: mirrors by their leases, parameters by a hook in front of the optimizers'
steps.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from swapckpt.checkpointer.damage import Damage
from swapckpt.checkpointer.handle import SaveHandle, SaveStats
from swapckpt.checkpointer.loading import Loader, loadable_steps
from swapckpt.checkpointer.parts import ManagerPart, ModulePart, part_for
from swapckpt.checkpointer.planners import RankSavePlanner
from swapckpt.checkpointer.ranks import Ranks
from swapckpt.checkpointer.retention import retire
from swapckpt.checkpointer.staging import Staging
from swapckpt.collector import collector_paused
from swapckpt.config import AsyncMode, CheckpointConfig, require_bool, require_instance, require_int
from swapckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    PhaseError,
    SaveInProgressError,
    SwapCkptError,
    TransferError,
)
from swapckpt.memory import shared_memory
from swapckpt.storage import SwapStorageWriter, committed_steps, open_files, refuse_checkpoint
from swapckpt.storage.process import ProcessRunner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import BuiltinFunctionType, FunctionType, TracebackType

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from swapckpt.checkpointer.parts import Part

logger = logging.getLogger(__name__)

# Said by DCP at every call without a process group, which is a supported way to use it.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning
)


class Checkpointer:
    """Saves and loads everything a job needs to go on, in one folder of checkpoints named ``step-<n>``.

    A checkpoint is visible when it is complete and durable on all ranks, or not at all; it has the format of
    stock DCP. Use it as a context manager, or call ``close``.

    Call sequence (all ranks make each call, in the same order): 1. ``load``, once; 2. ``save`` between steps;
    3. ``close``. ``steps`` may be called by any rank alone.

    Args:
        folder: Path or URL (``s3://bucket/run``) that all ranks see.
        states: What to save by its name: modules, state managers, anything with ``state_dict`` and
            ``load_state_dict``, ``PerRank`` and ``RngState`` for what each rank has its own of, and plain
            values (the mapping is updated by a load).
        config: How; default ``CheckpointConfig()``.
        process_group: The ranks that save together; default all. They get a gloo group of their own.
        allowed_globals: Classes and functions that values in a checkpoint may name, beyond those of Python
            and torch that run no code.

    Raises:
        ConfigError: A state cannot be saved, or a setting does not fit.
        StorageError: Nothing installed speaks the folder's protocol.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        states: Mapping[str, object],
        config: CheckpointConfig | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        allowed_globals: Sequence[type | FunctionType | BuiltinFunctionType] = (),
    ) -> None:
        self.config = config if config is not None else CheckpointConfig()
        require_instance("config", self.config, CheckpointConfig)
        self.folder = _folder(folder)
        self._parts = _parts(states)
        self._files = open_files(
            self.folder,
            sync=self.config.sync_files,
            drop_page_cache=self.config.drop_page_cache_after_save,
        )
        self._staging = Staging(timeout_secs=self.config.timeout_secs)
        self._damage = Damage(self._files)
        self._planner = RankSavePlanner(self._parts, allowed_globals=allowed_globals)
        self.runner = self._runner_for(self.config.async_mode)
        self._writer = SwapStorageWriter(
            files=self._files,
            threads=self.config.threads,
            on_written=self._written,
            runner=self.runner,
        )
        self._managers = [part for part in self._parts.values() if isinstance(part, ManagerPart)]
        optimizers = [each for part in self._managers for each in part.manager.optimizers.values()]
        self._fences: list[RemovableHandle] = [
            *(each.register_step_pre_hook(self._before_step) for each in optimizers),
            *(each.register_step_post_hook(self._after_step) for each in optimizers),
        ]
        self._is_stepping = False
        self._handle: SaveHandle | None = None
        self._is_closed = False
        self._inside = threading.Lock()  # save() or load()
        self._pid = os.getpid()
        has_accelerator = torch.accelerator.is_available()
        self._device_index = torch.accelerator.current_device_index() if has_accelerator else None
        self._ranks = Ranks(process_group, timeout_secs=self.config.timeout_secs)
        self._loader = Loader(
            self._files,
            self.folder,
            self._parts,
            ranks=self._ranks,
            config=self.config,
            allowed_globals=allowed_globals,
        )
        _open_ones.add(self)

    def _runner_for(self, mode: AsyncMode | str) -> ProcessRunner | None:
        if mode is not AsyncMode.ASYNC_WITH_PINNED_MEM:
            return None
        if self._files.url.startswith("memory:"):
            raise ConfigError(
                f"{self._files.url} is memory of this process, which async_mode='async_with_pinned_mem' does "
                "not write from. Use async_mode='async'."
            )
        return ProcessRunner(shared_memory, timeout_secs=self.config.timeout_secs)

    # ------------------------------------------------------------------------------------------ saving

    def save(self, step: int, *, overwrite: bool = False) -> SaveHandle:
        """Save the present state as ``step-<step>``. (all ranks)

        Returns when no step of an optimizer from now on can reach the checkpoint; with
        ``async_mode="disabled"``, when it is committed. Before other code changes parameters in place
        (weights exchanged for their average, clipped, loaded), call ``fence``. A save that is still under way
        is waited for first (or refused, see ``CheckpointConfig.on_busy``).

        Args:
            step: The step that this state belongs to (>= 0).
            overwrite: Replace a committed checkpoint of this step, which stays readable until then.

        Raises:
            SaveInProgressError: ``on_busy="raise"``, and the save before is not done.
            CheckpointExistsError: The step is committed already, and ``load`` did not find it damaged; or
                another job commits it first (from the handle, unless ``disabled``).
            StateFailedError: A step failed midway: there is no state to save.
            CheckpointError: An earlier save failed and a rank has not asked for its result; or ranks save
                different steps. This one was not begun, on any rank.
            PhaseError: Another thread is inside ``save`` or ``load``.
        """
        require_int("step", step, minimum=0)
        require_bool("overwrite", overwrite)
        self._require_open("save")
        with self._entered("save"):
            return self._save(step, overwrite=overwrite)

    def _save(self, step: int, *, overwrite: bool) -> SaveHandle:
        begin = time.perf_counter()
        is_async = self.config.async_mode is not AsyncMode.DISABLED
        state_dict: dict[str, object] = {}
        error = self._settled(on_busy=self.config.on_busy)
        if error is None:
            try:
                state_dict = self._captured() if is_async else self._live()
            except BaseException as caught:  # noqa: BLE001 - raised on all ranks, by agree()
                error = caught
        try:
            # What one rank alone knows must not decide who begins: their saves would never meet again.
            self._ranks.agree("Saving", (step, overwrite), error=error)
        except BaseException:
            self._release()
            raise
        handle = SaveHandle(step)
        work = partial(self._work, step, state_dict, overwrite=overwrite)
        if is_async:
            self._handle = handle
            threading.Thread(target=handle.run, args=(work,), name=f"swapckpt-save-{step}").start()
        else:
            handle.run(work)
        handle.stalled_secs = time.perf_counter() - begin
        if handle is not self._handle:
            handle.result()
        return handle

    def fence(self) -> None:
        """Order what this thread does from now on behind the copies of the save that is under way.

        Steps do so by themselves. Other code that changes parameters in place calls it first: else the save
        fails where torch notices the change, and holds a part of it where torch does not (through ``.data``,
        NumPy). On the CPU this waits for the copies; on an accelerator its stream does.
        """
        self._staging.fence()

    def _live(self) -> dict[str, object]:
        return {name: part.live() for name, part in self._ordered()}

    def _captured(self) -> dict[str, object]:
        try:
            with collector_paused():
                state_dict = {name: part.captured(self._staging) for name, part in self._ordered()}
            self._staging.start()
        except BaseException:
            self._release()
            self._staging.reset()
            raise
        if self._is_stepping or not self._is_fenced():
            self._staging.fence()
        return state_dict

    def _before_step(self, *_: object) -> None:
        self._is_stepping = True  # hooks that run behind this one may save, and nothing else would fence them
        self._staging.fence()

    def _after_step(self, *_: object) -> None:
        self._is_stepping = False

    def _ordered(self) -> list[tuple[str, Part]]:
        """Managers first: the next step needs their mirrors back first."""
        return sorted(self._parts.items(), key=lambda item: not isinstance(item[1], ManagerPart))

    def _is_fenced(self) -> bool:
        """True when all parameters are changed by steps that this checkpointer has a hook on.

        Frozen ones of a model that is trained are changed by nobody; a module of nothing but frozen ones
        (an average of the weights) is, by other code.
        """
        stepped = {
            param
            for part in self._managers
            for optimizer in part.manager.optimizers.values()
            for group in optimizer.param_groups
            for param in group["params"]
        }
        modules = [part.module for part in self._parts.values() if isinstance(part, ModulePart)]
        for params in (list(module.parameters()) for module in modules):
            others = [param for param in params if param not in stepped]
            if len(others) == len(params) > 0 or any(param.requires_grad for param in others):
                return False
        return True

    def _release(self) -> None:
        for part in self._parts.values():
            part.release()

    def _written(self, tensor: Tensor) -> None:
        for part in self._managers:
            part.written(tensor)

    def _work(
        self,
        step: int,
        state_dict: dict[str, object],
        *,
        overwrite: bool,
    ) -> SaveStats:
        """Everything of a save behind the capture. (all ranks, on the thread of the save)"""
        what, begin = f"Saving step {step}", time.perf_counter()
        if self._device_index is not None:  # a new thread is on the first device
            torch.accelerator.set_device_index(self._device_index)
        try:
            self._ranks.agree_in_save(what, error=self._staging_error() or self._folder_error())
            staged_secs = time.perf_counter() - begin
            self._write(step, state_dict, overwrite=overwrite, what=what)
        except BaseException:
            if self._ranks.is_coordinator:
                self._writer.abandon()  # a disk that is full is not kept full by what nobody will finish
            raise
        finally:
            self._release()
        if self._ranks.is_coordinator:
            self._damage.replaced(step)
            retire(self._files, self.config, saved=step)
        if self.config.empty_cache_after_save and self._device_index is not None:
            torch.accelerator.empty_cache()
        write_secs = time.perf_counter() - begin - staged_secs
        return SaveStats(step, self._writer.written_nbytes, staged_secs, write_secs)

    def _staging_error(self) -> BaseException | None:
        try:
            self._staging.synchronize()
        except (TransferError, PhaseError) as error:
            return error
        return None

    def _folder_error(self) -> SwapCkptError | None:
        """What speaks against the folder itself. (coordinator; nothing elsewhere)"""
        try:
            if self._ranks.is_coordinator:
                refuse_checkpoint(self._files)
        except SwapCkptError as error:
            return error
        return None

    def _write(self, step: int, state_dict: dict[str, object], *, overwrite: bool, what: str) -> None:
        if self._ranks.is_coordinator:
            self._writer.overwrite = overwrite or self._damage.may_replace(step)
        with self._ranks.raising(what):
            dcp.save(
                state_dict,
                checkpoint_id=f"{self.folder}/step-{step}",
                storage_writer=self._writer,
                planner=self._planner,
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )

    # ------------------------------------------------------------------------------------------ waiting

    def wait(self) -> None:
        """Wait until the save that is under way is committed. Raises its failure."""
        if not self._is_closed:
            self._require_open("wait")
        error = self._settled(on_busy="wait")
        if error is not None:
            raise error

    def _settled(self, *, on_busy: str) -> BaseException | None:
        """What speaks against beginning something else, when the save before has been waited for."""
        handle = self._handle
        if handle is None:
            return None
        if on_busy == "raise" and not handle.done():
            return SaveInProgressError(
                f"Step {handle.step} is still being saved. Wait for it, or use on_busy='wait'."
            )
        handle.settle()
        self._handle = None
        return handle.unread_error()

    def steps(self) -> list[int]:
        """Steps that are committed in the folder, ascending. No communication."""
        return committed_steps(self._files)

    def close(self) -> None:
        """Wait for the save that is under way, leave the other ranks, and let go of the optimizers. (all
        ranks) Raises the failure of that save. Closing twice does nothing."""
        self._close(together=True)

    def _close(self, *, together: bool) -> None:
        if self._is_closed or self._is_forked:
            return
        self._is_closed = True
        _open_ones.discard(self)
        try:
            self.wait()
        finally:
            for fence in self._fences:
                fence.remove()
            if self.runner is not None:
                self.runner.close()
            self._ranks.close(together=together)

    def finish(self) -> None:
        """What is left to be done when the interpreter exits and nobody has called ``close``."""
        handle = self._handle
        if handle is None or self._is_forked:
            return
        if not handle.done():
            logger.warning(
                "The interpreter exits while step %d is being saved, which is waited for. Use the "
                "Checkpointer as a context manager, or call close().",
                handle.step,
            )
        handle.settle()
        error = handle.unread_error()
        if error is not None:
            logger.error("Saving step %d failed, and nobody has asked: %s", handle.step, error)

    @property
    def _is_forked(self) -> bool:
        return self._pid != os.getpid()

    def _require_open(self, action: str) -> None:
        if self._is_closed:
            raise ConfigError(f"Cannot {action}: this Checkpointer is closed. Make a new one.")
        if self._is_forked:
            raise PhaseError(
                f"Cannot {action} in a forked process: the Checkpointer, its threads and its groups are the "
                "parent's. Make a new one here, or start the process with spawn."
            )

    @contextmanager
    def _entered(self, action: str) -> Iterator[None]:
        """Two threads in here would wait for each other's ranks, and take each other's plans."""
        if not self._inside.acquire(blocking=False):
            raise PhaseError(
                f"Cannot {action}: another thread is inside save() or load() of this Checkpointer, or a "
                "state that is being saved or loaded calls it. Call both from the thread that trains."
            )
        try:
            yield
        finally:
            self._inside.release()

    def __enter__(self) -> Checkpointer:  # noqa: PYI034 - typing.Self is not in Python 3.10
        self._require_open("enter")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:  # the error inside is the one to see, and now: other ranks may not come to close for long
            self._close(together=False)
        except Exception:
            logger.exception("Closing the checkpointer after an error failed too.")

    # ------------------------------------------------------------------------------------------ loading

    def load(
        self,
        step: int | None = None,
        *,
        allow_partial: bool = False,
        allow_cast: bool = False,
        fallback: bool = False,
    ) -> int | None:
        """Load a checkpoint into all states. (all ranks)

        Compares it with the states first, and says everything that does not fit; then reads in place.
        An optimizer whose step failed is sound again when its model is loaded with it.

        Args:
            step: Which one; None for the newest that is committed.
            allow_partial: Leave what the checkpoint does not have as it is, and what it has more unread.
            allow_cast: Convert values where a dtype differs.
            fallback: When the newest checkpoint is damaged, load the next older one, whole.

        Returns:
            The step, or None when no checkpoint is committed (and ``step`` is None).

        Raises:
            CheckpointNotFoundError: There is no checkpoint of ``step``.
            SchemaError: It does not fit. Nothing was changed.
            CorruptCheckpointError: It is damaged, or has lost its metadata. What it was read into is torn:
                load another one. A later save of this step replaces it.
            ConfigError: The folder is a checkpoint itself.
            UnsafePickleError: It asks for code.
            PhaseError: Another thread is inside ``save`` or ``load``.
        """
        self._require_open("load")
        with self._entered("load"):
            return self._load(step, allow_partial=allow_partial, allow_cast=allow_cast, fallback=fallback)

    def _load(self, step: int | None, *, allow_partial: bool, allow_cast: bool, fallback: bool) -> int | None:
        asked = (step, allow_partial, allow_cast, fallback)
        self._ranks.agree("Loading", asked)
        if self._handle is not None:
            self._handle.settle()  # its failure stays for the next save, wait or close
        self._staging.fence()
        found: list[int] = []
        error: BaseException | None = None
        if self._ranks.is_coordinator:
            try:
                found = loadable_steps(self._files, step)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
        found = self._ranks.from_coordinator("Listing checkpoints", found, error=error)
        if step is not None:
            require_int("step", step, minimum=0)
            if step not in found:
                there = f"steps {', '.join(map(str, found))}" if found else "no checkpoint"
                raise CheckpointNotFoundError(
                    f"No checkpoint of step {step} in {self.folder}; it has {there}."
                )
            found = [each for each in found if each <= step]
        while found:
            newest = found.pop()
            try:
                self._loader.load(newest, allow_partial=allow_partial, allow_cast=allow_cast)
            except CorruptCheckpointError as damage:
                self._note_damage(newest, damage, older=found, fallback=fallback)
                continue
            return newest
        return None

    def _note_damage(
        self, step: int, damage: CorruptCheckpointError, *, older: Sequence[int], fallback: bool
    ) -> None:
        """Remember that a step is damaged, and raise unless an older one is to be loaded."""
        if self._ranks.is_coordinator:
            self._damage.found(step)
        if not older:
            raise damage
        if not fallback:
            raise CorruptCheckpointError(
                f"{damage}\nload(fallback=True) goes on with the next older one, step {older[-1]}."
            ) from damage
        logger.warning("Step %d is damaged, step %d is loaded: %s", step, older[-1], damage)


def _folder(folder: object) -> str:
    """The folder as a string without a slash at its end.

    Raises:
        ConfigError: It is no path or URL.
    """
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"folder must be a path or URL, for example 'runs/a', got {folder!r:.60}.")
    return path.rstrip("/") or "/"


_open_ones: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _finish_all() -> None:
    for checkpointer in list(_open_ones):
        checkpointer.finish()


# Not the public atexit: its functions run when thread pools refuse work already, in the middle of a save.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]  # noqa: SLF001


def _parts(states: Mapping[str, object]) -> dict[str, Part]:
    """One part for each state.

    Raises:
        ConfigError: ``states`` is no mapping of names to values, or a value cannot be saved.
    """
    require_instance("states", states, Mapping)
    names = cast("list[object]", list(states))  # whatever the caller passed
    wrong = [name for name in names if not isinstance(name, str) or not name or "." in name]
    if wrong:
        raise ConfigError(f"Names of states must be strings without dots, got {wrong!r}.")
    return {name: part_for(name, states) for name in states}
