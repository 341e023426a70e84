"""The state of a replay: one line per finished request in a small file, which the next client process goes on from.

Not here: what the totals mean to a reader (``kvdev_tools.report``).
Trust: the file may end in the middle of a line, as its writer may be killed; such a line counts as not written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from kvdev.errors import UsageError


@dataclass(frozen=True)
class RequestRecord:
    """What one request did. Times are nanoseconds; ``rss_max_bytes`` is the client's peak so far."""

    request_index: int
    pages_requested: int
    pages_restored: int
    pages_written: int
    pages_verified: int
    mismatches: int
    page_errors: int
    restore_ns: int
    offload_ns: int
    stored_pages: int
    rss_max_bytes: int
    flushes_lost: int = 0
    """Flushes that could not vouch for what was written: a target had gone away with its cache."""
    failed_reads: int = 0
    """Pages that a device could not read: misses, stored anew elsewhere."""


_NAMES = [field.name for field in fields(RequestRecord)]


class ProgressFile:
    """Appends records; each is handed to the operating system before the next request starts."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab", buffering=0)

    def append(self, record: RequestRecord) -> None:
        line = json.dumps(list(asdict(record).values()), separators=(",", ":")) + "\n"
        self._file.write(line.encode())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ProgressFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_progress(path: Path) -> Iterator[RequestRecord]:
    """Records in order, from request 0 on without a gap; stops before a torn last line."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for expected, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            try:
                values = json.loads(line)
            except ValueError as error:
                raise UsageError(
                    f"{path}:{expected + 1}: expected a record of the replay ({error})"
                ) from error
            if not isinstance(values, list) or len(values) != len(_NAMES) or values[0] != expected:
                raise UsageError(f"{path}:{expected + 1}: expected the record of request {expected}")
            yield RequestRecord(*values)


def trim_progress(path: Path) -> int:
    """Cut a torn last line off; returns the index of the next request."""
    size_bytes = count = 0
    if not path.exists():
        return 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            size_bytes += len(line)
            count += 1
    with path.open("r+b") as file:
        file.truncate(size_bytes)
    return count


def peak_rss_bytes(status: Path = Path("/proc/self/status")) -> int:
    """This process's peak resident size; 0 where the system does not say.

    Not getrusage: its peak is inherited over fork and exec.
    """
    try:
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
