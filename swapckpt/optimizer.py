"""In-place adoption: the optimizer stays the same object of the same class family, and now it swaps."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from swapckpt._torch import (
    is_scheduler_wrapper,
    local_of,
    spec_of,
    track_step_calls,
    wrap_local,
)
from swapckpt.config import SwapConfig, require_instance
from swapckpt.device import device_for
from swapckpt.errors import (
    AdoptionError,
    ConfigError,
    SwapCkptError,
    listing,
)
from swapckpt.layouts import Incoming
from swapckpt.precision import is_low_precision
from swapckpt.statedict import SwappedState
from swapckpt.swap import Swap, load_into
from swapckpt.template import describe
from swapckpt.update import private_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

    from swapckpt.device import Device
    from swapckpt.fence import Gate


def guard_with(optimizer: Optimizer, gate: Gate) -> None:
    """Put another gate in front of the mirrors of an adopted optimizer."""
    swap = swap_of(optimizer)
    swap.gate = swap.pipeline.gate = gate
    swapped_state(optimizer).gate = gate


class SwapMixin(Optimizer):
    """Methods that adoption puts in front of the optimizer's own class."""

    _swap: Swap
    _swapped_state: SwappedState

    def step(self, closure: Callable[[], object] | None = None) -> object:  # type: ignore[override]
        """Perform one optimizer step: load, update and offload batch after batch.

        Returns when every mirror is written, so ``optimizer.state`` always shows real values.

        Raises:
            GradientError: Before the first update; nothing changed.
            StepError: The step failed in a batch; the message says whether anything was updated.
            StateFailedError: An earlier step failed and nothing was restored since.
        """
        return self._swap.step(self, self._swapped_state, closure)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group; its parameters become new batches with the next step.

        Raises:
            AdoptionError: The parameters are on another device than the others, or cannot be shared among
                replicas as ``shard_replicas=True`` asks for. The group is not added.
            ConfigError: ``replica_group_size`` does not fit them. The group is not added.
        """
        super().add_param_group(param_group)
        if "_swap" not in self.__dict__:
            return
        home = self._swap.device.device
        devices = {param.device for param in self.param_groups[-1]["params"]} - {home}
        if devices:
            self.param_groups.pop()
            msg = f"The new parameters are on {sorted(map(str, devices))}, the optimizer's are on {home}."
            raise AdoptionError(msg)
        try:
            self._swap.sync_params(self)
        except SwapCkptError:
            self.param_groups.pop()
            raise

    def register_load_state_dict_pre_hook(
        self,
        hook: Callable[[Optimizer, dict[str, object]], dict[str, object] | None],
        prepend: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> RemovableHandle:
        """As torch's. Every hook sees the whole state dict."""
        handle = super().register_load_state_dict_pre_hook(hook, prepend)
        _hook_loads(self)
        return handle

    def register_load_state_dict_post_hook(
        self,
        hook: Callable[[Optimizer], None],
        prepend: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> RemovableHandle:
        """As torch's. Every hook sees the loaded state."""
        handle = super().register_load_state_dict_post_hook(hook, prepend)
        _hook_loads(self)
        return handle

    def __reduce__(self) -> tuple[object, ...]:
        # A class made at run time has no importable name: pickle the original class and adopt again.
        swap = self._swap
        swap.require_idle("copy or pickle the optimizer")
        _require_whole(self, "copied or pickled")
        self._swapped_state.settle_templates()
        mirrored = {param: entry.tensors for param, entry in swap.table.entries.items()}
        state = {
            "defaults": self.defaults,
            "state": defaultdict(  # as torch makes it: steps rely on state that appears when asked for
                dict,
                {param: _detached(values, mirrored.get(param, {})) for param, values in self.state.items()},
            ),
            "param_groups": [_detached(group, {"params"}) for group in self.param_groups],
        }
        names = {param: name for param, (name, *_) in swap.names.items() if param in swap.table.entries}
        return _readopt, (swap.original_class, swap.config, names, state)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        del protocol
        return self.__reduce__()


def _detached(values: Mapping[str, object], shared: Container[str]) -> dict[str, object]:
    """A copy that shares only the tensors under ``shared``: adoption copies mirrors, and nothing else."""
    return {key: value if key in shared else private_copy(value) for key, value in values.items()}


def _readopt(
    cls: type[Optimizer], config: SwapConfig, names: dict[Tensor, str], state: dict[str, object]
) -> Optimizer:
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    return swap_optimizer(optimizer, config, names=names)


_SWAPPED_CLASSES: dict[type[Optimizer], type[SwapMixin]] = {}


def _swapped_class(cls: type[Optimizer]) -> type[SwapMixin]:
    """``SwapAdamW(SwapMixin, AdamW)`` for ``AdamW``, with torch's hook wrapper around the new ``step``."""
    swapped = _SWAPPED_CLASSES.get(cls)
    if swapped is None:
        step = Optimizer.profile_hook_step(SwapMixin.step)
        step.hooked = True  # type: ignore[attr-defined] # torch's own mark: it must not wrap the step again
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "step": step}
        swapped = type(f"Swap{cls.__name__}", (SwapMixin, cls), namespace)
        _SWAPPED_CLASSES[cls] = swapped
    return swapped


def is_swapped(optimizer: Optimizer) -> bool:
    """True for an optimizer that ``swap_optimizer`` has adopted."""
    return isinstance(optimizer, SwapMixin)


def swap_of(optimizer: Optimizer) -> Swap:
    """The swap of an adopted optimizer.

    Raises:
        AdoptionError: The optimizer is not adopted.
    """
    if not isinstance(optimizer, SwapMixin):
        msg = (
            f"This {type(optimizer).__name__} is not swapped. Call swapckpt.swap_optimizer(optimizer) first."
        )
        raise AdoptionError(msg)
    return optimizer._swap  # noqa: SLF001 - declared by our own mixin


def swapped_state(optimizer: Optimizer) -> SwappedState:
    """The state view of an adopted optimizer."""
    swap_of(optimizer)
    assert isinstance(optimizer, SwapMixin)
    return optimizer._swapped_state  # noqa: SLF001 - declared by our own mixin


def swap_optimizer(
    optimizer: Optimizer,
    config: SwapConfig | None = None,
    *,
    device: Device | None = None,
    names: Mapping[Tensor, str] | None = None,
    replica_groups: Mapping[Tensor, ProcessGroup] | None = None,
) -> Optimizer:
    """Adopt ``optimizer`` in place: from now on its state lives on the host and ``step()`` swaps it.

    The object keeps its identity, ``isinstance`` relations, groups, hooks, schedulers and ``GradScaler``
    attributes. State that exists already is moved to the host. With ``shard_replicas=True`` the state of
    parameters that other ranks own is dropped.

    Args:
        optimizer: Any per-parameter ``torch.optim`` optimizer.
        config: How to swap; default ``SwapConfig()``.
        device: The device to swap through; default the one the parameters are on.
        names: Names of parameters for messages and export; default those of ``named_parameters`` groups.
        replica_groups: With ``shard_replicas=True``: the process group over which a parameter is replicated,
            beside the replicate dimensions of its mesh. A ``StateManager`` finds those of DDP modules.

    Returns:
        The same object.

    Raises:
        AdoptionError: The optimizer is adopted already, its parameters are spread over devices, its ``step``
            is wrapped in a way that would bypass swapping, or masters are wanted where there is
            low-precision state. It is left unchanged.
        UnsupportedOptimizerError: The optimizer cannot be stepped in batches.
        ConfigError: ``state_keys`` names a key that the optimizer does not create, or
            ``replica_group_size`` does not divide the number of replicas.
    """
    adopt(optimizer, config, device=device, names=names, replica_groups=replica_groups)
    drop_elsewhere(optimizer)
    return optimizer


def adopt(
    optimizer: Optimizer,
    config: SwapConfig | None,
    *,
    device: Device | None,
    names: Mapping[Tensor, str] | None = None,
    replica_groups: Mapping[Tensor, ProcessGroup] | None = None,
) -> None:
    """As ``swap_optimizer``, but ``abandon`` can still undo it: no state has been dropped."""
    config = config if config is not None else SwapConfig()
    require_instance("optimizer", optimizer, Optimizer)
    require_instance("config", config, SwapConfig)
    _refuse(optimizer)
    torch_device = _common_device(optimizer)
    device = device if device is not None else device_for(torch_device, timeout_secs=config.timeout_secs)
    swap = Swap(optimizer, config, device=device, names=names or {}, replica_groups=replica_groups or {})
    if config.state_keys is not None:
        _check_state_keys(optimizer, swap)
    scheduled = "step" in optimizer.__dict__
    swap.sync_params(optimizer)
    if config.master_weights:
        _refuse_low_precision_state(optimizer, swap)
    swap.offload_existing(optimizer)
    optimizer.__class__ = _swapped_class(type(optimizer))
    assert isinstance(optimizer, SwapMixin)
    optimizer._swap = swap  # noqa: SLF001 - declared by our own mixin
    optimizer._swapped_state = SwappedState(  # noqa: SLF001
        optimizer,
        swap.original_step,
        names=swap.names,
        table=swap.table,
        config=config,
        gate=swap.gate,
    )
    if scheduled:
        optimizer.step = track_step_calls(optimizer)  # type: ignore[method-assign]
    swap.hooks = [optimizer.register_state_dict_pre_hook(_refuse_export)]
    _hook_loads(optimizer)
    try:
        _probe(optimizer)
    except AdoptionError:
        abandon(optimizer)
        raise


def drop_elsewhere(optimizer: Optimizer) -> None:
    """Give up state of parameters that other ranks own, from before the adoption."""
    view, sharing = swapped_state(optimizer), swap_of(optimizer).sharing
    for _, param in view.elsewhere():
        optimizer.state.pop(param, None)
    if sharing is None or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    if not any(sharing.replicas.owner_of(param) for _, param in view.everything()):
        msg = (
            "shard_replicas=True has no effect: no parameter is placed Replicate on a mesh or is in a DDP "
            "module, so every rank keeps and steps the state of all its parameters."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


def _require_whole(optimizer: Optimizer, action: str) -> None:
    elsewhere = sum(1 for _ in swapped_state(optimizer).elsewhere())
    if elsewhere:
        msg = (
            f"This optimizer cannot be {action}: the state of {elsewhere} of its parameters is on other "
            "ranks (shard_replicas=True). Save a checkpoint and load it into a new optimizer."
        )
        raise AdoptionError(msg)


def _refuse(optimizer: Optimizer) -> None:
    if is_swapped(optimizer):
        msg = f"This {type(optimizer).__name__} is adopted already. Call swapckpt.release(optimizer) first."
        raise AdoptionError(msg)
    wrapper = optimizer.__dict__.get("step")
    if wrapper is not None and not is_scheduler_wrapper(wrapper):
        msg = (
            f"optimizer.step was replaced on this instance by {wrapper!r}, which would bypass swapping. "
            "Adopt the optimizer before wrapping its step."
        )
        raise AdoptionError(msg)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(set(params)) != len(params):
        msg = "A parameter appears more than once in param_groups. List each parameter once."
        raise AdoptionError(msg)


def _common_device(optimizer: Optimizer) -> torch.device:
    devices = {param.device for group in optimizer.param_groups for param in group["params"]}
    if len(devices) > 1:
        msg = (
            f"The parameters are on {sorted(map(str, devices))}; one optimizer is swapped through one device."
        )
        raise AdoptionError(msg)
    device = devices.pop() if devices else torch.device("cpu")
    if device.type == "meta":
        msg = "The parameters are on the meta device. Materialise them (model.to_empty) before adopting."
        raise AdoptionError(msg)
    return device


def _check_state_keys(optimizer: Optimizer, swap: Swap) -> None:
    params = [
        (index, param) for index, group in enumerate(optimizer.param_groups) for param in group["params"]
    ]
    existing = {key for values in optimizer.state.values() for key in values}
    masters = swap.config.master_weights
    described = {} if existing else describe(optimizer, swap.original_step, params, master_weights=masters)
    known = existing | {key for templates in described.values() for key in templates}
    unknown = sorted(set(swap.config.state_keys or ()) - known)
    if unknown:
        msg = (
            f"state_keys names {unknown}, which {swap.original_class.__name__} does not create with these "
            f"settings. It creates {sorted(known)}."
        )
        raise ConfigError(msg)


def _refuse_low_precision_state(optimizer: Optimizer, swap: Swap) -> None:
    """A master cannot be stepped with state that was made for the parameter it stands for."""
    offenders = [
        f"{entry.name}.{key}: {value.dtype}"
        for entry in swap.table.entries.values()
        for key, value in optimizer.state.get(entry.param, {}).items()
        if entry.has_master and isinstance(value, torch.Tensor) and value.dim() > 0
        if is_low_precision(value)
    ]
    if offenders:
        msg = (
            "master_weights=True needs fp32 state, but this optimizer has stepped its low-precision "
            f"parameters already. Adopt it before its first step, or load fp32 state.{listing(offenders)}"
        )
        raise AdoptionError(msg)


def _probe(optimizer: Optimizer) -> None:
    """Make sure that ``optimizer.step()`` reaches the mixin, whatever wraps it."""
    if inspect.unwrap(optimizer.step) is not SwapMixin.step:
        msg = f"optimizer.step is {optimizer.step!r} after adoption and would bypass swapping."
        raise AdoptionError(msg)


def release(optimizer: Optimizer) -> Optimizer:
    """Undo ``swap_optimizer``: state moves back to the parameters' device, the class is the original one.

    Raises:
        AdoptionError: The optimizer is not adopted, or a part of its state is on other ranks.
        PhaseError: A step is running, or an earlier one failed.
    """
    swap_of(optimizer).require_idle("release the optimizer")
    _require_whole(optimizer, "released")
    return abandon(optimizer)


def abandon(optimizer: Optimizer) -> Optimizer:
    """As ``release``, for an adoption of which nothing has come yet."""
    swap = swap_of(optimizer)
    swapped_state(optimizer).settle_templates()
    swapped_state(optimizer).follow()
    scheduled = "step" in optimizer.__dict__
    for entry in swap.table.entries.values():
        values = optimizer.state.get(entry.param, {})
        for key, tensor in entry.tensors.items():
            values[key] = _on_device(tensor.mirror, swap.device.device)
    for hook in (*swap.hooks, *swap.load_hooks):
        hook.remove()
    del optimizer.__dict__["_swap"], optimizer.__dict__["_swapped_state"]
    optimizer.__class__ = swap.original_class
    if scheduled:
        optimizer.step = track_step_calls(optimizer)  # type: ignore[method-assign, assignment]
    return optimizer


def _on_device(value: Tensor, device: torch.device) -> Tensor:
    local = local_of(value)
    copy = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=device)
    return wrap_local(copy.copy_(local), spec_of(value))


@contextmanager
def recovery(*optimizers: Optimizer) -> Iterator[None]:
    """Let failed optimizers be loaded. Restore parameters and optimizer state together inside.

    Leaving the block normally makes every optimizer IDLE that was loaded inside; one that was not stays
    FAILED. Leaving it by an exception changes nothing.

    Raises:
        TransferTimeoutError: On entering: a copy that was given up is still running.
    """
    swaps = [swap_of(optimizer) for optimizer in optimizers]
    for swap in swaps:
        if swap.failure is not None:  # before anything is read: a late copy would land on what DCP has loaded
            swap.device.reset()
    for swap in swaps:
        swap.recovering = True
    try:
        yield
    finally:
        for swap in swaps:
            swap.recovering = False


# ------------------------------------------------- torch's own load_state_dict and state_dict


def _hook_loads(optimizer: Optimizer) -> None:
    """Be last before torch loads and first after it, so that hooks of others see whole state."""
    swap = swap_of(optimizer)
    for hook in swap.load_hooks:
        hook.remove()
    swap.load_hooks = [
        Optimizer.register_load_state_dict_pre_hook(optimizer, _strip),
        Optimizer.register_load_state_dict_post_hook(optimizer, _restore, prepend=True),
    ]


def _strip(optimizer: Optimizer, state_dict: dict[str, object]) -> dict[str, object]:
    """Keep state away from torch, which would cast it to the parameters' dtype and move it to the device."""
    swap = swap_of(optimizer)
    swap.require_idle("load a state dict")
    swap.require_own_mirrors("load a state dict")
    swap.sync_params(optimizer)
    swap.incoming = Incoming.from_positions(state_dict, swapped_state(optimizer))
    swap.incoming.check(allow_missing=True)
    return {**state_dict, "state": {}}


def _restore(optimizer: Optimizer) -> None:
    swap = swap_of(optimizer)
    incoming, swap.incoming = swap.incoming, None
    if incoming is not None:
        load_into([swap], incoming.restore)


def _refuse_export(optimizer: Optimizer) -> None:
    swap_of(optimizer).require_readable("export state")
