"""swapckpt: owns the optimizer state of a PyTorch training job.

Between steps the state lives in host memory and the device holds none of it; ``optimizer.step()`` becomes a
pipeline of load, update and offload; the same component is a ``torch.distributed.checkpoint`` Stateful.
"""

from swapckpt import errors
from swapckpt.checkpointer import Checkpointer, MirrorStager, PerRank, RngState, SaveHandle, SaveStats
from swapckpt.config import AsyncMode, CheckpointConfig, SwapConfig
from swapckpt.foreign import FusedBroadcast, StateBroadcast
from swapckpt.manager import MemoryStats, StateManager
from swapckpt.optimizer import is_swapped, recovery, release, swap_optimizer
from swapckpt.planner import StrictLoadPlanner
from swapckpt.report import SwapReport
from swapckpt.settings import Settings, load_settings
from swapckpt.snapshot import Snapshot
from swapckpt.trace import Span, Timeline

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
