"""Every parallel layout under torchrun: swapped equals unswapped, and what one layout saves another loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.torchrun import torchrun

if TYPE_CHECKING:
    from pathlib import Path

HOLDERS = {"ddp": 4, "hsdp": 8}
"""Parameters x ranks that hold their state: 4 parameters, each (or each of 2 shards) on one of 2 replicas."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def four_ranks(checkpoints: Path) -> list[str]:
    arguments = ["fsdp2-tp", "hsdp", "--checkpoints", str(checkpoints)]
    return torchrun("layouts.py", *arguments, ranks=4).splitlines()


@pytest.fixture(scope="module")
def two_ranks(checkpoints: Path) -> list[str]:
    arguments = ["fsdp2", "fsdp2-muon", "ddp", "--checkpoints", str(checkpoints)]
    return torchrun("layouts.py", *arguments, ranks=2).splitlines()


def said(lines: list[str], who: str) -> list[str]:
    return [line.removeprefix(who) for line in lines if line.startswith(f"{who} ")]


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, "fsdp2"), (2, "fsdp2-muon"), (2, "ddp"), (4, "fsdp2-tp"), (4, "hsdp")]
)
def test_losses_and_digests_equal_those_without_swapping(
    request: pytest.FixtureRequest, ranks: int, layout: str
) -> None:
    lines = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    swapped = said(lines, f"{layout} swapped")
    assert [line.split()[1] for line in swapped] == ["1", "2", "3", "4"]
    assert swapped == said(lines, f"{layout} unswapped")
    if layout in HOLDERS:
        assert set(said(lines, f"{layout} holders")) == {
            f" {HOLDERS[layout]}"
        }  # before and after the restart


@pytest.mark.parametrize(("ranks", "layout"), [(2, "fsdp2"), (1, "plain")])
def test_another_mesh_loads_the_same_bits(
    checkpoints: Path, four_ranks: list[str], ranks: int, layout: str
) -> None:
    output = torchrun("layouts.py", layout, "--load", str(checkpoints / "hsdp"), ranks=ranks)
    *_, digest = said(four_ranks, "hsdp swapped")[-1].split()
    assert output.splitlines() == [f"{layout} loaded 4 {digest}"]
