"""Which names of torch and torch_npu swapckpt uses, read from its own sources."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "swapckpt"
DEVICE_CHECK = ROOT / "integration" / "device_check.py"

PRIVATE = {
    "_StorageInfo": "torch.distributed.checkpoint.filesystem._StorageInfo",
    "_MEM_FORMAT_ENCODING": "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "_compile": "torch._compile",
    "_disable_dynamo": "torch._compile._disable_dynamo",
    "_foreach_copy_": "torch._foreach_copy_",
    "_dtensor_spec": "torch.distributed.tensor._dtensor_spec",
    "_local_tensor": "torch.distributed.tensor.DTensor._local_tensor",
    "_spec": "torch.distributed.tensor.DTensor._spec",
    "_version": "torch.Tensor._version",
    "_ops": "torch._ops",
    "_schema": "torch._ops.OpOverload._schema",
    "_optimizer_step_pre_hooks": "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks": "torch.optim.Optimizer._optimizer_step_post_hooks",
    "_wrapped_by_lr_sched": "torch/optim/lr_scheduler.py:_wrapped_by_lr_sched",
    "_opt_called": "torch/optim/lr_scheduler.py:_opt_called",
    "_init_optim_state": "torch.distributed.checkpoint.state_dict._init_optim_state",
    "_python_dispatch": "torch.utils._python_dispatch",
}
"""Where each private name of ``swapckpt/_torch.py`` stands in torch."""

# Protocols of swapckpt/device/accelerator.py, and the places that have to offer what they ask for.
_MODULES = ("torch.cuda", "torch_npu.npu")
_PROTOCOLS = {
    "DeviceModule": _MODULES,
    "CapturingModule": _MODULES,
    "NativeStream": tuple(f"{module}.Stream" for module in _MODULES),
    "NativeEvent": tuple(f"{module}.Event" for module in _MODULES),
    "NpuModule": ("torch_npu.npu",),
}
_NPU_RUNTIME = "torch_npu/lib/libtorch_npu.so"  # its methods are compiled
_CUDA_RUNTIME = "torch/cuda/_pin_memory_utils.py"  # compiled as well; torch itself calls them here


def used_names() -> set[str]:
    """In the notation of ``Sources.has``: of devices, of distributed code and private ones. Others (tensors,
    ``torch.nn``, public optimizers) are as old as torch."""
    names = set(PRIVATE.values()) | protocol_names() | {f"{_CUDA_RUNTIME}:{name}" for name in cuda_runtime()}
    for path in [*PACKAGE.rglob("*.py"), DEVICE_CHECK]:
        names |= {name for name in names_in(path.read_text()) if not _is_basic(name)}
    return names


def _is_basic(name: str) -> bool:
    _, part, *rest = name.split(".")
    return (not rest or part in ("nn", "optim")) and "._" not in name


def names_in(source: str) -> set[str]:
    """Names that a module imports from torch, and dotted ones that it reaches through such an import."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "torch":
                    aliases[each.asname or "torch"] = each.name if each.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for each in node.names:
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
                found.add(f"{node.module}.{each.name}")
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            first, _, rest = ast.unparse(node).partition(".")
            if first in aliases and rest.replace(".", "").isidentifier():
                found.add(f"{aliases[first]}.{rest}")
    return found


def protocol_names() -> set[str]:
    """Functions, classes and their parameters that the accelerator device asks of a device module."""
    found = set()
    for protocol, methods in _protocols().items():
        for method in methods:
            parameters = [each.arg for each in (*method.args.args[1:], *method.args.kwonlyargs)]
            for place in _PROTOCOLS.get(protocol, ()):
                found.add(f"{place}.{method.name}")
                found |= {f"{place}.{method.name}({parameter})" for parameter in parameters}
            if protocol == "NpuRuntime":
                found.add(f"{_NPU_RUNTIME}:{method.name}")
    return found


def _protocols() -> dict[str, list[ast.FunctionDef]]:
    tree = ast.parse((PACKAGE / "device" / "accelerator.py").read_text())
    return {
        node.name: [each for each in node.body if isinstance(each, ast.FunctionDef)]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases)
    }


def unplaced_protocols() -> set[str]:
    """Protocols of the accelerator device that nothing here looks at."""
    return _protocols().keys() - _PROTOCOLS.keys() - {"NpuRuntime"}


def cuda_runtime() -> set[str]:
    tree = ast.parse((PACKAGE / "device" / "accelerator.py").read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in attributes if name.startswith("cudaHost")}


def private_names() -> set[str]:
    """Names with a leading underscore that ``swapckpt/_torch.py`` takes from torch."""
    tree = ast.parse((PACKAGE / "_torch.py").read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found = {"_init_optim_state"}  # by name, in a stack frame
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            found |= set() if is_own else {node.attr}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {*(node.module or "").split("."), *(each.name for each in node.names)}
    found -= own | {"_getframe"}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}
