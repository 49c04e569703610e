"""Builds the simulated CANN runtime with g++, once per source and compiler flags."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from integration.npu.wheel import CACHE

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++17", "-O1", "-g0", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread")
_LIBRARY = "libascendcl.so"
# One library under all names: the loader recognises the file and loads it once.
_OTHER_NAMES = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)


class BuildError(RuntimeError):
    """The runtime cannot be built here. Its tests fail with this; they are never skipped."""


def libraries() -> Path:
    """The folder to put on ``LD_LIBRARY_PATH``, built first if needed: about 5 s.

    Raises:
        BuildError: There is no g++, or it refuses the sources.
    """
    folder = CACHE / f"cann-{_fingerprint()}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _build(folder)
    return folder


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((_FLAGS, _OTHER_NAMES)).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(folder: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError(
            "The simulated CANN runtime is built with g++, and there is none in PATH. Install it (Debian and "
            "Ubuntu: apt install g++); these tests are not skipped without it."
        )
    partial = folder.with_suffix(f".{os.getpid()}.partial")
    partial.mkdir()
    output = ["-o", str(partial / _LIBRARY), f"-Wl,-soname,{_LIBRARY}"]
    command = [compiler, *_FLAGS, *output, str(_SOURCES / "runtime.cpp")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        shutil.rmtree(partial)
        raise BuildError(f"g++ failed on the simulated CANN runtime:\n{' '.join(command)}\n{done.stderr}")
    for name in _OTHER_NAMES:
        (partial / name).symlink_to(_LIBRARY)
    partial.rename(folder)
