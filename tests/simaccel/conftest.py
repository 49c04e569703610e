"""The tests of this folder run on the simulated accelerator, in a process of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import simaccel as sim
from tests.childprocess import INLINE, ChildProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = Path(__file__).parent
# Operators of process groups are replaced for device tensors, about which the dispatcher prints a warning.
_process = ChildProcess(_FOLDER, {"TORCH_CPP_LOG_LEVEL": "ERROR"})


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER not in item.path.parents or INLINE in os.environ:
            continue
        # One worker: starting the process takes seconds. Tests on ranks are in the group of ranks already.
        if isinstance(item, pytest.Function) and "run_ranks" not in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("simaccel"))
        item.add_marker(pytest.mark.timeout(0))  # the limit holds in the process that runs the test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    return _process.protocol(item)


def pytest_unconfigure() -> None:
    _process.close()


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    sim.load()
    sim.reset()
    yield
    sim.reset()
