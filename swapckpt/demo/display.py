"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
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
_PADDING = (0, 0, 0, 1)  # all columns fit into 80 characters, with the longest values
_STYLES = {"reference": "dim", "swapped": "cyan", "resumed": "green"}


@dataclass(slots=True)
class _Row:
    """One step; seconds that its save kept training and took in all, if it was saved."""

    run: str
    record: Stepped
    stall: str = ""
    save: str = ""


class Display:
    """Shows a story on a console. Used as a context manager around the runs."""

    def __init__(self, console: Console, config: DemoConfig) -> None:
        self._console = console
        self._config = config
        self._chapter = Spinner("dots")
        self._rows: list[_Row] = []
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
                self._rows.append(_Row(log.name, event))
                self._line(_plain_row(log.name, event, self._config.steps))
            case Saving():
                self._row_of(event.step).save = "writing"
            case Saved():
                row = self._row_of(event.step)
                row.stall, row.save = f"{event.stalled_secs:.3f}", f"{event.secs:.2f}"
                self._line(
                    f"{log.name:9} saved step {event.step}: stalled training by {event.stalled_secs:.3f} s, "
                    f"committed in {event.secs:.2f} s"
                )
            case _:
                pass

    def killed(self, kill: Kill) -> None:
        """All ranks were killed inside a save."""
        self._row_of(kill.step).save = "KILLED"
        written = f"{human_nbytes(kill.written_nbytes)} of {human_nbytes(kill.whole_nbytes)}"
        self._line(f"SIGKILL to all ranks while step {kill.step} was written: {written}, no commit")

    def missed(self, step: int) -> None:
        """The save to be killed in was too fast; its end is reported as that of any other."""
        self._line(f"the save of step {step} was committed before the kill; waiting for the next")

    def verdict(self, checks: Sequence[Check]) -> None:
        """The final table."""
        table = Table(
            box=box.SIMPLE_HEAD, padding=_PADDING, title="verdict", title_justify="left", title_style="bold"
        )
        table.add_column("check")
        table.add_column("", justify="center")
        table.add_column("evidence")
        for check in checks:
            mark = Text("ok", "bold green") if check.ok else Text("FAILED", "bold red")
            table.add_row(check.claim, mark, check.evidence)
        self._console.print(table)

    def _row_of(self, step: int) -> _Row:
        return next(row for row in reversed(self._rows) if row.record.step == step)

    def _line(self, text: str) -> None:
        if self._live is None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Table | Group:
        table = Table(box=box.SIMPLE_HEAD, padding=_PADDING, title_justify="left")
        table.add_column("run")
        for name in ("step", "loss", "device", "peak", "host", "secs", "stall", "save"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows[-_ROWS:]:
            record = row.record
            table.add_row(
                row.run,
                f"{record.step}/{self._config.steps}",
                f"{record.loss:.4f}",
                human_nbytes(record.device_nbytes),
                human_nbytes(record.device_peak_nbytes),
                human_nbytes(record.host_nbytes),
                f"{record.secs:.2f}",
                row.stall,
                Text(row.save, "bold red" if row.save == "KILLED" else ""),
                style=_STYLES[row.run],
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
