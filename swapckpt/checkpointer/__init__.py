"""The checkpoint service: saves that stall nothing, copy no mirror and commit in one step; loads that say
first what does not fit."""

from swapckpt.checkpointer.handle import SaveHandle, SaveStats
from swapckpt.checkpointer.service import Checkpointer
from swapckpt.checkpointer.stager import MirrorStager
from swapckpt.checkpointer.values import PerRank, RngState

__all__ = ["Checkpointer", "MirrorStager", "PerRank", "RngState", "SaveHandle", "SaveStats"]
