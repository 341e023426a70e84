"""TLS of one association: its key, read and derived for this host and subsystem, and failures with their remedy.

Not here: TLS itself (``kvdev.native.tls``, the C core); keys (``kvdev.security.psk``).
Spec: NVM Express TCP Transport 1.1 section 3.6.1.
"""

from __future__ import annotations

import errno

from kvdev.errors import ConnectError, KvdevError
from kvdev.native.admin import AdminThread
from kvdev.native.queue import HostQpair
from kvdev.native.tls import TlsHost, TlsKey
from kvdev.security.source import read_tls_psk
from kvdev.uri import KeySource, TcpAddress

IDENTITY_VERSIONS = (1, 0)
"""In the order they are tried: some targets know only the first revision's."""


class TlsHandshakeError(ConnectError):
    """The two sides did not agree on TLS; with another version of the identity they may."""


class SecureTransport:
    """The key that all connections of an association use; needed until the last of them is made."""

    def __init__(
        self,
        source: KeySource,
        *,
        version: int,
        host_nqn: str,
        subnqn: str,
        address: TcpAddress,
        admin: AdminThread,
    ) -> None:
        """Reads the key. Raises UsageError, or UnsupportedError where there is no OpenSSL."""
        material = read_tls_psk(source, field="tls-psk").material(
            host_nqn=host_nqn, subnqn=subnqn, version=version
        )
        self._identity = f"NVMe{version}R{material.suite:02d}"
        self._host_nqn = host_nqn
        self._subnqn = subnqn
        self._address = address
        self._tls = TlsHost(admin.tls_pump, TlsKey(material.identity, material.psk, material.suite))

    def protect(self, qpair: HostQpair) -> None:
        """Let a queue pair that is not connected yet go over TLS."""
        qpair.set_tls(self._tls)

    def close(self) -> None:
        self._tls.close()

    def explain(self, error: KvdevError, qpair: HostQpair) -> KvdevError:
        """The failure of connecting a queue pair, where TLS is its reason; else the same error."""
        info = qpair.tls_info
        if info is None or info.tag:
            return error  # both sides agreed on TLS
        if info.is_version_refused:
            reason = (
                f"the listener does not speak TLS 1.3; leave out tls-psk, or name the port of {self._subnqn} "
                f"that does"
            )
        elif info.state == "handshake" and not info.error:
            reason = f"the handshake does not end ({error}); does the listener speak TLS?"
        else:
            reason = (
                f"{info.error or 'the connection ended in the handshake'}; check that tls-psk is the key that the "
                f"target has for host {self._host_nqn} in {self._subnqn} (identity {self._identity}), and that the "
                f"listener speaks TLS"
            )
        return TlsHandshakeError(
            f"{qpair.where}: TLS: {reason}", errno=errno.ECONNABORTED, trid=str(self._address)
        )
