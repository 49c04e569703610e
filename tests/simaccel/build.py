"""Builds the simulated accelerator with g++, once per source, compiler flags and torch version."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "csrc"
_CACHE = Path(__file__).parents[2] / ".cache" / "simaccel"
_FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unused-parameter")


class BuildError(RuntimeError):
    """The simulated accelerator cannot be built here. Its tests fail with this; they are never skipped."""


def library() -> Path:
    """Path of the shared library, built first if needed: about 15 s. Several processes may call it at once.

    Raises:
        BuildError: There is no g++, or it refuses the sources.
    """
    built = _CACHE / f"libsimaccel-{_fingerprint()}.so"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(built)
    return built


def _fingerprint() -> str:
    digest = hashlib.sha256(repr((torch.__version__, _FLAGS)).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(target: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError(
            "The simulated accelerator is built with g++, and there is none in PATH. Install it (Debian and "
            "Ubuntu: apt install g++); these tests are not skipped without it."
        )
    torch_root = Path(torch.__file__).parent
    partial = target.with_suffix(f".{os.getpid()}.partial")
    command = [
        compiler,
        *_FLAGS,
        "-DAT_PER_OPERATOR_HEADERS",
        *("-isystem", str(torch_root / "include")),
        *("-isystem", str(torch_root / "include/torch/csrc/api/include")),
        str(_SOURCES / "simaccel.cpp"),
        *("-o", str(partial)),
        *(f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_root / 'lib'}"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BuildError(f"g++ failed on the simulated accelerator:\n{' '.join(command)}\n{done.stderr}")
    partial.replace(target)
