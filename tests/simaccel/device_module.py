"""``torch.sim``, which ``torch.get_device_module("sim")`` returns: shaped like ``torch.cuda``."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Iterator

_Device: TypeAlias = torch.device | str | int | None


def _index(device: _Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    """A stream of the device, or with ``stream_id`` and the rest a handle to an existing one."""

    def __new__(cls, device: _Device = None, priority: int = 0, **existing: int) -> Self:
        if existing:
            return super().__new__(cls, **existing)
        return super().__new__(cls, device=torch.device("sim", _index(device)), priority=priority)


def Event(  # noqa: N802 - not a class: torch.Event.elapsed_time refuses subclasses
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> torch.Event:
    """An event of the device. ``elapsed_time`` is in virtual milliseconds."""
    return torch.Event("sim", enable_timing=enable_timing)


def _stream(other: torch.Stream) -> Stream:
    return Stream(stream_id=other.stream_id, device_index=other.device_index, device_type=other.device_type)


def current_stream(device: _Device = None) -> Stream:
    return _stream(torch.accelerator.current_stream(_index(device)))


def default_stream(device: _Device = None) -> Stream:
    device_type = torch.accelerator.current_stream().device_type
    return Stream(stream_id=0, device_index=_index(device), device_type=device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
    else:
        with stream:
            yield


StreamContext = stream


@contextlib.contextmanager
def device(device: _Device) -> Iterator[None]:
    previous = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(previous)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    count: int = torch.ops.simaccel.num_devices()
    return count


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_device_name(device: _Device = None) -> str:
    return "Simulated accelerator"


def get_device_properties(device: _Device = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=get_device_name(device), total_memory=mem_get_info(device)[1])


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def memory_stats(device: _Device = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


# Random numbers come from the CPU's generator.


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Nothing: ``torch.manual_seed``, which calls this, has seeded the CPU's generator."""


def manual_seed_all(seed: int) -> None:
    """Nothing: see ``manual_seed``."""


def initial_seed() -> int:
    return torch.initial_seed()
