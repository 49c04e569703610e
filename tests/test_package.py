"""What the package promises as a whole: its names are documented, and its plan needs no torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import swapckpt

PUBLIC = [getattr(swapckpt, name) for name in swapckpt.__all__]


def test_the_version_is_the_one_of_the_distribution() -> None:
    assert swapckpt.__version__ == metadata.version("swapckpt")


@pytest.mark.parametrize("thing", PUBLIC, ids=swapckpt.__all__)
def test_public_names_are_documented_down_to_their_methods(thing: object) -> None:
    members = inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else []
    ours = [(name, method) for name, method in members if method.__module__.startswith("swapckpt")]
    undocumented = [name for name, method in ours if not name.startswith("_") and not inspect.getdoc(method)]
    assert inspect.getdoc(thing)
    assert undocumented == []


def test_the_plan_loads_without_torch() -> None:
    # The package itself imports torch; a bare namespace in its place shows what the plan alone needs.
    package = Path(swapckpt.__file__).parent
    code = f"""
import sys, types
sys.modules["swapckpt"] = types.ModuleType("swapckpt")
sys.modules["swapckpt"].__path__ = [{str(package)!r}]
import swapckpt.plan
assert "torch" not in sys.modules, "the plan imports torch"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_swapping_needs_torch_and_numpy_alone() -> None:
    """As ``integration/device_check.py`` may run on a machine; the checkpoint service comes if asked for."""
    code = """
import sys
for name in ("fsspec", "tenacity", "zlib_ng", "zlib_ng.zlib_ng", "safetensors", "typer", "rich", "psutil"):
    sys.modules[name] = None
import swapckpt, torch
optimizer = swapckpt.swap_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2000))], momentum=0.9))
for name in list(sys.modules):
    if sys.modules[name] is None:
        del sys.modules[name]
from swapckpt import *
assert Checkpointer is swapckpt.Checkpointer
assert set(swapckpt.__all__) <= set(dir()), set(swapckpt.__all__) - set(dir())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
