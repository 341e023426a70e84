"""The salt of page keys, as commands are told where it is.

Not here: its printed form (``kvdev.security.salt``); keys made with it (``kvdev.keys``).
"""

from __future__ import annotations

from pathlib import Path

from kvdev.security.salt import KeySalt
from kvdev.security.source import read_salt
from kvdev.uri import parse_key_source


def read_salt_file(path: str) -> KeySalt:
    """The salt in a file that nobody else may read; UsageError naming ``--salt-file`` otherwise."""
    return read_salt(parse_key_source(f"file:{Path(path).absolute()}", field="salt-file"), field="salt-file")
