"""What commands print: one JSON document, or aligned text; progress on a terminal only.

Not here: errors (``kvdev_tools.main`` prints them on stderr).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvdev.errors import CapacityError, UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])

Document = Mapping[str, Any]

BAR_WIDTH = 30


def json_option(command: _Command) -> _Command:
    """The ``--json`` flag, passed to the command as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(
        command
    )


def emit(document: Document, *, as_json: bool, text: Callable[[], Iterable[str]]) -> None:
    """Print the document, or the lines of ``text``, on stdout; CapacityError when there is no room for them."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    lines = [json.dumps(document, indent=2, ensure_ascii=not is_utf8)] if as_json else text()
    try:
        for line in lines:
            # Names are any text: what the encoding lacks is escaped, in JSON and text alike.
            click.echo(line.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CapacityError(f"output: cannot be written: {error.strerror or error}") from error


def check_output(option: str, path: str) -> None:
    """UsageError unless a file can be written: for what is written at the end of long work. Leaves no new file."""
    file = Path(os.path.realpath(path))
    try:
        is_new = not file.exists()
        if not is_new and not file.is_file() and not file.is_dir():
            return  # a pipe: its reader would take closing it for the end
        with file.open("ab"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise UsageError(
            f"{option}: {path}: cannot be written: {error.strerror}; name a file that can be"
        ) from error


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str] = ()) -> list[str]:
    """Left-aligned columns; numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    if not cells:
        return []
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    is_number = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(widths))]
    lines = []
    for row in cells:
        parts = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return lines


def _is_number(cell: object) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def fields(pairs: Iterable[tuple[str, object]]) -> list[str]:
    """``name   value`` lines."""
    listed = [(name, str(value)) for name, value in pairs]
    width = max((len(name) for name, _ in listed), default=0)
    return [f"{name.ljust(width)}  {value}" for name, value in listed]


class Progress:
    """A bar on stderr, drawn only when stderr is a terminal, at most once per per-cent."""

    def __init__(self, label: str, total: int, *, is_quiet: bool = False) -> None:
        self._label = label
        self._total = max(1, total)
        self._is_drawn = not is_quiet and sys.stderr.isatty()
        self._last_percent = -1

    def update(self, done: int, note: str = "") -> None:
        percent = min(100, 100 * done // self._total)
        if not self._is_drawn or percent == self._last_percent:
            return
        self._last_percent = percent
        filled = BAR_WIDTH * percent // 100
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        sys.stderr.write(f"\r\x1b[K{self._label} [{bar}] {percent:3d} % {note}")
        sys.stderr.flush()

    def close(self) -> None:
        """Take the bar away, so that what follows starts on a clean line."""
        if self._is_drawn and self._last_percent >= 0:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
