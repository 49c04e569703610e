"""``python -m benchmarks`` lists the benchmarks."""

from __future__ import annotations

import ast
from pathlib import Path


def main() -> None:
    print("python -m benchmarks.NAME [--quick] [--json FILE]\n")
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        description = ast.get_docstring(ast.parse(path.read_text())) or ""
        print(f"  {path.stem:<12}{description.splitlines()[0]}")


if __name__ == "__main__":
    main()
