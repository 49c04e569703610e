"""What the command line does with checkpoints, without a terminal.

Nothing here runs code of a checkpoint, and memory is bounded by the largest piece, not by the checkpoint.
"""
