"""The salt of a tenant's page keys in its printed form ``KVSALT-1:HEX``: who lacks it cannot ask for its pages.

Not here: where it is kept (``source``); keys made with it (``kvdev.keys``).
Trust: ``untrusted`` text comes from a file or keyring; raises only UsageError, whose text has nothing of it.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable

from kvdev.errors import UsageError
from kvdev.keys import salt_mark

PREFIX = "KVSALT-1:"
SALT_SIZE_BYTES = 32
_REMEDY = "`kvdev key generate --kind salt` makes one"


class KeySalt:
    """A secret that page keys are made with. Its bytes are given by ``salt`` and ``text()`` only."""

    __slots__ = ("salt",)

    def __init__(self, salt: bytes) -> None:
        if len(salt) != SALT_SIZE_BYTES:
            raise UsageError(f"salt: expected {SALT_SIZE_BYTES} bytes, got {len(salt)}")
        self.salt = bytes(salt)

    def __repr__(self) -> str:
        return f"KeySalt(mark {self.mark:08x})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeySalt) and hmac.compare_digest(self.salt, other.salt)

    __hash__ = None  # type: ignore[assignment]

    @property
    def mark(self) -> int:
        """Tells it from others, in a KV namespace's record."""
        return salt_mark(self.salt)

    @property
    def size_bytes(self) -> int:
        return len(self.salt)

    @classmethod
    def generate(cls, *, randomness: Callable[[int], bytes] = os.urandom) -> KeySalt:
        return cls(randomness(SALT_SIZE_BYTES))

    @classmethod
    def parse(cls, untrusted: str, *, where: str) -> KeySalt:
        """Read the printed form; ``where`` says in the error whose text it was."""
        text = untrusted.strip()
        digits = text.removeprefix(PREFIX)
        if digits == text or len(digits) != 2 * SALT_SIZE_BYTES or not set(digits) <= set("0123456789abcdef"):
            raise UsageError(
                f"{where}: expected one salt as {PREFIX} with {2 * SALT_SIZE_BYTES} hexadecimal digits and nothing "
                f"else; {_REMEDY}"
            )
        return cls(bytes.fromhex(digits))

    def text(self) -> str:
        """The printed form: a secret."""
        return PREFIX + self.salt.hex()
