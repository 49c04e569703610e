"""The ``python`` blocks of README.md and docs/ run: each file in one namespace, in a folder of its own.

A block under the line ``<!-- no-run: reason -->`` is shown, not run. Say why: it is the one way out. A block
under ``<!-- prints -->`` is what the ``python`` blocks since the last one of its kind print; where lines are
broken does not matter, so that long messages can be read.
"""

from __future__ import annotations

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import swapckpt
from swapckpt import errors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"(?P<ticks>`{3,})(?P<language>[^\s`]*)[^`]*")
_NO_RUN = re.compile(r"<!--\s*no-run:\s*\S.*-->")
_PRINTS = "<!-- prints -->"


@dataclass(frozen=True, slots=True)
class Block:
    """The text between two fences."""

    language: str
    line: int  # of its first line of text, from 1
    text: str
    runs: bool
    is_printed: bool


def blocks_of(page: str) -> list[Block]:
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    start = 0
    before = ""  # the last line with text
    lines = page.splitlines()
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.fullmatch(line.rstrip())
        if opening is None:
            if fence:
                opening, start = fence, number
            elif line.strip():
                before = line.strip()
        elif line.strip("` ") == "" and fence and len(fence["ticks"]) >= len(opening["ticks"]):
            text = "\n".join(lines[start : number - 1])
            runs, is_printed = not _NO_RUN.fullmatch(before), before == _PRINTS
            blocks.append(Block(opening["language"], start + 1, text, runs, is_printed))
            opening, before = None, ""
    assert opening is None, f"the fence of line {start} is never closed"
    return blocks


def run_page(page: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run its blocks one after the other, as if they were one module."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # what is defined there can be pickled
    printed = io.StringIO()
    for block in blocks_of(page):
        if block.is_printed:
            same = printed.getvalue().split() == block.text.split()
            assert same, f"{name}, line {block.line}: what is printed is\n{printed.getvalue()}"
            printed = io.StringIO()
        elif block.language == "python" and block.runs:
            # Tracebacks point into the page.
            code = compile("\n" * (block.line - 1) + block.text, name, "exec", dont_inherit=True)
            with redirect_stdout(printed):
                exec(code, module.__dict__)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_examples_of_a_page_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(path.read_text(), str(path), monkeypatch)


def test_the_readme_has_an_example_that_runs() -> None:
    assert any(block.language == "python" and block.runs for block in blocks_of(PAGES[0].read_text()))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_notes_that_exist(path: Path) -> None:
    links = re.findall(r"\[([^\]]*|`\[.*?\]`)\]\((?!https?:|#)([^)#]+)", path.read_text())
    missing = [target for _, target in links if not (path.parent / target).exists()]
    assert missing == []
    notes = [(text.strip("`"), path.parent / target) for text, target in links if "[Note:" in text]
    assert [note for note, target in notes if note not in target.read_text()] == []


def test_troubleshooting_has_every_error_with_a_message_its_cause_and_what_to_do() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    _, *parts = re.split(r"^##+ (.*)$", page, flags=re.MULTILINE)
    sections = {title.strip("`"): text for title, text in zip(parts[::2], parts[1::2], strict=True)}
    ours = [each for each in vars(errors).values() if isinstance(each, type)]
    names = {each.__name__ for each in ours if issubclass(each, errors.SwapCkptError)}
    assert names - sections.keys() == set()
    for name in names:
        text = sections[name]
        assert "**Cause.**" in text, name
        assert "**What to do.**" in text, name
        assert "```text" in text or "Not raised yet." in text, name


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    assert [
        name for name in swapckpt.__all__ if not re.search(rf":: (swapckpt\.)?{name}$", page, re.MULTILINE)
    ] == []


def test_the_figure_of_a_step_is_what_its_plan_gives() -> None:
    script = runpy.run_path(str(ROOT / "docs/draw_step.py"))
    assert script["PATH"].read_text() == script["draw"](script["PLAN"]), "run: python docs/draw_step.py"


PAGE = """\
Some text.

```python
first = 1
```

```console
$ not python
```

<!-- no-run: needs a cluster -->

```python
raise RuntimeError
```

```python
assert first == 1
second = first / {divisor}
```
"""


def test_blocks_share_a_namespace_and_marked_ones_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(PAGE.format(divisor=1), "page.md", monkeypatch)


def test_a_block_that_raises_fails_with_the_line_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(PAGE.format(divisor=0), "page.md", monkeypatch)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == ("page.md", 19)
    assert PAGE.splitlines()[18].startswith("second")


PRINTING = """\
```python
print("expected 1, found {found}")
```

<!-- prints -->

```text
expected 1,
found 2
```
"""


def test_what_a_page_says_is_printed_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(PRINTING.format(found=2), "page.md", monkeypatch)
    with pytest.raises(AssertionError, match=r"page\.md, line 8"):
        run_page(PRINTING.format(found=3), "page.md", monkeypatch)


def test_a_mark_without_a_reason_does_not_count() -> None:
    assert blocks_of("<!-- no-run: -->\n```python\n1 / 0\n```")[0].runs


def test_a_mark_holds_for_one_block() -> None:
    marked, next_one = blocks_of("<!-- no-run: why -->\n```python\na\n```\n```python\nb\n```")
    assert (marked.runs, next_one.runs) == (False, True)


def test_a_fence_inside_a_longer_fence_is_text() -> None:
    (block,) = blocks_of("````md\n```python\n1 / 0\n```\n````")
    assert (block.language, block.text) == ("md", "```python\n1 / 0\n```")


def test_an_open_fence_is_an_error() -> None:
    with pytest.raises(AssertionError, match="the fence of line 2 is never closed"):
        blocks_of("text\n```python\n1")
