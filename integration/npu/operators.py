"""Operators of the simulated NPU: the CPU's kernels, over the same bytes.

The simulated runtime has no kernels. Device memory is host memory there, so a replaced operator waits for the
current stream and runs torch's own CPU kernel on aliases of its arguments; whatever it creates is copied to
the device. An operator that is not replaced ends the process (see ``csrc/runtime.cpp``).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = (
    *("add_.Tensor", "addcdiv_", "addcmul_", "all", "cat", "div.Tensor", "eq.Scalar", "fill_.Scalar"),
    *("lerp_.Scalar", "mul_.Tensor", "sqrt", "zero_", "_foreach_add_.Scalar"),
    *("_foreach_addcdiv_.ScalarList", "_foreach_addcmul_.Scalar", "_foreach_div_.ScalarList"),
    *(
        "_foreach_lerp_.Scalar",
        "_foreach_maximum_.List",
        "_foreach_mul_.Scalar",
        "_foreach_sqrt",
        "_fused_adamw_",
    ),
)
"""What AdamW, the packing of small state and a load of live state use."""

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Replace the operators of ``NAMES``. Once per process; torch_npu must be loaded."""
    for name in NAMES:
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        _library.impl(name, _on_cpu(operator), "PrivateUse1", allow_override=True)


def _on_cpu(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        torch.get_device_module("npu").current_stream().synchronize()
        aliases: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the CPU, on the device

        def to_cpu(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
                return value
            aliases.append((_alias(value), value))
            return aliases[-1][0]

        def to_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found = [device for cpu, device in aliases if cpu is value]
            return found[0] if found else value.to("npu")

        result = operator(*_mapped(to_cpu, args), **_mapped(to_cpu, kwargs))
        return _mapped(to_device, result)

    return kernel


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same lists, tuples and dicts with their leaves changed."""
    if isinstance(tree, dict):
        return {key: _mapped(change, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(change, value) for value in tree)
    return change(tree)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the bytes of a tensor on the simulated device."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())
