"""The published torch_npu on a simulated Ascend runtime: its host code is real, the device is not.

``csrc/runtime.cpp`` is the runtime, ``operators.py`` its kernels, ``wheel.py`` gets torch_npu. A process that
was started with ``environment()`` calls ``load()`` and has an NPU. The rest of this module is its control.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCRIPT_SECS = 150.0
_RUNTIME = "libascendcl.so"


def environment() -> dict[str, str]:
    """What a process needs in its environment to find torch_npu and the runtime.

    Raises:
        UnavailableError: The wheel cannot be had here.
        BuildError: The runtime cannot be built here.
    """
    from integration.npu import build, wheel

    return {
        "PYTHONPATH": os.pathsep.join([str(wheel.unpacked()), os.environ.get("PYTHONPATH", "")]),
        "LD_LIBRARY_PATH": os.pathsep.join([str(build.libraries()), os.environ.get("LD_LIBRARY_PATH", "")]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # load() does it, and shows its error
    }


def load() -> Any:
    """``torch.npu``, with an initialised device and operators that run. For good: once per process."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its sources are not free of them, which its user cannot help
        import torch_npu  # type: ignore[import-not-found]  # noqa: F401 - registers the device

    from integration.npu import operators

    module = torch.get_device_module("npu")
    module.current_device()  # operators may be replaced only after torch_npu has loaded its own
    operators.install()
    return module


def fail_copy(nth: int) -> None:
    """The runtime refuses the n-th copy between host and device from now on; 0 is none."""
    ctypes.CDLL(_RUNTIME).simulation_fail_copy(nth)


@contextmanager
def held_copies() -> Iterator[None]:
    """No asynchronous copy that is reached in the block is executed before its end."""
    hold = ctypes.CDLL(_RUNTIME).simulation_hold_copies
    hold(1)
    try:
        yield
    finally:
        hold(0)


def pinned_nbytes() -> int:
    """Host memory that the runtime has allocated as pinned or registered."""
    pinned = ctypes.CDLL(_RUNTIME).simulation_pinned_nbytes
    pinned.restype = ctypes.c_size_t
    return int(pinned())


def run_script(name: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """What ``integration/npu/scripts/<name>.py`` printed last, as JSON: in a process of its own.

    Raises:
        AssertionError: It failed, or hung.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"integration.npu.scripts.{name}", *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=_SCRIPT_SECS,
        check=False,
    )
    assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # torch_npu prints a warning before it
    return result
