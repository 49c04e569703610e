"""The wheel holds the package and nothing else, and works where the repository is not."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    (built,) = folder.iterdir()
    return built


def test_it_contains_only_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    inside = [name for name in names if name.startswith("swapckpt/")]
    assert {name.split("/")[0] for name in names} == {"swapckpt", "swapckpt-0.1.0.dist-info"}
    assert "swapckpt/py.typed" in inside
    assert {Path(name).suffix for name in inside} == {".py", ".typed"}
    assert set(inside) >= {str(path.relative_to(ROOT)) for path in (ROOT / "swapckpt").rglob("*.py")}


def test_it_imports_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = ["install", "--no-deps", "--quiet", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import swapckpt; print(swapckpt.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert Path(found.stdout.strip()) == site / "swapckpt" / "__init__.py"
