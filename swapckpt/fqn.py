"""Fully qualified parameter names, clean of what wrappers add to the module path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes through which ``torch.compile``, activation checkpointing and FSDP1 hold the module they
wrap."""


def named_parameters(model: nn.Module) -> dict[Tensor, tuple[str, ...]]:
    """Every parameter of ``model`` with all its names, in module order.

    A tied parameter has several names; the first is the one it is saved under.
    """
    names: dict[Tensor, list[str]] = {}
    for name, parameter in _walk(model, ""):
        aliases = names.setdefault(parameter, [])
        if name not in aliases:
            aliases.append(name)
    return {parameter: tuple(aliases) for parameter, aliases in names.items()}


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield prefix + name, parameter
    wraps = isinstance(module, DistributedDataParallel | DataParallel)
    for name, child in _children(module):
        transparent = name in _TRANSPARENT or (wraps and name == "module")
        yield from _walk(child, prefix if transparent else f"{prefix}{name}.")


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Direct children under every name: ``named_children`` leaves out the second name of a shared module."""
    for name, child in module.named_modules(remove_duplicate=False):
        if name and "." not in name:
            yield name, child
