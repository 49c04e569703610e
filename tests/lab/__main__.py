"""``python -m tests.lab``: run every mutant in a forked child and print which are flagged, as JSON lines."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback

from tests.lab.mutants import Mutant, MutantFinder, mutants

CHILD_SECS = 60
PRELOADED = ("pytest", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor")
"""Imported once, before the forks: they take longer than all that a child does. The first optimizer of a
process imports ``torch._dynamo``."""


def judge(mutant: Mutant | None) -> str:
    """Why the lab flags a mutant; empty if it does not. None stands for the code as it is."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(CHILD_SECS)
        _run(mutant, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        verdict = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"died by signal {os.WTERMSIG(status)}"
    return verdict


def _run(mutant: Mutant | None, writer: int) -> None:
    """In the child: never returns."""
    verdict = ""
    try:
        if mutant is not None:
            MutantFinder(mutant).install()
        from tests.lab.scenarios import run_all

        run_all()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the verdict
        last = traceback.extract_tb(error.__traceback__)
        where = next((frame.name for frame in reversed(last) if "scenarios" in frame.filename), "?")
        verdict = f"{where}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    os.write(writer, verdict.encode()[:4000])
    os._exit(0)


def main(patterns: list[str]) -> None:
    """Judge the code itself first, then each mutant whose name contains one of ``patterns``."""
    for name in PRELOADED:
        importlib.import_module(name)
    for mutant in (None, *mutants()):
        name = mutant.name if mutant is not None else "the code as it is"
        if mutant is not None and patterns and not any(pattern in name for pattern in patterns):
            continue
        begin = time.perf_counter()
        verdict = judge(mutant)
        secs = round(time.perf_counter() - begin, 1)
        record = {"mutant": name, "line": mutant.line if mutant else 0, "flagged": verdict, "secs": secs}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
