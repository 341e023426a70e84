"""TLS of the embedded target: the keys of all hosts, given to the listeners, and who came in with which.

Not here: TLS (``kvdev.native.tls``); the derivation of keys (``kvdev.security.psk``).
Spec: NVM Express TCP Transport 1.1 section 3.6.1.
Threads: under the service's lock.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from kvdev.errors import KvdevError, UnsupportedError
from kvdev.native.tls import TlsKey, TlsListener, TlsPump
from kvdev.security.source import read_tls_psk
from kvdev.target.model import DISCOVERY_NQN, FileKey, Subsystem
from kvdev.uri import KeySource

log = logging.getLogger("kvdev.target")

IDENTITY_VERSIONS = (1, 0)


@dataclass(frozen=True)
class TlsPeer:
    """Whose key a connection came in with."""

    subnqn: str
    host_nqn: str

    def may_connect(self, subnqn: str, host_nqn: str) -> bool:
        """Its own subsystem as itself; and as itself to discovery, which says what this host may see."""
        return host_nqn == self.host_nqn and subnqn in (self.subnqn, DISCOVERY_NQN)


class SecureListeners:
    """What the listeners with TLS accept; made with the first of them."""

    def __init__(self) -> None:
        """Raises OSError where this machine has no OpenSSL."""
        try:
            self._pump = TlsPump()
        except UnsupportedError as error:
            raise OSError(errno.EOPNOTSUPP, str(error)) from error
        self.listener = TlsListener(self._pump)
        self._tags: dict[TlsPeer, int] = {}
        self._peers: dict[int, TlsPeer] = {}

    def close(self) -> None:
        """To be called when no listener uses it any more."""
        self.listener.close()
        self._pump.close()

    def peer(self, tag: int) -> TlsPeer | None:
        return self._peers.get(tag)

    def update(self, subsystems: Iterable[Subsystem]) -> None:
        """Read the keys of all hosts; one that cannot be read is logged and lets nobody in."""
        keys: list[TlsKey] = []
        for subsystem in subsystems:
            for host_nqn, host_keys in subsystem.host_keys.items():
                if host_keys.psk is not None:
                    # With its key a host may also ask the discovery service, by that one's name.
                    for nqn in (subsystem.nqn, DISCOVERY_NQN):
                        keys += self._keys(TlsPeer(nqn, host_nqn), host_keys.psk)
        self.listener.set_keys(keys)

    def _keys(self, peer: TlsPeer, key: FileKey) -> list[TlsKey]:
        # A number is never another peer's later: a connection may outlive its key.
        tag = self._tags.setdefault(peer, len(self._tags) + 1)
        self._peers[tag] = peer
        found: list[TlsKey] = []
        try:
            psk = read_tls_psk(KeySource("file", key.path), field=f"psk {key.name}")
            for version in IDENTITY_VERSIONS:
                made = psk.material(host_nqn=peer.host_nqn, subnqn=peer.subnqn, version=version)
                found.append(TlsKey(made.identity, made.psk, made.suite, tag))
        except KvdevError as error:
            log.error("target: host %s of %s: TLS: %s", peer.host_nqn, peer.subnqn, error)
        return found
