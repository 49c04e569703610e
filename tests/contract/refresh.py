"""Looks up every used name in the supported releases: ``python -m tests.contract.refresh`` writes the table.

Run it after swapckpt has begun to use another name, or to add a release. It downloads wheels (500 MB) into a
cache, and never runs in CI. Wheels of torch for macOS have the same Python sources in a fifth of the size.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.contract.sources import Sources
from tests.contract.used import ROOT, used_names

TABLE = Path(__file__).with_name("names.json")
RELEASES = {
    "torch": ("2.11.0", "2.13.0", "2.14.0"),
    "torch_npu": ("2.11.0.post3", "2.13.0", "2.14.0"),
}
_PLATFORM = {"torch": "macosx_14_0_arm64", "torch_npu": "manylinux_2_28_x86_64"}
_CACHE = ROOT / ".cache" / "contract"


def refresh() -> dict[str, object]:
    """The table: used names by distribution, and for each release those that it does not have."""
    used = used_names()
    names = {each: sorted(name for name in used if _distribution(name) == each) for each in RELEASES}
    absent = {}
    for distribution, versions in RELEASES.items():
        for version in versions:
            sources = Sources(_wheel(distribution, version))
            absent[f"{distribution} {version}"] = [
                name for name in names[distribution] if not sources.has(name)
            ]
            sources.close()
    return {"names": names, "absent": absent}


def _distribution(name: str) -> str:
    return "torch_npu" if name.startswith("torch_npu") else "torch"


def _wheel(distribution: str, version: str) -> Path:
    pattern = f"{distribution}-{version}-*.whl"
    if not any(_CACHE.glob(pattern)):
        target = ["--platform", _PLATFORM[distribution], "--python-version", "3.11", "--dest", str(_CACHE)]
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", *target]
        subprocess.run([*download, f"{distribution}=={version}"], check=True)
    return next(_CACHE.glob(pattern))


if __name__ == "__main__":
    table = refresh()
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table["absent"], indent=1))
