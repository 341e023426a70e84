"""The configuration of a target in a file: read at the start, written whole after each change.

Not here: which calls make a configuration (``rpc_methods``); running them (``serve``).
Trust: a file is ``untrusted`` until parsed; raises only UsageError naming the file and the place.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvdev.errors import UsageError
from kvdev.files import open_kept, open_lock, read_regular
from kvdev.target.lvol import LvolStoreImage
from kvdev.target.stack import images_json, parse_images

CONFIG_SIZE_LIMIT_BYTES = 64 << 20
STATE_VERSION = 1

ConfigCall = tuple[str, dict[str, Any] | None]


class StateFile:
    """One file that this process alone writes. A reader sees the old content or the new, never a part.

    Invariant: while this object is open a lock beside the file is held.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._last = b""
        if Path(path).exists() and not Path(path).is_file():
            raise UsageError(
                f"state: {path}: expected a regular file or none, got something else; name another"
            )
        try:
            self._lock_fd = open_lock(f"{path}.lock")
        except OSError as error:
            raise UsageError(
                f"state: {path}: {error.strerror or error}; choose a folder you may write to"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise UsageError(
                f"state: {path}: another target keeps its state there; name another file"
            ) from None

    def close(self) -> None:
        """Give the file to others. The lock file stays: removing it would race with who opens it."""
        os.close(self._lock_fd)

    def load(self) -> tuple[list[ConfigCall], list[LvolStoreImage]]:
        """The calls and the lvol stores of the last state; nothing when there is no file yet."""
        if not Path(self.path).exists():
            return [], []
        document = read_json(self.path, "state")
        if not isinstance(document, dict) or document.get("kvdev_target_state") != STATE_VERSION:
            raise UsageError(
                f"state: {self.path}: expected a state of version {STATE_VERSION}; name another file"
            )
        try:
            images = parse_images(document.get("lvol_stores", []))
        except ValueError as error:
            raise UsageError(f"state: {self.path}: {error}") from error
        return parse_calls(self.path, "state", document), images

    def save(self, subsystems: list[Mapping[str, Any]], images: list[LvolStoreImage]) -> None:
        """Put a new state in the place of the old one, on the disk when this returns. Raises OSError."""
        document = {
            "kvdev_target_state": STATE_VERSION,
            "subsystems": subsystems,
            "lvol_stores": images_json(images),
        }
        text = json.dumps(document, separators=(",", ":")).encode("utf-8") + b"\n"
        if text == self._last:
            return
        partial = f"{self.path}.new"
        fd = open_kept(partial, os.O_TRUNC)
        try:
            with open(fd, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(partial).replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(partial).unlink()
            raise
        folder = os.open(Path(self.path).absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._last = text


def read_json(path: str, word: str) -> Any:
    """A regular JSON file of bounded size. Raises UsageError."""
    try:
        text = read_regular(path, CONFIG_SIZE_LIMIT_BYTES)
        if len(text) > CONFIG_SIZE_LIMIT_BYTES:
            raise UsageError(f"{word}: {path}: expected at most {CONFIG_SIZE_LIMIT_BYTES} bytes, got more")
        return json.loads(text.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{word}: {path}: {error.strerror or error}; name another file") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{word}: {path}: no JSON: {error}") from error


def parse_calls(path: str, word: str, document: Any) -> list[ConfigCall]:
    """The calls of a list, or of what SPDK's save_config writes. Raises UsageError naming the place."""
    return [_config_call(path, word, place, call) for place, call in _config_calls(path, word, document)]


def _config_calls(path: str, word: str, document: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(document, list):
        yield from ((f"[{index}]", call) for index, call in enumerate(document))
        return
    subsystems = document.get("subsystems") if isinstance(document, dict) else None
    if not isinstance(subsystems, list):
        raise UsageError(f'{word}: {path}: expected a list of calls or {{"subsystems": [...]}}')
    for number, subsystem in enumerate(subsystems):
        calls = subsystem.get("config") if isinstance(subsystem, dict) else subsystem
        if calls is None:
            continue
        if not isinstance(calls, list):
            raise UsageError(f"{word}: {path}: subsystems[{number}].config: expected a list of calls")
        yield from ((f"subsystems[{number}].config[{index}]", call) for index, call in enumerate(calls))


def _config_call(path: str, word: str, place: str, call: Any) -> ConfigCall:
    if not isinstance(call, dict) or not isinstance(call.get("method"), str):
        raise UsageError(f'{word}: {path}: {place}: expected {{"method": ..., "params": {{...}}}}')
    params = call.get("params")
    if not isinstance(params, dict | None):
        raise UsageError(f"{word}: {path}: {place}.params: expected an object")
    return call["method"], params
