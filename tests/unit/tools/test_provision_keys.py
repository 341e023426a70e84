"""Keys in the file: names and paths only; what people paste is never repeated; wrong files are found by the plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdev.errors import UsageError
from kvdev.security.psk import TlsPsk
from kvdev.security.secret import DhchapSecret
from kvdev.target.model import TargetModel
from kvdev.target.rpc_methods import RpcMethods
from kvdev.target.serve import EmbeddedTarget
from kvdev.testing.target_backend import MemoryBackend
from kvdev_tools.main import run
from kvdev_tools.provision.document import build_deployment
from kvdev_tools.provision.source import load_text
from spdk_rpc import Client
from spdk_rpc.plan import Id, Kind, Observed, Resource, plan_state
from spdk_rpc.plan.resource import changed_names, create_calls, state_of, update_calls
from tests.unit.tools.test_provision_cli import HOST_NQN, NQN, call, free_port, refused_plan

PSK = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:"
CHAP = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"


def text_of(rpc: str, *, keys: str = "{}", host: str = HOST_NQN, listener: str = '"127.0.0.1:4420"') -> str:
    return f"""\
version: 1
name: keyed
targets:
  array0:
    rpc: {rpc}
    keys: {keys}
    bdevs:
      m0: {{malloc: {{size: 16MiB}}}}
    subsystems:
      {NQN}:
        hosts: [{host}]
        listeners: [{listener}]
        namespaces: {{1: m0}}
"""


@pytest.mark.parametrize(
    ("keys", "host"),
    [
        (f'{{k: "{PSK}"}}', HOST_NQN),
        (f'{{k: ["{PSK}"]}}', HOST_NQN),
        (f'{{"{PSK}": /k}}', HOST_NQN),
        (f'{{k: /k, k2: "{CHAP}"}}', HOST_NQN),
        ("{k: /k}", f'{{host: "{HOST_NQN}", psk: "{PSK}"}}'),
        ("{k: /k}", f'{{host: "{HOST_NQN}", dhchap_key: "{CHAP}"}}'),
        ("{k: /k}", f'{{host: "{HOST_NQN}", dhchap_key: k, dhchap_ctrlr_key: "{CHAP}"}}'),
        ("{k: /k}", f'{{host: "{CHAP}"}}'),
        ("{k: /k}", f'{{host: "{HOST_NQN}", "{PSK}": k}}'),
        ("{k: /k}", f'{{host: "{HOST_NQN}", psk: [{PSK}'),
        (f"{{k: !{CHAP} x}}", HOST_NQN),
    ],
)
def test_a_key_pasted_into_the_file_is_refused_and_never_repeated(
    keys: str, host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text_of("/nobody.sock", keys=keys, host=host))
    assert run(["provision", "plan", str(path)]) == 2
    shown = capsys.readouterr()
    assert f"{path}:" in shown.err
    for secret in (PSK, CHAP):
        for part in secret.split(":")[2:]:
            assert not part or part not in shown.out + shown.err


@pytest.fixture
def rpc(tmp_path: Path) -> Iterator[str]:
    with EmbeddedTarget(tmp_path / "rpc.sock") as target:
        yield target.rpc_socket


def test_a_key_file_that_spdk_would_refuse_is_found_by_the_plan(
    rpc: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, path = tmp_path / "k0", tmp_path / "site.yaml"
    path.write_text(text_of(rpc, keys=f"{{k0: {key}}}"))
    where = f"{path}:6:12: targets.array0.keys.k0: key k0: file {key}"
    assert f"{where}: expected a key file, there is none" in refused_plan(capsys, str(path))
    key.write_text(PSK)
    for mode in (0o640, 0o604, 0o660):
        key.chmod(mode)
        text = refused_plan(capsys, str(path))
        assert f"{where}: expected mode 0600, got {mode:04o}; chmod 600" in text
    key.chmod(0o600)
    assert not call(capsys, "plan", str(path))["problems"]
    key.unlink()
    key.mkdir(mode=0o700)
    assert f"{where}: expected a regular file" in refused_plan(capsys, str(path))


def test_keys_are_applied_by_name_and_their_content_is_in_no_output(
    rpc: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, path = tmp_path / "k0", tmp_path / "site.yaml"
    key.write_text(PSK)
    key.chmod(0o600)
    path.write_text(
        text_of(rpc, keys=f"{{k0: {key}}}").replace('        listeners: ["127.0.0.1:4420"]\n', "")
    )
    config = tmp_path / "spdk.json"
    shown: list[Any] = [
        call(capsys, "plan", str(path)),
        call(capsys, "apply", str(path)),
        call(capsys, "status", str(path)),
        call(capsys, "export", str(path), "array0", "-o", str(config)),
        call(capsys, "adopt", "--target", f"array0={rpc}"),
        config.read_text(),
    ]
    text = json.dumps(shown)
    assert PSK.split(":")[2] not in text and str(key) in text
    assert call(capsys, "plan", str(path))["is_empty"]
    adopted = shown[4]["text"]
    assert build_deployment(load_text(adopted)).endpoints[0].key_paths == {"k0": str(key)}


def keyed_deployment() -> Any:
    host = f'{{host: "{HOST_NQN}", psk: k0, dhchap_key: k1, dhchap_ctrlr_key: k2}}'
    listener = '{address: "127.0.0.1:4420", secure_channel: true}'
    text = text_of("/a.sock", keys="{k0: /k0, k1: /k1, k2: /k2}", host=host, listener=listener)
    text += f"""\
hosts:
  gpu0:
    rpc: /b.sock
    nqn: {HOST_NQN}
    keys: {{p: /p, c: /c, d: /d}}
    controllers:
      N0: {{target: array0, subsystem: "{NQN}", psk: p, dhchap_key: c, dhchap_ctrlr_key: d}}
"""
    return build_deployment(load_text(text))


def test_keys_reach_every_call_that_takes_them_after_the_keyring_has_them() -> None:
    target, host = keyed_deployment().endpoints
    observed = Observed(methods=ALL_METHODS)
    for endpoint, method, names in (
        (target, "nvmf_subsystem_add_host", {"psk": "k0", "dhchap_key": "k1", "dhchap_ctrlr_key": "k2"}),
        (host, "bdev_nvme_attach_controller", {"psk": "p", "dhchap_key": "c", "dhchap_ctrlr_key": "d"}),
    ):
        arriving = {"N0n1": 4096}
        plan = plan_state(endpoint.desired, observed, arriving=arriving)
        calls = [each for step in plan.steps for each in step.calls]
        methods = [each.method for each in calls]
        used = next(each for each in calls if each.method == method)
        assert names.items() <= dict(used.params).items()
        last_key = max(index for index, each in enumerate(methods) if each == "keyring_file_add_key")
        assert methods.count("keyring_file_add_key") == 3 and last_key < methods.index(method)
    listener = next(own for own in target.desired if own.kind is Kind.LISTENER)
    (added,) = create_calls(target.desired[listener])
    assert added.method == "nvmf_subsystem_add_listener" and added.params["secure_channel"] is True


ALL_METHODS = frozenset(RpcMethods(TargetModel(MemoryBackend())).names())


def test_what_changes_in_place_and_what_has_to_be_made_anew() -> None:
    own = Id(Kind.HOST, HOST_NQN, NQN)
    was = Resource(own, {"psk": "k0", "dhchap_key": "k1", "dhchap_ctrlr_key": None})
    rotated = Resource(own, {"psk": "k0", "dhchap_key": "k9", "dhchap_ctrlr_key": "k8"})
    (changed,) = update_calls(was, rotated) or []
    assert changed.method == "nvmf_subsystem_set_keys"
    assert changed.params == {
        "nqn": NQN,
        "host": HOST_NQN,
        "dhchap_key": "k9",
        "dhchap_ctrlr_key": "k8",
    }
    assert update_calls(was, Resource(own, {"psk": "k7", "dhchap_key": "k1"})) is None
    # A key that was taken out of the file is a difference too: the host would still be asked for it.
    bare = Resource(own, {"psk": "k0", "dhchap_key": None, "dhchap_ctrlr_key": None})
    (changed,) = update_calls(was, bare) or []
    assert (changed.method, changed.params) == ("nvmf_subsystem_set_keys", {"nqn": NQN, "host": HOST_NQN})
    attached = Resource(Id(Kind.CONTROLLER, "N0"), {"paths": ("a:1",), "dhchap_key": "k1"})
    assert changed_names(attached, Resource(attached.id, {"paths": ("a:1",), "dhchap_key": None})) == [
        "dhchap_key"
    ]
    observed = Observed(methods=ALL_METHODS, state=state_of([was]))
    (problem,) = plan_state(state_of([Resource(own, {"psk": "k7"})]), observed).problems
    assert f"--replace host:{NQN}@{HOST_NQN}" in str(problem)


# --- a host that has to prove itself --------------------------------------------------------------


def proven_text(rpc: str, port: int, target_key: Path, host_key: Path) -> str:
    return f"""\
version: 1
name: proven
targets:
  array0:
    rpc: {rpc}
    keys: {{to-gpu0: {target_key}}}
    bdevs:
      m0: {{malloc: {{size: 16MiB}}}}
    subsystems:
      {NQN}:
        hosts: [{{host: gpu0, dhchap_key: to-gpu0}}]
        listeners: ["127.0.0.1:{port}"]
        namespaces: {{1: m0}}
hosts:
  gpu0:
    nqn: {HOST_NQN}
    keys: {{own: {host_key}}}
    dhchap_key: own
    engines:
      llama: {{volume: pool, geometry: small}}
volumes:
  pool:
    members: [{{target: array0, subsystem: "{NQN}"}}]
"""


def make_key(path: Path, fill: int) -> str:
    secret = DhchapSecret(bytes([fill]) * 32).text()
    path.write_text(secret)
    path.chmod(0o600)
    return secret


def test_a_volume_is_made_and_seen_as_a_host_that_proves_itself(
    rpc: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target_key, host_key, wrong_key = tmp_path / "t", tmp_path / "h", tmp_path / "w"
    secret = make_key(target_key, 7)
    assert make_key(host_key, 7) == secret and make_key(wrong_key, 9) != secret
    path, port = tmp_path / "site.yaml", free_port()
    path.write_text(proven_text(rpc, port, target_key, host_key))
    config = tmp_path / "spdk.json"
    shown = [
        call(capsys, "plan", str(path)),
        call(capsys, "apply", str(path)),
        call(capsys, "status", str(path)),
        call(capsys, "export", str(path), "array0", "-o", str(config)),
        config.read_text(),
    ]
    (volume,) = shown[2]["volumes"]
    assert volume["health"] == "ok" and [each["name"] for each in volume["kv_namespaces"]] == ["llama.0"]
    assert secret.split(":")[2] not in json.dumps(shown)
    with Client(rpc) as client:
        (subsystem,) = client.call("nvmf_get_subsystems", {"nqn": NQN})
        assert subsystem["hosts"] == [{"nqn": HOST_NQN, "dhchap_key": "to-gpu0"}]
    assert call(capsys, "plan", str(path))["is_empty"]

    # Another secret, or none, and the volume is out of reach: nobody is let in by its name alone.
    path.write_text(proven_text(rpc, port, target_key, wrong_key))
    assert "volume pool" in refused_plan(capsys, str(path))
    # Somebody else's array, seen as the same host.
    vendor = proven_text(rpc, port, target_key, host_key)
    vendor = vendor.replace(f"    rpc: {rpc}\n    keys: {{to-gpu0: {target_key}}}\n", "    managed: false\n")
    vendor = vendor.replace("    bdevs:\n      m0: {malloc: {size: 16MiB}}\n", "").replace(
        "{1: m0}", "{1: {}}"
    )
    vendor = vendor.replace("        hosts: [{host: gpu0, dhchap_key: to-gpu0}]\n", "")
    path.write_text(vendor + "    host: gpu0\n")
    assert call(capsys, "plan", str(path))["is_empty"]
    # Rotated: the new name is put in place in the target, and the host's file follows it.
    path.write_text(proven_text(rpc, port, target_key, host_key).replace("to-gpu0", "to-gpu0.2"))
    planned = call(capsys, "plan", str(path))
    assert [each["method"] for each in planned["calls"]] == [
        "keyring_file_add_key",
        "nvmf_subsystem_set_keys",
    ]
    assert call(capsys, "apply", str(path))["is_done"] and call(capsys, "plan", str(path))["is_empty"]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("    dhchap_key: own\n", "", "demands a dhchap_key of"),
        ("dhchap_key: own", "dhchap_key: other", "'other': expected a name in keys of host gpu0"),
        ("dhchap_key: own", "dhchap_ctrlr_key: own", "needs a dhchap_key: the host proves itself first"),
        (f"    nqn: {HOST_NQN}\n", "", "needs an nqn: the secret belongs to it"),
    ],
)
def test_a_host_that_could_not_prove_itself_is_found_in_the_file(old: str, new: str, text: str) -> None:
    whole = proven_text("/a.sock", 4420, Path("/t"), Path("/h"))
    assert old in whole
    with pytest.raises(UsageError, match=text):
        build_deployment(load_text(whole.replace(old, new, 1)))


def test_what_a_host_proves_itself_with_holds_for_its_controllers() -> None:
    text = proven_text("/a.sock", 4420, Path("/t"), Path("/h")).partition("    engines:")[0]
    text += f"    rpc: /b.sock\n    controllers:\n      N0: {{target: array0, subsystem: '{NQN}'}}\n"
    host = build_deployment(load_text(text)).endpoints[1]
    assert host.desired[Id(Kind.CONTROLLER, "N0")].attributes["dhchap_key"] == "own"
    with pytest.raises(UsageError, match="demands a dhchap_key of"):
        build_deployment(load_text(text.replace("    dhchap_key: own\n", "")))


def encrypted_text(rpc: str, port: int, target_key: Path, host_key: Path) -> str:
    """The same site over TLS: the listener takes nothing else, and nobody proves anything beyond the key."""
    text = proven_text(rpc, port, target_key, host_key).replace("dhchap_key:", "psk:")
    return text.replace(
        f'listeners: ["127.0.0.1:{port}"]',
        f'listeners: [{{address: "127.0.0.1:{port}", secure_channel: true}}]',
    )


def make_psk(path: Path, fill: int) -> str:
    text = TlsPsk(bytes([fill]) * 32, 1).text()
    path.write_text(text)
    path.chmod(0o600)
    return text


def test_a_volume_is_made_and_seen_over_tls(
    rpc: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target_key, host_key, wrong_key = tmp_path / "t", tmp_path / "h", tmp_path / "w"
    secret = make_psk(target_key, 7)
    assert make_psk(host_key, 7) == secret and make_psk(wrong_key, 9) != secret
    path, port = tmp_path / "site.yaml", free_port()
    path.write_text(encrypted_text(rpc, port, target_key, host_key))
    shown = [
        call(capsys, "plan", str(path)),
        call(capsys, "apply", str(path)),
        call(capsys, "status", str(path)),
    ]
    (volume,) = shown[2]["volumes"]
    assert volume["health"] == "ok" and [each["name"] for each in volume["kv_namespaces"]] == ["llama.0"]
    assert secret.split(":")[2] not in json.dumps(shown)
    assert call(capsys, "plan", str(path))["is_empty"]
    # A volume that the file does not name any more is looked for over TLS too.
    less = encrypted_text(rpc, port, target_key, host_key).partition("volumes:")[0]
    path.write_text(less.replace("    engines:\n      llama: {volume: pool, geometry: small}\n", ""))
    assert "pool" in json.dumps(call(capsys, "plan", str(path)))

    path.write_text(encrypted_text(rpc, port, target_key, wrong_key))
    assert "volume pool" in refused_plan(capsys, str(path))
    # Somebody else's array that takes TLS only.
    vendor = encrypted_text(rpc, port, target_key, host_key)
    vendor = vendor.replace(f"    rpc: {rpc}\n    keys: {{to-gpu0: {target_key}}}\n", "    managed: false\n")
    vendor = vendor.replace("    bdevs:\n      m0: {malloc: {size: 16MiB}}\n", "").replace(
        "{1: m0}", "{1: {}}"
    )
    vendor = vendor.replace("        hosts: [{host: gpu0, psk: to-gpu0}]\n", "")
    path.write_text(vendor + "    host: gpu0\n")
    assert call(capsys, "plan", str(path))["is_empty"]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("    psk: own\n", "", "takes TLS only; name the psk of"),
        ("    psk: own\n", "    psk: other\n", "'other': expected a name in keys of host gpu0"),
        (f"    nqn: {HOST_NQN}\n", "", "needs an nqn: the secret belongs to it"),
        (
            f'    members: [{{target: array0, subsystem: "{NQN}"}}]',
            f'    members: [{{target: array0, subsystem: "{NQN}"}}, "tcp://127.0.0.2:4420/{NQN}2?nsid=1"]',
            "takes TLS only and tcp://127.0.0.2:4420/",
        ),
    ],
)
def test_a_host_that_could_not_encrypt_is_found_in_the_file(old: str, new: str, text: str) -> None:
    whole = encrypted_text("/a.sock", 4420, Path("/t"), Path("/h"))
    assert old in whole
    with pytest.raises(UsageError, match=text):
        build_deployment(load_text(whole.replace(old, new, 1)))


def test_a_subsystem_with_open_and_encrypted_listeners_is_reached_without_tls_and_attached_by_one_sort() -> (
    None
):
    text = encrypted_text("/a.sock", 4420, Path("/t"), Path("/h")).partition("    engines:")[0]
    text = text.replace("secure_channel: true}]", 'secure_channel: true}, "127.0.0.1:4421"]')
    controller = f"    controllers:\n      N0: {{target: array0, subsystem: '{NQN}'%s}}\n"
    served = build_deployment(load_text(text)).subsystems[NQN]
    assert served.reach == "127.0.0.1:4421" and not served.is_secure
    with pytest.raises(UsageError, match="some of these listeners take TLS only, others none; name one sort"):
        build_deployment(load_text(text + "    rpc: /b.sock\n" + controller % ""))
    for paths, psk in (('["127.0.0.1:4420"]', "own"), ('["127.0.0.1:4421"]', None)):
        built = build_deployment(load_text(text + "    rpc: /b.sock\n" + controller % f", paths: {paths}"))
        assert built.endpoints[1].desired[Id(Kind.CONTROLLER, "N0")].attributes["psk"] == psk
    bare = text.replace("    psk: own\n", "") + "    rpc: /b.sock\n"
    with pytest.raises(UsageError, match="takes TLS only; name the psk of"):
        build_deployment(load_text(bare + controller % ', paths: ["127.0.0.1:4420"]'))
