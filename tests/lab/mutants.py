"""Mutants of the code that orders work: each lacks one wait, record, hold or lease check.

They are generated from the sources of the package, so that a wait added tomorrow is a mutant tomorrow. Every
call in ``ORDERING`` and every dependency of the step plan is dropped, one at a time.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PACKAGE = Path(__file__).parents[2] / "swapckpt"
MODULES = ("plan", "pipeline", "memory", "fence", "snapshot", "device.cpu")

ORDERING = {
    "_drain": "None",
    "_pass_gate": "None",
    "before_overwrite": "segment",
    "begin_read": "None",
    "come_to_rest": "None",
    "drop": "None",
    "end_read": "None",
    "force": "None",
    "hold": "None",
    "raise_if_failed": "None",
    "record": "_start_of({receiver})",
    "release": "None",
    "settle": "None",
    "synchronize": "None",
    "wait": "None",
    "wait_for": "True",
}
"""Calls that order work, by the name of the method, and what stands in place of one that is dropped."""

PRELUDE = '''
def _start_of(stream):
    """An event that covers nothing: what a forgotten record amounts to."""
    from swapckpt.device.cpu import CpuEvent, CpuStream
    from swapckpt.testing.checked import CheckedEvent, CheckedStream
    if isinstance(stream, CheckedStream):
        return CheckedEvent(_start_of(stream._inner), {}, stream._detector)
    return CpuEvent(stream, 0) if isinstance(stream, CpuStream) else stream.record()
'''


@dataclass(frozen=True)
class Mutant:
    """One source file with one ordering call dropped."""

    module: str
    line: int
    dropped: str
    source: str

    @property
    def name(self) -> str:
        """Stable under edits elsewhere: the function's text and not its line number."""
        return f"{self.module}: {self.dropped}"


def mutants() -> list[Mutant]:
    """All of them, in the order of the sources. Equal calls of one module are told apart by a number."""
    found: list[Mutant] = []
    for module in MODULES:
        path = PACKAGE / (module.replace(".", "/") + ".py")
        source = path.read_text()
        for line, dropped, mutated in _mutations(source):
            count = sum(each.module == module and each.dropped.split(" #")[0] == dropped for each in found)
            label = dropped if count == 0 else f"{dropped} #{count + 1}"
            found.append(Mutant(module, line, label, mutated))
    return found


def _mutations(source: str) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(source)
    owner = {
        node: function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if node not in owner:
            continue
        replacement = _replacement(node, owner[node])
        if replacement is not None:
            text = ast.get_source_segment(source, node) or ""
            label = f"{owner[node].name}(): {' '.join(text.split())}"
            yield node.lineno, label, _replaced(source, node, replacement)  # type: ignore[attr-defined]


def _replacement(node: ast.AST, function: ast.FunctionDef) -> str | None:
    """What stands in place of ``node`` in a mutant; None if it orders nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ORDERING:
        if _is_forwarding(node, function):
            return None
        return ORDERING[node.func.attr].format(receiver=ast.unparse(node.func.value))
    is_edge = isinstance(node, ast.Tuple) and function.name == "operations" and node.elts
    if is_edge and all(isinstance(each, ast.Tuple) for each in node.elts):  # type: ignore[attr-defined]
        return "()"
    return None


def _is_forwarding(node: ast.Call, function: ast.FunctionDef) -> bool:
    """A call that only names what it does: measuring, adopting, or a method of an unrelated class."""
    return function.name == "__exit__" or (
        isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "super()"
    )


def _replaced(source: str, node: ast.AST, replacement: str) -> str:
    lines = source.split("\n")
    assert isinstance(node, ast.expr)
    assert node.end_lineno is not None
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    body = [*lines[: node.lineno - 1], before + replacement + after, *lines[node.end_lineno :]]
    return "\n".join(body) + PRELUDE


class MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module of the package from the mutant's source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = f"swapckpt.{mutant.module}"

    def install(self) -> None:
        """Must come before the package is imported."""
        assert "swapckpt" not in sys.modules
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self._mutant.source, f"<mutant of {self._name}>", "exec")
        exec(code, module.__dict__)
