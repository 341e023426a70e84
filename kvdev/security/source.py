"""Where a secret is kept: a file that nobody else may read, or the kernel's keyring.

A secret is read each time it is needed and not kept: a new one is in force from the next connection on.
Trust: what is read is ``untrusted``; errors name the place and the remedy, never the content.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvdev.errors import UsageError
from kvdev.files import open_kept, open_regular
from kvdev.security.keyring import read_keyring
from kvdev.security.psk import TlsPsk
from kvdev.security.salt import KeySalt
from kvdev.security.secret import DhchapSecret
from kvdev.uri import KeySource

FILE_SIZE_BYTES_MAX = 4096


def read_text(source: KeySource, *, field: str) -> str:
    """The text that is kept there. Raises UsageError, or UnsupportedError for a keyring out of reach."""
    data = (
        read_key_file(source.name, field=field)
        if source.kind == "file"
        else read_keyring(source.name, field=field)
    )
    try:
        return data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise UsageError(f"{field}: {source}: expected the key as ASCII text") from None


def read_secret(source: KeySource, *, field: str) -> DhchapSecret:
    """The DH-HMAC-CHAP secret that is kept there."""
    return DhchapSecret.parse(read_text(source, field=field), where=f"{field}: {source}")


def read_tls_psk(source: KeySource, *, field: str) -> TlsPsk:
    """The key of TLS that is kept there."""
    return TlsPsk.parse(read_text(source, field=field), where=f"{field}: {source}")


def read_salt(source: KeySource, *, field: str) -> KeySalt:
    """The salt of page keys that is kept there."""
    return KeySalt.parse(read_text(source, field=field), where=f"{field}: {source}")


def read_key_file(path: str, *, field: str) -> bytes:
    """The bytes of a key file: a regular file of ours or root's, with no bit for group and others."""
    where = f"{field}: {path}"
    try:
        file = open_regular(path)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}; name the file of the key") from None
    with file:
        try:
            _check_file(os.fstat(file.fileno()), where=where, path=path)
            data = file.read(FILE_SIZE_BYTES_MAX + 1)
        except OSError as error:
            raise UsageError(f"{where}: cannot be read: {error.strerror}; check its disk") from None
    if len(data) > FILE_SIZE_BYTES_MAX:
        raise UsageError(f"{where}: expected at most {FILE_SIZE_BYTES_MAX} bytes; name the file of one key")
    return data


def write_key_file(path: str, text: str, *, field: str) -> None:
    """Keep a secret in a new file with mode 0600, on the disk when this returns."""
    try:
        descriptor = open_kept(path, os.O_EXCL)
    except FileExistsError:
        raise UsageError(f"{field}: {path} exists; name a new file") from None
    except OSError as error:
        raise UsageError(f"{field}: {path}: {error.strerror}; name a file in a folder of yours") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)  # no end of line: SPDK takes it for a part of a TLS key
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        Path(path).unlink()
        raise UsageError(f"{field}: {path}: {error.strerror}; free some space or name another file") from None


def _check_file(found: os.stat_result, *, where: str, path: str) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise UsageError(
            f"{where}: mode: expected 0600, got {mode:04o}: others may read it; `chmod 600 {path}`"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{where}: owner: expected uid {os.geteuid()} or 0, got {found.st_uid}; `chown` it to its user"
        )
