"""Opens whatever holds tensors by its path or URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapckpt.errors import ConfigError
from swapckpt.storage import open_checkpoint, open_files, split_url
from swapckpt.tools.archive import ArchiveContent
from swapckpt.tools.content import Selected
from swapckpt.tools.dcp import DcpContent
from swapckpt.tools.location import Kind, checkpoint_at, kind_of
from swapckpt.tools.safetensors import SafetensorsContent
from swapckpt.tools.safetensors_index import SUFFIX as INDEX
from swapckpt.tools.safetensors_index import IndexedContent

if TYPE_CHECKING:
    from swapckpt.storage.files import FileReader
    from swapckpt.tools.content import Content

ZIP_MAGIC = b"PK\x03\x04"


def open_content(url: str, *, prefix: str = "") -> Content:
    """The content of the checkpoint or file at ``url``, or what of it is below ``prefix``.

    Raises:
        CheckpointNotFoundError: There is nothing.
        ConfigError: It is a folder of checkpoints, a file of another kind, or has nothing below ``prefix``.
        CorruptCheckpointError: It is damaged.
        UnsafePickleError: It asks for code.
        StorageError: The store failed.
    """
    content = _open_file(url) if kind_of(url) is Kind.FILE else _open_checkpoint(url)
    if not prefix:
        return content
    try:
        return Selected(content, prefix)
    except ConfigError:
        content.close()
        raise


def _open_checkpoint(url: str) -> Content:
    location = checkpoint_at(url)
    return DcpContent(open_checkpoint(location.files, location.name))


def _open_file(url: str) -> Content:
    parent, name = split_url(url)
    files = open_files(parent)
    if name.endswith(INDEX):
        return IndexedContent(files, name, where=url)
    source = files.open(name)
    try:
        return _content(source, url)
    except BaseException:
        source.close()
        raise


def _content(source: FileReader, url: str) -> Content:
    head = bytearray(min(source.nbytes, 9))
    source.read_into(0, memoryview(head))
    if head.startswith(ZIP_MAGIC):
        return ArchiveContent(source, where=url)
    if url.endswith(".safetensors") or head[8:] == b"{":
        return SafetensorsContent(source, where=url)
    raise ConfigError(
        f"{url} is neither a file of torch.save (of torch 1.6 or later) nor one of safetensors."
    )
