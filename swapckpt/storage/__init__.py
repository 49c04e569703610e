"""Checkpoints on disk and in object stores: stock DCP format, checksums, and commits that cannot lie."""
