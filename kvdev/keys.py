"""Page keys: 32 bytes that name a page, derived from what the engine calls it.

Derivation version 1: BLAKE2b-256, personalised with the version, over le16 length and bytes of the salt,
the same of the cache group, then the engine's own key bytes. What a page's bytes mean is in the geometry.
Not here: the engine's hashing of tokens (its own); the page table (``kvdev.store``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvdev.errors import UsageError

KEY_SIZE_BYTES = 32
DERIVATION_VERSION = 1
PREFIX_PART_SIZE_MAX = 0xFFFF
_PERSON = b"kvdev page key 1"

KeyArray = npt.NDArray[np.uint8]
"""``(n, 32) uint8``, C-contiguous."""


def _part(field: str, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > PREFIX_PART_SIZE_MAX:
        raise UsageError(f"page key: {field}: expected at most {PREFIX_PART_SIZE_MAX} bytes, got {len(data)}")
    return len(data).to_bytes(2, "little") + data


def derive_keys(
    salt: str | bytes,
    cache_group: str | bytes,
    engine_keys: Iterable[bytes | memoryview | npt.NDArray[np.uint8]],
) -> KeyArray:
    """Derive the page keys of a batch, in its order.

    Args:
        salt: separates tenants that must not see each other's pages; may be empty.
        cache_group: separates caches of one tenant (a LoRA adapter, a group of layers); may be empty.
        engine_keys: each page's name in the engine, bytes or rows of a ``(n, k) uint8`` array; not empty.
    """
    base = hashlib.blake2b(
        _part("salt", salt) + _part("cache_group", cache_group), digest_size=KEY_SIZE_BYTES, person=_PERSON
    )
    digests = bytearray()
    for index, engine_key in enumerate(engine_keys):
        if not isinstance(engine_key, (bytes, memoryview, np.ndarray)) or len(engine_key) == 0:
            what = f"{engine_key!r}"
            raise UsageError(f"page key: engine_keys[{index}]: expected at least one byte, got {what}")
        state = base.copy()
        state.update(bytes(engine_key))
        digests += state.digest()
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, KEY_SIZE_BYTES)


_MARK_PERSON = b"kvdev salt mark"


def salt_mark(salt: str | bytes) -> int:
    """32 bits that tell one salt from another, and nothing of it to whoever cannot guess it; 0 for none."""
    data = salt.encode() if isinstance(salt, str) else bytes(salt)
    if not data:
        return 0
    digest = hashlib.blake2b(data, digest_size=4, person=_MARK_PERSON).digest()
    return int.from_bytes(digest, "little") or 1


def check_salt(what: str, salt: str | bytes, *, expected_mark: int) -> None:
    """UsageError where the keys of a KV namespace are made with another salt; any will do where the mark is 0."""
    mark = salt_mark(salt)
    if expected_mark and mark != expected_mark:
        got = f"one of mark {mark:08x}" if mark else "none"
        raise UsageError(
            f"{what}: salt: expected that of its tenant, of mark {expected_mark:08x}, got {got}; name its file with "
            f"--salt-file"
        )


class PageKeys:
    """Makes the page keys of one tenant; the salt is in no text of it."""

    def __init__(self, salt: str | bytes = b"", cache_group: str | bytes = b"") -> None:
        self._salt = salt
        self._cache_group = cache_group

    def derive(self, engine_keys: Iterable[bytes | memoryview | npt.NDArray[np.uint8]]) -> KeyArray:
        """The page keys of a batch, in its order; see ``derive_keys``."""
        return derive_keys(self._salt, self._cache_group, engine_keys)


def check_keys(keys: npt.NDArray[np.uint8]) -> KeyArray:
    """The array itself when it is ``(n, 32) uint8`` and C-contiguous; else raises UsageError."""
    if (
        not isinstance(keys, np.ndarray)
        or keys.dtype != np.uint8
        or keys.ndim != 2
        or keys.shape[1] != KEY_SIZE_BYTES
    ):
        got = f"{keys.shape} {keys.dtype}" if isinstance(keys, np.ndarray) else type(keys).__name__
        raise UsageError(f"keys: expected a (n, {KEY_SIZE_BYTES}) uint8 array, got {got}")
    if not keys.flags.c_contiguous:
        raise UsageError("keys: expected a C-contiguous array, got strides " + str(keys.strides))
    return keys
