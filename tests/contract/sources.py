"""Does a name exist in a release of torch? Answered from its sources, in a folder or a wheel, without running
them: releases that are not installed here, for machines that are not here, can be asked as well.
"""

from __future__ import annotations

import ast
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

# Names that a module takes over from compiled code at run time; their stubs list them.
_COMPILED = {"torch": ("torch._C", "torch._C._VariableFunctions")}


@dataclass(slots=True)
class _Module:
    """Top-level names of a module: definitions, and where imported ones come from."""

    defined: dict[str, ast.stmt] = field(default_factory=dict)
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # module, and the name in it
    stars: list[str] = field(default_factory=list)


class Sources:
    """The files of one release."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._wheel = zipfile.ZipFile(root) if root.suffix == ".whl" else None
        self._modules: dict[str, _Module | None] = {}

    def close(self) -> None:
        if self._wheel is not None:
            self._wheel.close()

    def read(self, path: str) -> bytes | None:
        """A file's bytes, None when there is none."""
        try:
            return self._wheel.read(path) if self._wheel is not None else (self._root / path).read_bytes()
        except (KeyError, FileNotFoundError, NotADirectoryError):
            return None

    def has(self, name: str) -> bool:
        """Whether ``name`` exists.

        It is one of ``torch.cuda.Stream`` (module, class, function, attribute of a class or its instances),
        ``torch.cuda.stream(stream)`` (that has this parameter), ``torch/optim/optimizer.py:word`` (a file in
        which the word occurs: names that compiled code or a function's attributes have).
        """
        path, _, word = name.partition(":")
        if word:
            return word.encode() in (self.read(path) or b"")
        dotted, _, parameter = name.rstrip(")").partition("(")
        first, *parts = dotted.split(".")
        return self._has(first, parts, parameter, frozenset())

    def _has(self, module: str, parts: list[str], parameter: str, seen: frozenset[tuple[str, str]]) -> bool:
        if not parts:
            return self._module(module) is not None
        name, *rest = parts
        if (module, name) in seen:  # packages import from each other in circles
            return False
        scope = self._module(module)
        node = scope.defined.get(name) if scope is not None else None
        if node is not None and self._defines(module, node, rest, parameter):
            return True
        seen |= {(module, name)}
        return any(
            self._has(source, path, parameter, seen) for source, path in self._elsewhere(module, name, rest)
        )

    def _elsewhere(self, module: str, name: str, rest: list[str]) -> Iterator[tuple[str, list[str]]]:
        """Other modules, and the path in them, that ``module.name.rest`` may stand for."""
        scope = self._module(module)
        if scope is not None and name in scope.imported:
            source, original = scope.imported[name]
            yield source, ([original, *rest] if original else rest)
        if scope is not None:
            yield from ((source, [name, *rest]) for source in scope.stars)
        yield from ((source, [name, *rest]) for source in _COMPILED.get(module, ()))
        yield f"{module}.{name}", rest

    def _defines(self, module: str, node: ast.stmt, rest: list[str], parameter: str) -> bool:
        if isinstance(node, ast.ClassDef):
            return self._class_has(module, node, rest, parameter)
        if rest:
            return False
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return not parameter or _takes(node, parameter)
        return not parameter

    def _class_has(self, module: str, node: ast.ClassDef, rest: list[str], parameter: str) -> bool:
        if not rest and not parameter:
            return True
        members = dict(_members(node))
        found = [members[name] for name in rest[:1] or ("__new__", "__init__") if name in members]
        if len(rest) <= 1 and any(not parameter or _takes(member, parameter) for member in found):
            return True
        bases = [ast.unparse(base).split(".") for base in node.bases]
        return any(self._has(module, [*base, *rest], parameter, frozenset()) for base in bases)

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> _Module | None:
        path = name.replace(".", "/")
        module: _Module | None = None
        for suffix in (".py", "/__init__.py", ".pyi", "/__init__.pyi"):
            text = self.read(path + suffix)
            if text is None:
                continue
            module = module if module is not None else _Module()
            package = name if suffix.startswith("/") else name.rpartition(".")[0]
            for statement in _statements(ast.parse(text).body):
                _note(module, statement, package)
        return module


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under conditions included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [each for handler in statement.handlers for each in handler.body]
            yield from _statements([*statement.body, *handlers, *statement.orelse])


def _note(module: _Module, statement: ast.stmt, package: str) -> None:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            if alias.asname:
                module.imported[alias.asname] = (alias.name, None)
            else:
                first = alias.name.partition(".")[0]
                module.imported[first] = (first, None)
    elif isinstance(statement, ast.ImportFrom):
        source = statement.module or ""
        if statement.level:
            parents = package.split(".")
            parents = parents[: len(parents) - statement.level + 1]
            source = ".".join([*parents, source] if source else parents)
        for alias in statement.names:
            if alias.name == "*":
                module.stars.append(source)
            else:
                module.imported[alias.asname or alias.name] = (source, alias.name)
    else:
        for name, node in _bound(statement):
            module.defined.setdefault(name, node)


def _bound(statement: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name, statement
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            for each in ast.walk(target):
                if isinstance(each, ast.Name):
                    yield each.id, statement
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id, statement


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """Attributes of a class, of its instances (``self.x = ...``) and of its slots; earlier ones win."""
    found: dict[str, ast.stmt] = {}
    for statement in _statements(node.body):
        for name, bound in _bound(statement):
            found.setdefault(name, bound)
            if name == "__slots__":
                for each in ast.walk(bound):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        found.setdefault(each.value, bound)
        if isinstance(statement, ast.FunctionDef):
            attributes = [each for each in ast.walk(statement) if isinstance(each, ast.Attribute)]
            for each in attributes:
                if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
                    found.setdefault(each.attr, statement)
    yield from found.items()


def _takes(node: ast.stmt, parameter: str) -> bool:
    """Whether it is a function with this parameter."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return parameter in {each.arg for each in arguments}
