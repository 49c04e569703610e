"""Tensors in several safetensors files, by the ``*.safetensors.index.json`` beside them that model hubs have.

The index maps each name to its file: ``{"metadata": {...}, "weight_map": {"lm_head.weight":
"model-00002-of-00002.safetensors", ...}}``. Its metadata (the size of all) says nothing that files do not.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from swapckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, listing
from swapckpt.storage.files import read_bytes
from swapckpt.storage.metadata import check_name
from swapckpt.tools.safetensors import SafetensorsContent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from swapckpt.storage.fetch import Box
    from swapckpt.storage.files import Files
    from swapckpt.tools.content import Path, TensorInfo

SUFFIX = ".safetensors.index.json"


class IndexedContent:
    """A :class:`~swapckpt.tools.content.Content`. Keeps every file open until it is closed.

    Args:
        files: The folder of the index.
        name: Of the index.
        where: Path or URL of the index, for messages.

    Raises:
        CheckpointNotFoundError: Files that it names are missing; all are listed.
        CorruptCheckpointError: It is no index, or a file lacks tensors that it has according to the index.
    """

    def __init__(self, files: Files, name: str, *, where: str) -> None:
        self.where = where
        names = _weight_map(files, name, where=where)
        folder = where.removesuffix(name)
        with ExitStack() as stack:
            contents = {
                file: SafetensorsContent(
                    stack.enter_context(closing(files.open(file))), where=f"{folder}{file}"
                )
                for file in _present(files, names, where=where)
            }
            absent = [
                f"{fqn}: not in {file}" for fqn, file in names.items() if fqn not in contents[file].tensors
            ]
            if absent:
                raise CorruptCheckpointError(f"{where} does not fit its files:{listing(absent)}")
            self._stack = stack.pop_all()
        self._contents = {fqn: contents[file] for fqn, file in names.items()}
        self.tensors: Mapping[str, TensorInfo] = {
            fqn: content.tensors[fqn] for fqn, content in self._contents.items()
        }
        self.paths: Mapping[str, Path] = {fqn: (fqn,) for fqn in self.tensors}

    def read(self, fqn: str, box: Box, target: Tensor) -> None:
        self._contents[fqn].read(fqn, box, target)

    def value(self, fqn: str) -> object:
        raise KeyError(fqn)  # there are tensors only

    def close(self) -> None:
        self._stack.close()


def _weight_map(files: Files, name: str, *, where: str) -> dict[str, str]:
    """The file of each tensor."""
    try:
        index = json.loads(read_bytes(files, name))
        names = index["weight_map"]
        for file in names.values():
            check_name(file)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{where} is no index of safetensors files: {error!r}.") from error
    return dict(names)


def _present(files: Files, names: Mapping[str, str], *, where: str) -> list[str]:
    wanted = sorted(set(names.values()))
    found = {entry.name for entry in files.entries("") if not entry.is_folder}
    missing = [file for file in wanted if file not in found]
    if missing:
        raise CheckpointNotFoundError(f"{where} names files that are not beside it:{listing(missing)}")
    return wanted
