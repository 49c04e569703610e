"""Every name of torch and torch_npu that swapckpt depends on exists in the releases it supports.

A new name fails here until ``python -m tests.contract.refresh`` has looked it up.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import swapckpt._torch
from tests.contract import used
from tests.contract.refresh import RELEASES, TABLE
from tests.contract.sources import Sources

MODULES = {"_compile", "_dtensor_spec", "_ops", "_python_dispatch"}  # the docstring lists what they contain
REFRESH = "look them up: python -m tests.contract.refresh"


def table() -> dict[str, dict[str, list[str]]]:
    return json.loads(TABLE.read_text())


def test_the_table_knows_every_used_name() -> None:
    known = {name for names in table()["names"].values() for name in names}
    assert used.used_names() - known == set(), REFRESH


@pytest.mark.parametrize(
    "release", [f"{name} {version}" for name, versions in RELEASES.items() for version in versions]
)
def test_every_used_name_exists_in(release: str) -> None:
    assert table()["absent"][release] == []


def test_every_used_name_exists_in_the_installed_torch() -> None:
    sources = Sources(Path(torch.__file__).parents[1])
    names = [name for name in used.used_names() if not name.startswith("torch_npu")]
    assert len(names) > 50
    assert [name for name in names if not sources.has(name)] == []


def test_the_list_of_private_names_is_the_code() -> None:
    """What ``swapckpt/_torch.py`` takes from torch, what its docstring lists and what is looked up."""
    assert used.private_names() == set(used.PRIVATE)
    modules = {
        name for name in used.PRIVATE if used.PRIVATE[name].rpartition(".")[2] == name and name in MODULES
    }
    listed = set(re.findall(r"\b_[A-Za-z]\w*", swapckpt._torch.__doc__ or ""))
    assert listed == set(used.PRIVATE) - modules


MODULES = {"_compile", "_dtensor_spec", "_ops", "_python_dispatch"}  # the docstring lists what they contain


def test_no_protocol_of_the_device_is_left_out() -> None:
    assert used.unplaced_protocols() == set()
    names = used.protocol_names()
    assert {"torch.cuda.Stream(device)", "torch_npu.npu.Event.query", "torch_npu.npu.npurt"} <= names
