"""swapckpt: owns the optimizer state of a PyTorch training job.

Between steps the state lives in host memory and the device holds none of it; ``optimizer.step()`` becomes a
pipeline of load, update and offload; the same component is a ``torch.distributed.checkpoint`` Stateful.
"""

from typing import TYPE_CHECKING

from swapckpt import errors
from swapckpt.config import AsyncMode, CheckpointConfig, SwapConfig
from swapckpt.foreign import FusedBroadcast, StateBroadcast
from swapckpt.manager import MemoryStats, StateManager
from swapckpt.optimizer import is_swapped, recovery, release, swap_optimizer
from swapckpt.planner import StrictLoadPlanner
from swapckpt.report import SwapReport
from swapckpt.settings import Settings, load_settings
from swapckpt.snapshot import Snapshot
from swapckpt.trace import Span, Timeline

if TYPE_CHECKING:
    from swapckpt.checkpointer import Checkpointer, MirrorStager, PerRank, RngState, SaveHandle, SaveStats

__all__ = [
    "AsyncMode",
    "CheckpointConfig",
    "Checkpointer",
    "FusedBroadcast",
    "MemoryStats",
    "MirrorStager",
    "PerRank",
    "RngState",
    "SaveHandle",
    "SaveStats",
    "Settings",
    "Snapshot",
    "Span",
    "StateBroadcast",
    "StateManager",
    "StrictLoadPlanner",
    "SwapConfig",
    "SwapReport",
    "Timeline",
    "errors",
    "is_swapped",
    "load_settings",
    "recovery",
    "release",
    "swap_optimizer",
]

__version__ = "0.1.0"

_CHECKPOINTER = frozenset({"Checkpointer", "MirrorStager", "PerRank", "RngState", "SaveHandle", "SaveStats"})


def __getattr__(name: str) -> object:
    """The checkpoint service, imported when it is asked for: swapping alone needs torch and NumPy only."""
    if name not in _CHECKPOINTER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from swapckpt import checkpointer

    found: object = vars(checkpointer)[name]
    globals()[name] = found
    return found
