"""What swapckpt needs of a machine: versions, an accelerator, memory it can copy from, gloo."""

from __future__ import annotations

import importlib.metadata
import mmap
import platform
import resource
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from swapckpt.device import device_for
from swapckpt.errors import SwapCkptError
from swapckpt.report import format_nbytes
from swapckpt.tools.findings import ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapckpt.device import Device
    from swapckpt.tools.findings import Finding

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 14)
"""What is supported: older ones miss names, newer ones were never looked at."""
MIN_HOST_NBYTES = 4 << 30
_PROBE_NBYTES = 1 << 20
_TIMEOUT_SECS = 20.0


def look_at_machine() -> Iterator[Finding]:
    """Everything but the store."""
    yield from _versions()
    device = _accelerator()
    if device is None:
        yield ok("accelerator", "none that torch sees; swapping runs on the CPU device, to try and to test")
    else:
        count = torch.accelerator.device_count()
        yield ok("accelerator", f"{count} x {device.type}")
    yield _pinning(device)
    yield _locked_memory(device)
    yield _host_memory()
    yield from _gloo(device)


def _versions() -> Iterator[Finding]:
    own = _version_of("swapckpt") or "unknown (not installed)"
    yield ok("swapckpt", own)
    version = str(torch.__version__)
    base = version.partition("+")[0]
    found = tuple(int(part) for part in base.split(".")[:2])
    supported = f"{'.'.join(map(str, OLDEST_TORCH))} to {'.'.join(map(str, NEWEST_TORCH))}"
    if found < OLDEST_TORCH:
        yield problem("torch", version, f"swapckpt needs {supported}")
    elif found > NEWEST_TORCH:
        yield warning("torch", version, f"newer than what was checked, {supported}")
    else:
        yield ok("torch", version)
    npu = _version_of("torch_npu")  # not imported: it changes the process, and fails without its runtime
    if npu is not None:
        fits = npu.startswith(base)
        advice = f"install the torch_npu made for torch {base}"
        yield ok("torch_npu", f"{npu}, installed") if fits else warning("torch_npu", npu, advice)
    yield ok("python", platform.python_version())


def _version_of(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _pinning(accelerator: torch.device | None) -> Finding:
    """Try to make a little host memory usable for asynchronous copies, as mirrors are."""
    if accelerator is None:
        return ok("pinning", "not needed on the CPU device")
    try:
        device = device_for(accelerator, timeout_secs=_TIMEOUT_SECS)
        if _registers(device):
            return ok("pinning", "host memory can be registered with the device")
        if device.pinned_empty(_PROBE_NBYTES).is_pinned():
            return ok("pinning", "pinned memory can be allocated; registering is not possible here")
    except (SwapCkptError, OSError, RuntimeError) as error:
        return problem("pinning", f"failed: {error}", "check the driver and its memory limits")
    return warning(
        "pinning",
        "the device takes neither registered nor pinned memory",
        "copies will be slower and not run beside the update; check the driver",
    )


def _registers(device: Device) -> bool:
    slab = torch.frombuffer(mmap.mmap(-1, _PROBE_NBYTES), dtype=torch.uint8)
    unregister = device.register_host(slab)
    if unregister is None:
        return False
    unregister()
    return True


def _locked_memory(accelerator: torch.device | None) -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("ulimit -l", "unlimited")
    found = f"{format_nbytes(limit)} of locked memory"
    if accelerator is None:
        return ok("ulimit -l", f"{found}; of no consequence without an accelerator")
    return warning("ulimit -l", found, "some drivers count pinned mirrors: set it to unlimited")


def _host_memory() -> Finding:
    memory = psutil.virtual_memory()
    found = f"{format_nbytes(memory.available)} of {format_nbytes(memory.total)} available"
    if memory.available < MIN_HOST_NBYTES:
        return warning("host memory", found, "mirrors need as much as the optimizer state of all local ranks")
    return ok("host memory", found)


def _gloo(accelerator: torch.device | None) -> Iterator[Finding]:
    if not (dist.is_available() and dist.is_gloo_available()):
        yield problem(
            "gloo", "this torch has none", "saves of several ranks agree over gloo: use a build that has it"
        )
        return
    try:
        # Of this process alone: shows that gloo finds an address to listen on.
        store = dist.HashStore()
        dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=_TIMEOUT_SECS))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        yield problem("gloo", f"cannot listen: {reason}", "set GLOO_SOCKET_IFNAME to a network interface")
    else:
        yield ok("gloo", "works")
    kind = "npu" if accelerator is None else accelerator.type
    yield ok(
        "collective reads",
        "mirrors are CPU tensors: full_tensor() of one needs a CPU backend in its group",
        f"init_process_group('cpu:gloo,{kind}:...'); local reads need none",
    )
