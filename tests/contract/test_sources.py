"""The look-up itself: it follows imports, bases and conditions, and says no."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.contract import used
from tests.contract.sources import Sources

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES = {
    "lib/__init__.py": """
import lib.deep as deep_alias
from lib.deep import Child as Renamed, function
from .relative import *
from lib import circle
if True:
    conditional = 1
try:
    import fast
except ImportError:
    fallback = None
""",
    "lib/deep.py": """
from lib.base import Base
class Child(Base):
    attribute: int
    __slots__ = ["slot"]
    def __new__(cls, device=None, *, flag=False): ...
    def method(self, value):
        self.assigned = value
def function(first, /, second, *, third): ...
""",
    "lib/base.py": "class Base:\n    def inherited(self, argument): ...\n",
    "lib/relative.py": "starred = 1\n",
    "lib/circle.py": "from lib import nothing\n",
    "lib/compiled.pyi": "def stub() -> int: ...\n",
}
PRESENT = [
    "lib.deep",
    "lib.deep.Child",
    "lib.Renamed.method",
    "lib.Renamed.method(value)",
    "lib.Renamed.assigned",
    "lib.Renamed.attribute",
    "lib.Renamed.slot",
    "lib.Renamed.inherited(argument)",
    "lib.Renamed(device)",
    "lib.Renamed(flag)",
    "lib.function(first)",
    "lib.function(third)",
    "lib.deep_alias.function",
    "lib.starred",
    "lib.conditional",
    "lib.fallback",
    "lib.compiled.stub",
    "lib/base.py:inherited",
]
ABSENT = [
    "lib.nothing",
    "lib.circle.nothing",
    "lib.deep.Missing",
    "lib.Renamed.missing",
    "lib.Renamed.method(missing)",
    "lib.Renamed(missing)",
    "lib.function.attribute",
    "lib.function(missing)",
    "lib.starred.attribute",
    "lib.missing.stub",
    "missing",
    "lib/base.py:missing",
    "lib/missing.py:inherited",
]


@pytest.fixture(params=["folder", "wheel"])
def sources(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sources]:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    root = tmp_path
    if request.param == "wheel":
        root = tmp_path / "lib.whl"
        with zipfile.ZipFile(root, "w") as wheel:
            for path in FILES:
                wheel.write(tmp_path / path, path)
    opened = Sources(root)
    yield opened
    opened.close()


def test_names_are_found_where_they_are(sources: Sources) -> None:
    assert [name for name in PRESENT if not sources.has(name)] == []
    assert [name for name in ABSENT if sources.has(name)] == []


def test_used_names_are_followed_through_aliases() -> None:
    source = """
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as md
from elsewhere import thing
torch.accelerator.memory_allocated()
dist.get_rank().real
md.Metadata
thing.torch.no
x = torch.empty(3).sum
"""
    assert used.names_in(source) == {
        "torch.accelerator.memory_allocated",
        "torch.distributed.get_rank",
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.empty",
    }
