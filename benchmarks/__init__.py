"""Benchmarks. ``python -m benchmarks`` lists them.

Every one prints a table, compares what it measured with its goals, and writes the ratios with ``--json``.
Wall times of a busy machine are upper bounds: look at the load it prints. ``nice`` does not help where the
kernel groups processes by session (``sched_autogroup_enabled``); ``chrt -r 1`` does, for the seconds it
takes.
"""
