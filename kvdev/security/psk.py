"""TLS pre-shared keys in their printed form ``NVMeTLSkey-1:hh:BASE64:``, and what TLS is given of them.

Not here: where a key is kept (``source``); TLS (``kvdev.native.tls``).
Spec: NVM Express TCP Transport 1.1 section 3.6.1; RFC 5869 (HKDF), RFC 8446 section 7.1 (HKDF-Expand-Label).
Trust: ``untrusted`` text comes from a file or keyring; raises only UsageError, whose text has nothing of it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from kvdev.errors import UsageError

PREFIX = "NVMeTLSkey-1:"
HASH_NAMES = {1: "sha256", 2: "sha384"}
_SIZES_BYTES = {1: 32, 2: 48}
_CRC_SIZE_BYTES = 4
_CONTEXT_SIZE_BYTES_MAX = 255
_REMEDY = "`kvdev key generate --kind tls-psk` makes one"


@dataclass(frozen=True)
class TlsMaterial:
    """What one TLS handshake needs: ``suite`` 1 is AES-128-GCM with SHA-256, 2 AES-256-GCM with SHA-384."""

    identity: str
    psk: bytes = field(repr=False)
    suite: int


class TlsPsk:
    """A configured key. Its text is given by ``text()`` only: never by ``str`` or ``repr``."""

    __slots__ = ("_key", "transform")

    def __init__(self, key: bytes, transform: int) -> None:
        """``transform`` is 0 where the key is used as it is, else the hash that binds it to the host's NQN."""
        if len(key) not in _SIZES_BYTES.values():
            raise UsageError(f"tls psk: expected 32 or 48 bytes, got {len(key)}")
        if transform not in (0, *HASH_NAMES) or _SIZES_BYTES.get(transform, len(key)) != len(key):
            raise UsageError(
                f"tls psk: expected 32 bytes with hash 01, 48 with 02, either with 00, got {len(key)} with "
                f"{transform:02d}"
            )
        self._key = bytes(key)
        self.transform = transform

    def __repr__(self) -> str:
        return f"TlsPsk({self.size_bytes} bytes, transform {self.transform:02d})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TlsPsk):
            return NotImplemented
        return self.transform == other.transform and hmac.compare_digest(self._key, other._key)

    __hash__ = None  # type: ignore[assignment]

    @property
    def size_bytes(self) -> int:
        return len(self._key)

    @property
    def suite(self) -> int:
        """The hash of the key, by its length, and with it the cipher suite."""
        return 1 if self.size_bytes == _SIZES_BYTES[1] else 2

    @classmethod
    def generate(cls, *, transform: int = 1, randomness: Callable[[int], bytes] = os.urandom) -> TlsPsk:
        return cls(randomness(_SIZES_BYTES.get(transform, 32)), transform)

    @classmethod
    def parse(cls, untrusted: str, *, where: str) -> TlsPsk:
        """Read the printed form; ``where`` says in the error whose text it was."""
        parts = untrusted.strip().split(":")
        if len(parts) != 4 or f"{parts[0]}:" != PREFIX or parts[3]:
            raise UsageError(
                f"{where}: expected one key as NVMeTLSkey-1:hh:BASE64: and nothing else; {_REMEDY}"
            )
        if parts[1] not in ("00", "01", "02"):
            raise UsageError(f"{where}: NVMeTLSkey-1:hh: expected 00, 01 or 02 for hh; {_REMEDY}")
        try:
            data = base64.b64decode(parts[2], validate=True)
        except (binascii.Error, ValueError):
            raise UsageError(f"{where}: NVMeTLSkey-1: expected base64 after the hash; {_REMEDY}") from None
        key, crc = data[:-_CRC_SIZE_BYTES], data[-_CRC_SIZE_BYTES:]
        try:
            found = cls(key, int(parts[1]))
        except UsageError as error:
            raise UsageError(f"{where}: {error}; {_REMEDY}") from None
        if zlib.crc32(key) != int.from_bytes(crc, "little"):
            raise UsageError(
                f"{where}: NVMeTLSkey-1: the checksum does not match: the text was cut or mistyped; copy it again"
            )
        return found

    def text(self) -> str:
        """The printed form: the key itself, for the file it is kept in."""
        data = self._key + zlib.crc32(self._key).to_bytes(_CRC_SIZE_BYTES, "little")
        return f"{PREFIX}{self.transform:02d}:{base64.b64encode(data).decode()}:"

    def retained(self, host_nqn: str) -> bytes:
        """The key that both sides keep for this host."""
        if self.transform == 0:
            return self._key
        name = HASH_NAMES[self.transform]
        return _expand_label(_extract(self._key, name), "HostNQN", host_nqn.encode(), name)

    def material(self, *, host_nqn: str, subnqn: str, version: int) -> TlsMaterial:
        """Identity and key of TLS between a host and a subsystem; ``version`` is 1, or 0 of the first revision."""
        return derive(
            self.retained(host_nqn), suite=self.suite, host_nqn=host_nqn, subnqn=subnqn, version=version
        )


def derive(retained: bytes, *, suite: int, host_nqn: str, subnqn: str, version: int) -> TlsMaterial:
    """Identity and TLS PSK of a retained key."""
    name = HASH_NAMES[suite]
    identity = f"NVMe{version}R{suite:02d} {host_nqn} {subnqn}"
    context = identity
    if version == 1:
        message = f"{host_nqn} {subnqn} NVMe-over-Fabrics".encode()
        digest = base64.b64encode(hmac.digest(retained, message, name)).decode()
        identity = f"{identity} {digest}"
        context = f"{suite:02d} {digest}"
    if len(context.encode()) > _CONTEXT_SIZE_BYTES_MAX:
        raise UsageError(
            f"tls psk: {subnqn}: the two NQNs are too long for an identity of version 0; shorten one"
        )
    return TlsMaterial(
        identity, _expand_label(_extract(retained, name), "nvme-tls-psk", context.encode(), name), suite
    )


def _extract(key: bytes, name: str) -> bytes:
    """HKDF-Extract with a salt of zeroes."""
    return hmac.digest(bytes(hmac.new(b"", digestmod=name).digest_size), key, name)


def _expand_label(key: bytes, label: str, context: bytes, name: str) -> bytes:
    """HKDF-Expand-Label to the length of the hash, which is one block."""
    size = hmac.new(b"", digestmod=name).digest_size
    full = b"tls13 " + label.encode()
    info = size.to_bytes(2, "big") + bytes((len(full),)) + full + bytes((len(context),)) + context
    return hmac.digest(key, info + b"\1", name)
