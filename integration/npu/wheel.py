"""The published torch_npu wheel: downloaded and unpacked into a cache, never installed.

Installed without Ascend's runtime it would break ``import torch`` for everything else in the environment.
"""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

VERSION = "2.13.0"
CACHE = Path(__file__).parents[2] / ".cache" / "npu"


class UnavailableError(RuntimeError):
    """The wheel cannot be had here, through no fault of the code under test. The message says why."""


def unpacked() -> Path:
    """The folder to put on ``PYTHONPATH``. Several processes may call it at once.

    Raises:
        UnavailableError: Another torch is installed, a dependency is missing, or the download failed.
    """
    if torch.__version__.split(".")[:2] != VERSION.split(".")[:2]:
        raise UnavailableError(f"torch_npu {VERSION} needs torch {VERSION[:4]}, not {torch.__version__}")
    if importlib.util.find_spec("yaml") is None:
        raise UnavailableError("torch_npu imports yaml, which is not installed: pip install pyyaml")
    folder = CACHE / f"torch_npu-{VERSION}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = CACHE / "unpacking"
            shutil.rmtree(partial, ignore_errors=True)
            with zipfile.ZipFile(_downloaded()) as wheel:
                wheel.extractall(partial)
            partial.rename(folder)
    return folder


def _downloaded() -> Path:
    """The wheel for this Python and machine. A file put into the cache by hand is taken as it is."""
    wheels = CACHE / "wheels"
    pattern = f"torch_npu-{VERSION}-cp{sys.version_info.major}{sys.version_info.minor}-*.whl"
    if not any(wheels.glob(pattern)):
        where = ["--dest", str(wheels), "--no-deps", "--only-binary", ":all:", "--retries", "1"]
        download = [sys.executable, "-m", "pip", "download", *where, f"torch_npu=={VERSION}"]
        done = subprocess.run(download, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
            raise UnavailableError(f"torch_npu {VERSION} could not be downloaded: {reason[0]}")
    return next(wheels.glob(pattern))
