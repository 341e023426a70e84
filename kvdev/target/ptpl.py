"""Reservations that outlive the target: one small JSON file per namespace, with SPDK's keys.

Not here: when it is written (``reservation_desk``).
Trust: a file is ``untrusted`` until parsed; raises only PtplError naming the file and what is wrong with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid as uuid_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvdev.block.reservation import KEY_MAX, ReservationType
from kvdev.errors import KvdevError
from kvdev.files import open_kept, read_regular
from kvdev.target.reservation import Reservations
from kvdev.wire.reservation import REGISTRANT_COUNT_MAX

FILE_SIZE_LIMIT_BYTES = 16 << 20
_NULL_UUID = uuid_module.UUID(int=0)


class PtplError(KvdevError):
    """A file of persistent reservations cannot be used."""


def load(path: str, uuid: uuid_module.UUID) -> Reservations:
    """What was saved; nothing where there is no file yet, or where it was not to persist."""
    try:
        text = read_regular(path, FILE_SIZE_LIMIT_BYTES)
    except FileNotFoundError:
        return Reservations()
    except OSError as error:
        raise PtplError(f"ptpl_file: {path}: {error.strerror or error}") from error
    if not text:
        return Reservations()  # an empty file that its owner has made
    try:
        if len(text) > FILE_SIZE_LIMIT_BYTES:
            raise ValueError(f"expected at most {FILE_SIZE_LIMIT_BYTES} bytes, got more")
        return _parse(json.loads(text.decode("utf-8")), uuid)
    except (ValueError, RecursionError) as error:
        raise PtplError(
            f"ptpl_file: {path}: no reservations of this namespace: {error}; "
            f"remove the file to start with none, or name another one"
        ) from error


def _parse(untrusted: Any, uuid: uuid_module.UUID) -> Reservations:
    document = _typed(untrusted, dict, "document")
    found = uuid_module.UUID(_typed(document.get("bdev_uuid"), str, "bdev_uuid"))
    if found != uuid:
        raise ValueError(f"bdev_uuid: expected {uuid}, the namespace's UUID, got {found}")
    if not _typed(document.get("ptpl"), bool, "ptpl"):
        return Reservations()
    entries = _typed(document.get("registrants", []), list, "registrants")
    if len(entries) > REGISTRANT_COUNT_MAX:
        raise ValueError(f"registrants: expected at most {REGISTRANT_COUNT_MAX}, got {len(entries)}")
    registrants: dict[uuid_module.UUID, int] = {}
    for untrusted_entry in entries:
        entry = _typed(untrusted_entry, dict, "registrants[]")
        host = uuid_module.UUID(_typed(entry.get("host_uuid"), str, "host_uuid"))
        key = _typed(entry.get("rkey"), int, "rkey")
        if not 0 <= key <= KEY_MAX or host in registrants:
            raise ValueError(f"registrants[]: expected one key of 64 bits per host, got {host} {key}")
        registrants[host] = key
    number = _typed(document.get("rtype"), int, "rtype")
    rtype = ReservationType(number) if number else None
    holder = None
    if rtype is not None and rtype.is_all_registrants and not registrants:
        raise ValueError("registrants: expected at least one holder of the reservation")
    if rtype is not None and not rtype.is_all_registrants:
        holder = uuid_module.UUID(_typed(document.get("holder_uuid"), str, "holder_uuid"))
        if holder not in registrants:
            raise ValueError(f"holder_uuid: expected a registrant, got {holder}")
    return Reservations(registrants=MappingProxyType(registrants), rtype=rtype, holder=holder, is_ptpl=True)


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def save(path: str, uuid: uuid_module.UUID, state: Reservations) -> None:
    """Put a new file in the place of the old one, on the disk when this returns. Raises OSError."""
    is_kept = state.is_ptpl
    holder = state.holder
    if holder is None and state.rtype is not None:
        holder = next(iter(state.registrants))  # of all registrants SPDK names the first
    document = {
        "ptpl": is_kept,
        "rtype": int(state.rtype or 0) if is_kept else 0,
        "crkey": state.registrants[holder] if is_kept and holder is not None else 0,
        "bdev_uuid": str(uuid),
        "holder_uuid": str(holder if is_kept and holder is not None else _NULL_UUID),
        "registrants": [
            {"rkey": key, "host_uuid": str(host)}
            for host, key in (state.registrants.items() if is_kept else ())
        ],
    }
    partial = f"{path}.new"
    fd = open_kept(partial, os.O_TRUNC)
    try:
        with open(fd, "wb") as file:
            file.write(json.dumps(document, indent=1).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(partial).unlink()
        raise
    folder = os.open(Path(path).absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
