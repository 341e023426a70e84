"""``kvdev key``: make secrets, and check those that are kept, without ever printing one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvdev_tools.output import emit, fields, json_option

if TYPE_CHECKING:
    from kvdev.security.psk import TlsPsk
    from kvdev.security.salt import KeySalt
    from kvdev.security.secret import DhchapSecret

_HASHES = {"none": 0, "sha256": 1, "sha384": 2, "sha512": 3}
_KINDS = ("dhchap", "tls-psk", "salt")


@click.group()
def key() -> None:
    """Make and check the secrets of hosts and subsystems."""


@key.command(short_help="Make a new secret in a file of this user alone.")
@click.option(
    "--kind",
    type=click.Choice(_KINDS),
    default="dhchap",
    show_default=True,
    help="A secret for DH-HMAC-CHAP, a pre-shared key for TLS, or the salt of a tenant's page keys.",
)
@click.option(
    "--hash",
    "hash_name",
    type=click.Choice(list(_HASHES)),
    default="sha256",
    show_default=True,
    help="How its owner's NQN is made part of the key; none: the secret is the key.",
)
@click.option("--size", type=click.Choice(["32", "48", "64"]), help="Bytes; by default as the hash has.")
@click.option(
    "--output", metavar="FILE", required=True, help="New file for it, with mode 0600; it must not exist."
)
@json_option
def generate(kind: str, hash_name: str, size: str | None, output: str, as_json: bool) -> None:
    """Make a new secret and keep it in a file that only this user can read.

    A host and each subsystem need one each. The other side keeps a copy: carry the file over a secure way.

    \b
    Example:
      kvdev key generate --output /etc/kvdev/keys/host1
    """
    from kvdev.errors import UsageError
    from kvdev.security.psk import TlsPsk
    from kvdev.security.salt import KeySalt
    from kvdev.security.secret import DhchapSecret
    from kvdev.security.source import write_key_file

    transform = _HASHES[hash_name]
    made: DhchapSecret | TlsPsk | KeySalt
    if kind == "dhchap":
        made = DhchapSecret.generate(size_bytes=None if size is None else int(size), transform=transform)
    elif kind == "salt":
        if size is not None or hash_name != "sha256":
            raise UsageError("--kind salt: expected no --hash and no --size")
        made = KeySalt.generate()
    else:
        if size is not None or hash_name == "sha512":
            raise UsageError("--kind tls-psk: expected --hash none, sha256 or sha384 and no --size")
        made = TlsPsk.generate(transform=transform)
    write_key_file(output, made.text(), field="output")
    _show(_facts(made, place=f"file:{output}", kind=kind), as_json=as_json)


@key.command(short_help="Check that a secret is well formed and kept private.")
@click.argument("place", metavar="file:/PATH|keyring:NAME|/PATH")
@json_option
def check(place: str, as_json: bool) -> None:
    """Check that a secret is well formed and that nobody else can read its file.

    \b
    Examples:
      kvdev key check /etc/kvdev/keys/host1
      kvdev key check keyring:kvdev-host1
    """
    from pathlib import Path

    from kvdev.security.psk import PREFIX, TlsPsk
    from kvdev.security.salt import PREFIX as SALT_PREFIX
    from kvdev.security.salt import KeySalt
    from kvdev.security.secret import DhchapSecret
    from kvdev.security.source import read_text
    from kvdev.uri import parse_key_source, refuse_secret

    refuse_secret(place, field="place")
    is_path = not place.startswith(("file:", "keyring:"))
    source = parse_key_source(f"file:{Path(place).absolute()}" if is_path else place, field="place")
    text, where = read_text(source, field="key"), f"key: {source}"
    found: DhchapSecret | TlsPsk | KeySalt
    if text.startswith(PREFIX):
        found, kind = TlsPsk.parse(text, where=where), "tls-psk"
    elif text.startswith(SALT_PREFIX):
        found, kind = KeySalt.parse(text, where=where), "salt"
    else:
        found, kind = DhchapSecret.parse(text, where=where), "dhchap"
    _show(_facts(found, place=str(source), kind=kind), as_json=as_json)


def _facts(secret: DhchapSecret | TlsPsk | KeySalt, *, place: str, kind: str) -> dict[str, Any]:
    from kvdev.security.salt import KeySalt

    names = {value: name for name, value in _HASHES.items()}
    return {
        "place": place,
        "kind": kind,
        "hash": None if isinstance(secret, KeySalt) else names[secret.transform],
        "size_bytes": secret.size_bytes,
    }


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    emit(found, as_json=as_json, text=lambda: fields(found.items()))
