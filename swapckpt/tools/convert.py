"""Copies checkpoints between formats, in memory for a piece of a tensor (into a checkpoint: one tensor)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch

from swapckpt.errors import CheckpointExistsError, ConfigError, SchemaError, listing
from swapckpt.storage import open_files, split_url
from swapckpt.tools import archive_writer, dcp_writer, safetensors
from swapckpt.tools.location import Kind, kind_of
from swapckpt.tools.values import holds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from swapckpt.storage.fetch import Box
    from swapckpt.storage.files import FileWriter
    from swapckpt.tools.content import Content, Path, TensorInfo


class Format(Enum):
    """What can be written."""

    CHECKPOINT = "a DCP checkpoint"
    TORCH = "a file of torch.save"
    SAFETENSORS = "a safetensors file"


SUFFIXES = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), Format.TORCH),
    ".safetensors": Format.SAFETENSORS,
}
"""By which a format is chosen; a checkpoint is what has none of them."""


def format_of(url: str) -> Format:
    """The format that the name of a target asks for."""
    return next((form for suffix, form in SUFFIXES.items() if url.endswith(suffix)), Format.CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written, and the names of the values that were left out."""

    form: Format
    num_tensors: int
    num_values: int
    nbytes: int
    dropped: list[str]


def convert(
    content: Content,
    target: str,
    *,
    overwrite: bool = False,
    drop_values: bool = False,
    on_progress: Callable[[int], None] = lambda _nbytes: None,
) -> Converted:
    """Write ``content`` to ``target``. Nothing is visible there until all of it is.

    Args:
        content: What to write.
        target: Path or URL; its suffix says the format, see :data:`SUFFIXES`.
        overwrite: Replace what is there.
        drop_values: Leave out values that the format cannot hold, instead of refusing.
        on_progress: Called with the bytes of each piece.

    Raises:
        SchemaError: The format cannot hold something, all of which is listed. Nothing was written.
        CheckpointExistsError: Something is there.
        CorruptCheckpointError, UnsafePickleError: Of ``content``.
        StorageError: A store failed.
    """
    form = format_of(target)
    dropped = _unkept(content, form)
    if dropped and not drop_values:
        raise SchemaError(
            f"{form.value[0].upper()}{form.value[1:]} cannot hold these values; --drop-values leaves them "
            f"out:{listing(f'{fqn}: {why}' for fqn, why in dropped.items())}"
        )
    kept = _Without(content, set(dropped)) if dropped else content
    if form is Format.CHECKPOINT:
        if not overwrite and kind_of(target) is Kind.CHECKPOINT:  # before planning, in words of this tool
            raise CheckpointExistsError(f"{target} is a checkpoint; --overwrite replaces it.")
        dcp_writer.write(kept, target, overwrite=overwrite, on_progress=on_progress)
    else:
        write = {Format.TORCH: archive_writer.write, Format.SAFETENSORS: safetensors.write}[form]
        _write_file(target, partial(write, kept, on_progress=on_progress), kept, overwrite=overwrite)
    num_tensors = len(kept.tensors)
    nbytes = sum(info.nbytes for info in kept.tensors.values())
    return Converted(form, num_tensors, len(kept.paths) - num_tensors, nbytes, sorted(dropped))


def _unkept(content: Content, form: Format) -> dict[str, str]:
    """Values that the format cannot hold, and why. Raises SchemaError for tensors."""
    if form is Format.CHECKPOINT:
        return {}
    if form is Format.SAFETENSORS:
        tensors, values = safetensors.unwritable(content)
        if tensors:
            raise SchemaError(f"safetensors has no such dtype:{listing(tensors)}")
        return values
    names = content.paths.keys() - content.tensors.keys()
    return {fqn: "has tensors in it" for fqn in names if holds(content.value(fqn), (torch.Tensor,))}


class _Without:
    """All of a content but some of its values."""

    def __init__(self, content: Content, dropped: set[str]) -> None:
        self._content = content
        self.where = content.where
        self.tensors: Mapping[str, TensorInfo] = content.tensors
        self.paths: Mapping[str, Path] = {
            fqn: path for fqn, path in content.paths.items() if fqn not in dropped
        }

    def read(self, fqn: str, box: Box, target: Tensor) -> None:
        self._content.read(fqn, box, target)

    def value(self, fqn: str) -> object:
        return self._content.value(fqn)

    def close(self) -> None: ...


def _write_file(url: str, write: Callable[[FileWriter], None], content: Content, *, overwrite: bool) -> None:
    """One new file, under another name until it is whole where files can be renamed."""
    kind = kind_of(url)
    if kind not in {Kind.FILE, Kind.NOTHING}:
        raise ConfigError(f"{url} is {kind.value}; the name of a file is needed.")
    if kind is Kind.FILE and not overwrite:
        raise CheckpointExistsError(f"{url} exists; --overwrite replaces it.")
    parent, name = split_url(url)
    files = open_files(parent)
    files.make_folder("")
    written = f".{name}.swapckpt-partial" if files.renames else name
    if files.renames:
        files.remove(written)  # of a conversion that was killed
    out = files.create(written, nbytes=sum(info.nbytes for info in content.tensors.values()))
    try:
        write(out)
        out.close()
    except BaseException:
        out.abort()
        raise
    if files.renames:
        files.rename(written, name)
        files.sync_folder("")
