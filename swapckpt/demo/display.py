"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from swapckpt.demo.records import Saved, Saving, Started, Stepped
from swapckpt.demo.units import human_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from swapckpt.demo.config import DemoConfig
    from swapckpt.demo.records import Event
    from swapckpt.demo.verdict import Check, Kill, RunLog

_ROWS = 12
_STYLES = {"reference": "dim", "swapped": "cyan", "resumed": "green"}


class Display:
    """Shows a story on a console. Used as a context manager around the runs."""

    def __init__(self, console: Console, config: DemoConfig) -> None:
        self._console = console
        self._config = config
        self._chapter = Spinner("dots")
        self._rows: list[tuple[str, Stepped, str]] = []  # run, record, save column
        self._ended = False
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, refresh_per_second=8, get_renderable=self._render)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._ended = True
            self._live.stop()

    def chapter(self, title: str, subtitle: str) -> None:
        """A run begins."""
        self._chapter.update(text=Text.assemble((title, "bold"), ": ", subtitle))
        self._line(f"== {title}: {subtitle}")

    def event(self, log: RunLog, event: Event) -> None:
        """A rank-0 record arrived; it is already in ``log``."""
        match event:
            case Started() if event.start:
                self._line(f"{log.name:9} resumed after step {event.start}")
            case Stepped():
                self._rows.append((log.name, event, ""))
                self._line(_plain_row(log.name, event, self._config.steps))
            case Saving():
                self._mark_save("saving")
            case Saved():
                self._mark_save(f"{event.secs:.2f} s")
                self._line(f"{log.name:9} saved step {event.step} in {event.secs:.2f} s")
            case _:
                pass

    def kill(self, step: int, kill: Kill | None) -> None:
        """All ranks were killed in the save of ``step``, or (None) that save was too fast."""
        self._mark_save("missed" if kill is None else "KILLED")
        if kill is None:
            self._line(f"the save of step {step} was complete before the kill; waiting for the next")
        else:
            written = human_nbytes(kill.written_nbytes)
            self._line(f"SIGKILL to all ranks in the save of step {step}: {written} written, no .metadata")

    def verdict(self, checks: Sequence[Check]) -> None:
        """The final table."""
        table = Table(box=box.SIMPLE_HEAD, title="verdict", title_justify="left", title_style="bold")
        table.add_column("check")
        table.add_column("", justify="center")
        table.add_column("evidence")
        for check in checks:
            mark = Text("ok", "bold green") if check.ok else Text("FAILED", "bold red")
            table.add_row(check.claim, mark, check.evidence)
        self._console.print(table)

    def _mark_save(self, save: str) -> None:
        name, record, _ = self._rows[-1]
        self._rows[-1] = (name, record, save)

    def _line(self, text: str) -> None:
        if self._live is None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Table | Group:
        table = Table(box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("run")
        for name in ("step", "loss", "device", "peak", "host", "secs", "save"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, record, save in self._rows[-_ROWS:]:
            table.add_row(
                name,
                f"{record.step}/{self._config.steps}",
                f"{record.loss:.4f}",
                human_nbytes(record.device_nbytes),
                human_nbytes(record.device_peak_nbytes),
                human_nbytes(record.host_nbytes),
                f"{record.secs:.2f}",
                Text(save, "bold red" if save == "KILLED" else ""),
                style=_STYLES[name],
            )
        return table if self._ended else Group(table, self._chapter)


def _plain_row(name: str, record: Stepped, steps: int) -> str:
    device, peak, host = (
        human_nbytes(nbytes)
        for nbytes in (record.device_nbytes, record.device_peak_nbytes, record.host_nbytes)
    )
    return (
        f"{name:9} step {record.step:>{len(str(steps))}}/{steps} loss {record.loss:.4f} "
        f"device {device:>8} peak {peak:>8} host {host:>8}"
    )
