"""The tests of this folder run with torch_npu on the simulated runtime, in a process of their own.

Without the wheel they are skipped, and say why; without g++ they fail.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from integration import npu
from integration.npu.build import BuildError
from integration.npu.wheel import UnavailableError
from tests.childprocess import INLINE, ChildProcess

_FOLDER = Path(__file__).parent


@functools.cache
def _process() -> ChildProcess | BuildError | UnavailableError:
    try:
        return ChildProcess(_FOLDER, npu.environment())
    except (BuildError, UnavailableError) as error:
        return error


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER in item.path.parents and INLINE not in os.environ:
            item.add_marker(pytest.mark.timeout(0))  # the limit holds in the process that runs the test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if INLINE in os.environ or _FOLDER not in item.path.parents:
        return None
    process = _process()
    return process.protocol(item) if isinstance(process, ChildProcess) else None  # the fixture says why not


def pytest_unconfigure() -> None:
    if _process.cache_info().currsize and isinstance(process := _process(), ChildProcess):
        process.close()


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    if INLINE in os.environ:
        npu.load()
        return
    problem = _process()
    if isinstance(problem, UnavailableError):
        pytest.skip(str(problem))
    assert isinstance(problem, BuildError)
    raise problem
