"""DH-HMAC-CHAP secrets in their printed form ``DHHC-1:hh:BASE64:``, and the keys made of them.

Not here: where a secret is kept (``source``); what a key answers (``chap``).
Spec: NVM Express Base 2.1 sections 8.3.4.5.7, 8.3.4.5.8.
Trust: ``untrusted`` text comes from a file or keyring; raises only UsageError, whose text has nothing of it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import zlib
from collections.abc import Callable

from kvdev.errors import UsageError
from kvdev.wire.auth import HashId

PREFIX = "DHHC-1:"
SECRET_SIZES_BYTES = (32, 48, 64)
TRANSFORM_NONE = 0
_CRC_SIZE_BYTES = 4
_REMEDY = "`kvdev key generate` makes one"


class DhchapSecret:
    """A secret and how its key is made. Its text is given by ``text()`` only: never by ``str`` or ``repr``."""

    __slots__ = ("_secret", "transform")

    def __init__(self, secret: bytes, transform: int = TRANSFORM_NONE) -> None:
        """``transform`` is 0 where the secret itself is the key, else the hash that makes it."""
        if len(secret) not in SECRET_SIZES_BYTES:
            raise UsageError(f"secret: expected 32, 48 or 64 bytes, got {len(secret)}")
        if transform != TRANSFORM_NONE and transform not in list(HashId):
            raise UsageError(f"secret: transform: expected 0 to 3, got {transform}")
        self._secret = bytes(secret)
        self.transform = transform

    def __repr__(self) -> str:
        return f"DhchapSecret({self.size_bytes} bytes, transform {self.transform:02d})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DhchapSecret):
            return NotImplemented
        return self.transform == other.transform and hmac.compare_digest(self._secret, other._secret)

    __hash__ = None  # type: ignore[assignment]

    @property
    def size_bytes(self) -> int:
        return len(self._secret)

    @classmethod
    def generate(
        cls,
        *,
        size_bytes: int | None = None,
        transform: int = TRANSFORM_NONE,
        randomness: Callable[[int], bytes] = os.urandom,
    ) -> DhchapSecret:
        """A new secret; its size is by default that of the transform's hash."""
        if size_bytes is None:
            size_bytes = HashId(transform).size_bytes if transform in list(HashId) else SECRET_SIZES_BYTES[0]
        if size_bytes not in SECRET_SIZES_BYTES:
            raise UsageError(f"secret: expected 32, 48 or 64 bytes, got {size_bytes}")
        return cls(randomness(size_bytes), transform)

    @classmethod
    def parse(cls, untrusted: str, *, where: str) -> DhchapSecret:
        """Read the printed form; ``where`` says in the error whose text it was."""
        text = untrusted.strip()
        parts = text.split(":")
        if not text.startswith(PREFIX) or len(parts) != 4 or parts[3]:
            raise UsageError(f"{where}: expected one secret as DHHC-1:hh:BASE64: and nothing else; {_REMEDY}")
        if len(parts[1]) != 2 or parts[1] not in ("00", "01", "02", "03"):
            raise UsageError(f"{where}: DHHC-1:hh: expected 00, 01, 02 or 03 for hh; {_REMEDY}")
        try:
            data = base64.b64decode(parts[2], validate=True)
        except (binascii.Error, ValueError):
            raise UsageError(f"{where}: DHHC-1: expected base64 after the hash; {_REMEDY}") from None
        secret, crc = data[:-_CRC_SIZE_BYTES], data[-_CRC_SIZE_BYTES:]
        if len(secret) not in SECRET_SIZES_BYTES:
            raise UsageError(
                f"{where}: DHHC-1: expected 32, 48 or 64 bytes and a checksum of 4, got {len(data)} bytes in all; "
                f"{_REMEDY}"
            )
        if zlib.crc32(secret) != int.from_bytes(crc, "little"):
            raise UsageError(
                f"{where}: DHHC-1: the checksum does not match: the text was cut or mistyped; copy it again"
            )
        return cls(secret, int(parts[1]))

    def text(self) -> str:
        """The printed form: the secret itself, for the file it is kept in."""
        data = self._secret + zlib.crc32(self._secret).to_bytes(_CRC_SIZE_BYTES, "little")
        return f"{PREFIX}{self.transform:02d}:{base64.b64encode(data).decode()}:"

    def key_for(self, nqn: str) -> bytes:
        """The key of the entity with that NQN."""
        if self.transform == TRANSFORM_NONE:
            return self._secret
        message = nqn.encode() + b"NVMe-over-Fabrics"
        return hmac.digest(self._secret, message, HashId(self.transform).algorithm)
