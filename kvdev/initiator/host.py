"""Who this host is: one stable host NQN and host identifier for every controller.

Not here: sending them (``kvdev.initiator.controller``).
Spec: NVM Express Base, Connect command (HOSTNQN, HOSTID); host NQN and HOSTID belong one to one.
Trust: files are untrusted; raises only UsageError for bad contents.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvdev.errors import UsageError
from kvdev.files import open_kept, read_regular
from kvdev.uri import check_nqn

SYSTEM_DIR = Path("/etc/nvme")
STATE_FILE_NAME = "host.json"
FILE_SIZE_BYTES_MAX = 4096
_NQN_UUID_PREFIX = "nqn.2014-08.org.nvmexpress:uuid:"
# Fixed for ever: it makes the identifier that belongs to a host NQN without a UUID in it.
_HOSTID_NAMESPACE = uuid.UUID("6c1f2a55-1f0b-5d0e-9a53-0d6a1c7f2e44")


@dataclass(frozen=True)
class HostIdentity:
    """A valid host NQN with its 16-byte identifier; ``source`` says where they came from."""

    host_nqn: str
    host_id: uuid.UUID
    source: str = "given"

    def __post_init__(self) -> None:
        check_nqn(self.host_nqn, field="host NQN")
        if self.host_id.int == 0:
            raise UsageError("host id: expected a UUID other than all zeroes; make one with `uuidgen`")

    @property
    def host_id_bytes(self) -> bytes:
        """The identifier as the Connect data carries it."""
        return self.host_id.bytes

    def for_this_process(self) -> HostIdentity:
        """The same host NQN with a new host identifier.

        A reservation knows hosts by their identifier: one that a process has to itself can be taken from it
        without touching others of its host.
        """
        return replace(self, host_id=uuid.uuid4())

    @classmethod
    def of(
        cls, host_nqn: str, *, host_id: str | uuid.UUID | None = None, source: str = "given"
    ) -> HostIdentity:
        """An identity from its NQN; the identifier is derived from the NQN when none is given."""
        check_nqn(host_nqn, field="host NQN")
        if host_id is None:
            return cls(host_nqn, _derive_host_id(host_nqn), source)
        if isinstance(host_id, str):
            host_id = _parse_host_id(host_id, where="host id")
        return cls(host_nqn, host_id, source)

    @classmethod
    def load(
        cls,
        *,
        host_nqn: str | None = None,
        host_id: str | None = None,
        system_dir: Path = SYSTEM_DIR,
        state_dir: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> HostIdentity:
        """The identity of this host and user, made and kept on first use.

        In order: the arguments; ``hostnqn`` and ``hostid`` in ``system_dir``, which the Linux initiator uses
        too; this user's state file. Blocks on file I/O only.
        """
        if host_nqn is not None:
            return cls.of(host_nqn, host_id=host_id)
        system = _load_system(system_dir)
        if system is not None and host_id is None:
            return system
        if host_id is not None:
            own_id = _parse_host_id(host_id, where="host id")
            return cls(f"{_NQN_UUID_PREFIX}{own_id}", own_id)
        return _load_state(state_dir or _state_dir(environ))


def _derive_host_id(host_nqn: str) -> uuid.UUID:
    if host_nqn.startswith(_NQN_UUID_PREFIX):
        return uuid.UUID(host_nqn[len(_NQN_UUID_PREFIX) :])
    return uuid.uuid5(_HOSTID_NAMESPACE, host_nqn)


def _parse_host_id(text: str, *, where: str) -> uuid.UUID:
    try:
        host_id = uuid.UUID(text.strip())
    except ValueError:
        raise UsageError(
            f"{where}: expected a UUID, got {text.strip()!r}; write one with `uuidgen` or give the host id"
        ) from None
    if host_id.int == 0:
        raise UsageError(f"{where}: expected a UUID other than all zeroes; write one with `uuidgen`")
    return host_id


def _read_text(path: Path) -> str | None:
    """The file's text, None when it is not there."""
    try:
        data = read_regular(path, FILE_SIZE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read the host identity: {error.strerror}; give the host NQN"
        ) from error
    if len(data) > FILE_SIZE_BYTES_MAX:
        raise UsageError(
            f"{path}: expected at most {FILE_SIZE_BYTES_MAX} bytes of host identity; remove or fix it"
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: expected UTF-8 text; remove or fix the file") from None


def _load_system(system_dir: Path) -> HostIdentity | None:
    nqn_path, id_path = system_dir / "hostnqn", system_dir / "hostid"
    nqn_text, id_text = _read_text(nqn_path), _read_text(id_path)
    if nqn_text is None:
        # A hostid alone still names this host: its NQN in the UUID form belongs to it.
        if id_text is None:
            return None
        host_id = _parse_host_id(id_text, where=str(id_path))
        return HostIdentity(f"{_NQN_UUID_PREFIX}{host_id}", host_id, str(id_path))
    host_nqn = nqn_text.strip()
    check_nqn(host_nqn, field=str(nqn_path))
    if id_text is None:
        return HostIdentity(host_nqn, _derive_host_id(host_nqn), str(nqn_path))
    return HostIdentity(host_nqn, _parse_host_id(id_text, where=str(id_path)), str(nqn_path))


def _state_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_STATE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "kvdev"
    home = environ.get("HOME", "")
    if not home.startswith("/"):
        raise UsageError(
            "host identity: neither XDG_STATE_HOME nor HOME is an absolute path; "
            "set one, or give the host NQN"
        )
    return Path(home) / ".local" / "state" / "kvdev"


def _load_state(state_dir: Path) -> HostIdentity:
    path = state_dir / STATE_FILE_NAME
    text = _read_text(path)
    if text is None:
        try:
            _create_state(path)
        except OSError as error:
            raise UsageError(
                f"{path}: cannot keep the host identity: {error.strerror}; "
                f"set XDG_STATE_HOME to a writable folder, or give the host NQN"
            ) from error
        text = _read_text(path)
    try:
        record = json.loads(text or "")
        host_nqn, id_text = record["host_nqn"], record["host_id"]
        if not isinstance(host_nqn, str) or not isinstance(id_text, str):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{path}: expected JSON with host_nqn and host_id; remove the file to get a new host identity"
        ) from None
    check_nqn(host_nqn, field=f"{path}: host_nqn")
    return HostIdentity(host_nqn, _parse_host_id(id_text, where=f"{path}: host_id"), str(path))


def _create_state(path: Path) -> None:
    """Write a new identity; where two processes race, the first one's stays and both use it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True)
        path.parent.chmod(0o700)  # whatever the umask
    except FileExistsError:
        pass
    host_id = uuid.uuid4()
    record = {"host_nqn": f"{_NQN_UUID_PREFIX}{host_id}", "host_id": str(host_id)}
    draft = path.with_name(f".{path.name}.{os.getpid()}.{host_id.hex[:8]}")
    descriptor = open_kept(draft, os.O_EXCL)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(record, file)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            return
    finally:
        draft.unlink(missing_ok=True)
