"""DH-HMAC-CHAP with the Linux kernel, as target of our host and as host of our target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdev.block.device import read_blocks, write_blocks
from kvdev.clock import Deadline
from kvdev.errors import AuthenticationError, KvdevError
from kvdev.initiator.host import HostIdentity
from kvdev.initiator.options import ControllerOptions
from kvdev.security.secret import DhchapSecret
from kvdev.security.source import write_key_file
from kvdev.session import Session
from kvdev.target.model import FileKey, HostKeys, Transport
from kvdev.target.service import TargetOptions
from kvdev.testing.target import running_target
from kvdev.uri import KeySource
from kvdev.wire.auth import DhGroupId, HashId
from tests.interop.conftest import Lab, Nvmet

pytestmark = pytest.mark.interop

HOST = HostIdentity.of("nqn.2024-01.io.example:host")
LINUX_HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
"""Of the lab's initiator."""
HOST_SECRET = DhchapSecret(bytes(range(32)), 1)
CTRL_SECRET = DhchapSecret(bytes(range(100, 164)), 3)
# The emulated guest takes ten seconds for an exchange in the largest groups.
COMBINATIONS = [
    (HashId.SHA256, DhGroupId.NULL),
    (HashId.SHA384, DhGroupId.FFDHE2048),
    (HashId.SHA512, DhGroupId.FFDHE3072),
    (HashId.SHA256, DhGroupId.FFDHE4096),
]
PATIENT_S = 60.0


def key_source(folder: Path, name: str, secret: DhchapSecret) -> KeySource:
    path = folder / name
    if not path.exists():
        write_key_file(str(path), secret.text(), field="test")
    return KeySource("file", str(path))


@pytest.fixture(scope="module")
def nvmet(auth_lab: Lab) -> Iterator[Nvmet]:
    """A Linux target that wants both secrets of our host."""
    with auth_lab.nvmet(namespaces=1, mib=16) as target:
        host = f"hosts/{HOST.host_nqn}"
        subsystem = f"subsystems/{target.nqn}"
        target.shell(
            f"cd /sys/kernel/config/nvmet && mkdir {host} && echo '{HOST_SECRET.text()}' >{host}/dhchap_key && "
            f"echo '{CTRL_SECRET.text()}' >{host}/dhchap_ctrl_key && echo 0 >{subsystem}/attr_allow_any_host && "
            f"ln -s $PWD/{host} {subsystem}/allowed_hosts/"
        )
        yield target


def options(
    folder: Path, *, controller: DhchapSecret = CTRL_SECRET, host: DhchapSecret = HOST_SECRET
) -> ControllerOptions:
    return ControllerOptions(
        dhchap_key=key_source(folder, "host", host),
        dhchap_ctrl_key=key_source(folder, "controller", controller),
        ctrl_loss_tmo_s=0,
        io_queue_count=2,
        connect_timeout_s=PATIENT_S,
        admin_timeout_s=PATIENT_S,
    )


@pytest.mark.parametrize(("hash_id", "group"), COMBINATIONS)
def test_our_host_when_linux_target_has_keys_then_both_authenticate(
    nvmet: Nvmet, tmp_path: Path, hash_id: HashId, group: DhGroupId
) -> None:
    host = f"/sys/kernel/config/nvmet/hosts/{HOST.host_nqn}"
    nvmet.shell(
        f"echo 'hmac({hash_id.algorithm})' >{host}/dhchap_hash; echo {group.name.lower()} >{host}/dhchap_dhgroup"
    )
    with Session(host=HOST, options=options(tmp_path)) as kv:
        device = kv.open_device(nvmet.uri(1), deadline=Deadline.after(2 * PATIENT_S))
        pattern = bytes((hash_id, group)) * 256
        write_blocks(device, 3, pattern, Deadline.after(PATIENT_S))
        kv.controller(nvmet.uri()).reauthenticate(deadline=Deadline.after(PATIENT_S))
        assert bytes(read_blocks(device, 3, 1, Deadline.after(PATIENT_S))) == pattern


@pytest.mark.parametrize(
    ("wrong", "text"), [("host", "check that dhchap-key"), ("controller", "check that dhchap-ctrl-key")]
)
def test_our_host_when_a_secret_is_wrong_then_refused_with_the_remedy(
    nvmet: Nvmet, tmp_path: Path, wrong: str, text: str
) -> None:
    secrets = {"host": HOST_SECRET, "controller": CTRL_SECRET, wrong: DhchapSecret(bytes(32))}
    with Session(host=HOST, options=options(tmp_path, **secrets)) as kv:
        with pytest.raises(KvdevError, match=text) as caught:
            kv.controller(nvmet.uri(), deadline=Deadline.after(2 * PATIENT_S))
        assert wrong == "host" or isinstance(caught.value, AuthenticationError)


JOB = """set -e
secrets="--dhchap-secret=HOST_SECRET --dhchap-ctrl-secret=CTRL_SECRET"
for port in PORTS; do
  nvme connect -t tcp -a $ADDR -s $port -n $NQN --nr-io-queues=2 $secrets
  n=0; until [ -b /dev/nvme0n1 ] || [ $n -ge 100 ]; do sleep 0.1; n=$((n + 1)); done
  dd if=/dev/urandom of=/tmp/a bs=64k count=4
  dd if=/tmp/a of=/dev/nvme0n1 bs=64k oflag=direct
  dd if=/dev/nvme0n1 of=/tmp/b bs=64k count=4 iflag=direct
  cmp /tmp/a /tmp/b
  cat /sys/class/nvme/nvme0/dhchap_secret >/dev/null
  nvme disconnect -n $NQN
done
for port in PORTS; do
  ! nvme connect -t tcp -a $ADDR -s $port -n $NQN --dhchap-secret=WRONG
  ! nvme connect -t tcp -a $ADDR -s $port -n $NQN
  ! nvme connect -t tcp -a $ADDR -s $port -n $NQN --dhchap-secret=HOST_SECRET --dhchap-ctrl-secret=WRONG
  break
done
! nvme list-subsys | grep $NQN
echo all-done
"""


def test_linux_host_when_our_target_has_keys_then_both_authenticate(auth_lab: Lab, tmp_path: Path) -> None:
    keys = HostKeys(
        FileKey("h", key_source(tmp_path, "host", HOST_SECRET).name),
        FileKey("c", key_source(tmp_path, "controller", CTRL_SECRET).name),
    )
    with contextlib.ExitStack() as stack:
        ports = []
        for hash_id, group in COMBINATIONS:
            target = stack.enter_context(
                running_target(
                    hosts=[],
                    # A transaction may take as long as the keep alive timeout; the guest is emulated.
                    transport=Transport(min_kato=60_000),
                    options=TargetOptions(dhchap_digests=(hash_id,), dhchap_dhgroups=(group,)),
                )
            )
            target.allow_host(LINUX_HOST_NQN, keys)
            ports.append(target.port)
        job = tmp_path / "job.sh"
        text = JOB.replace("PORTS", " ".join(map(str, ports)))
        text = text.replace("HOST_SECRET", HOST_SECRET.text()).replace("CTRL_SECRET", CTRL_SECRET.text())
        job.write_text(text.replace("WRONG", DhchapSecret(bytes(32)).text()))
        out = auth_lab.initiator(ports[0], target.nqn, out=tmp_path / "out", job=job, limit_s=300)
        assert "all-done" in out
        assert target.service.defect_count == 0
