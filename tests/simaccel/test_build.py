"""The library is built once per source, and what stands in the way is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.simaccel import build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    monkeypatch.setattr(build, "_SOURCES", tmp_path / "source")
    monkeypatch.setattr(build, "_CACHE", tmp_path / "cache")


def write(tmp_path: Path, source: str) -> None:
    (tmp_path / "source" / "simaccel.cpp").write_text(source)


def test_the_same_source_is_built_once_and_another_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "int answer() { return 42; }")
    first = build.library()
    assert first.exists()
    monkeypatch.setenv("PATH", "")  # nothing to build with
    assert build.library() == first
    write(tmp_path, "int answer() { return 43; }")
    with pytest.raises(build.BuildError, match=r"built with g\+\+, and there is none in PATH"):
        build.library()


def test_the_compilers_complaint_is_shown(tmp_path: Path) -> None:
    write(tmp_path, "#error unheard of")
    with pytest.raises(build.BuildError, match="unheard of"):
        build.library()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix in {".so", ".partial"}]
