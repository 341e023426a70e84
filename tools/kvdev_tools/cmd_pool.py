"""``kvdev pool``: one owner of KV namespaces for all engine processes of this host.

Not here: what it serves (``kvdev.pool``).
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdev.units import parse_size
from kvdev_tools.connect import host_options, make_session, operation_deadline, session_keys, timeout_option
from kvdev_tools.exits import ExitCode
from kvdev_tools.output import emit, fields, json_option

if TYPE_CHECKING:
    from types import FrameType

    from kvdev.pool.service import PoolService
    from kvdev.session import Session

SETTLE_TIMEOUT_S = 150.0
"""For the writes of the owner before: a lease, three keep alive intervals and a controller's own time."""
RESTART_S_MIN = 0.1
RESTART_S_MAX = 10.0
"""Between two starts of a pool process that ends: doubles from the one to the other."""
RESTART_CALM_S = 60.0
"""A pool process that ran so long is started again at once."""

log = logging.getLogger("kvdev.pool")


@click.group()
def pool() -> None:
    """One owner of KV namespaces for all engine processes of this host."""


def _socket_option(command: Any) -> Any:
    return click.option(
        "--socket",
        "socket_path",
        metavar="PATH",
        help="UNIX socket, with mode 0600  [default: kvdev/pool.sock in $XDG_RUNTIME_DIR, or /tmp/kvdev-UID/pool.sock]",
    )(command)


def _socket_path(given: str | None) -> str:
    from kvdev.store.lock import runtime_folder

    return given or str(runtime_folder() / "pool.sock")


@pool.command(short_help="Own KV namespaces and serve them until Ctrl-C.")
@click.argument("uris", metavar="VOLUME#NAME...", nargs=-1, required=True)
@_socket_option
@click.option("--ready-file", metavar="FILE", help="File to write once it serves; removed at the end.")
@click.option("--takeover", is_flag=True, help="From an owner of another host that is known to be dead.")
@click.option(
    "--scrub-rate", metavar="SIZE", help="Verify stored pages in the background, so many bytes a second."
)
@click.option("--restart", is_flag=True, help="Serve in a child process, and start it again when it dies.")
@click.option("--parent-pid", type=int, hidden=True, help="End when this process, our parent, ends.")
@host_options
@timeout_option
def serve(
    uris: tuple[str, ...],
    socket_path: str | None,
    ready_file: str | None,
    takeover: bool,
    scrub_rate: str | None,
    restart: bool,
    parent_pid: int | None,
    host_nqn: str | None,
    host_id: str | None,
    timeout_s: float,
) -> int:
    """Own KV namespaces and serve them in the foreground until Ctrl-C or SIGTERM.

    Engine processes look up in shared memory and move pages themselves; what changes the table they ask here.
    A process that dies leaves nothing behind but slots that rest until nothing can be written there any more.
    When this process dies its clients go on with misses and find the next one by themselves: have systemd or
    --restart start it again.

    \b
    Examples:
      kvdev pool serve "vol+tcp://192.0.2.7:4420/nqn.2026-01.com.example:kv#llama"
      kvdev pool serve --restart "vol:file:/srv/kv0.img#rank0" "vol:file:/srv/kv0.img#rank1"
    """
    path = _socket_path(socket_path)
    scrub_bytes_per_s = None if scrub_rate is None else parse_size(scrub_rate, field="scrub_rate")
    if restart:
        return _supervise(
            uris,
            path,
            ready_file,
            takeover=takeover,
            host=(host_nqn, host_id),
            scrub_rate=scrub_rate,
            timeout_s=timeout_s,
        )
    if parent_pid is not None:
        from kvdev_tools.process import die_with_parent

        die_with_parent(parent_pid)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        stopped.set()

    former = [(number, signal.signal(number, stop)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with make_session(host_nqn, host_id, timeout_s=timeout_s, is_writer=True) as session:
            _serve(
                session,
                uris,
                path,
                ready_file,
                takeover=takeover,
                scrub_bytes_per_s=scrub_bytes_per_s,
                timeout_s=timeout_s,
                stopped=stopped,
            )
    finally:
        for number, handler in former:
            signal.signal(number, handler)
    return 0


def _serve(
    session: Session,
    uris: Sequence[str],
    path: str,
    ready_file: str | None,
    *,
    takeover: bool,
    scrub_bytes_per_s: int | None,
    timeout_s: float,
    stopped: threading.Event,
) -> None:
    from kvdev.clock import Deadline
    from kvdev.errors import KvdevError, LeaseLostError
    from kvdev.pool.server import PoolServer

    services: list[PoolService] = []
    try:
        volumes = _open_services(session, uris, services, takeover=takeover, timeout_s=timeout_s)
        if scrub_bytes_per_s is not None:
            for service in services:
                service.start_scrub(scrub_bytes_per_s)
        host = {"host_nqn": session.host.host_nqn, "host_id": str(session.host.host_id)}
        server = PoolServer(path, services, volume_uris=volumes, host=host)
        try:
            click.echo(
                f"serving {', '.join(service.namespace.what for service in services)} at {path}", err=True
            )
            if ready_file is not None:
                Path(ready_file).write_text(f"{path}\n")
            server.serve(stopped.is_set)
        finally:
            if ready_file is not None:
                Path(ready_file).unlink(missing_ok=True)
            server.close()
    except BaseException:
        for service in services:
            service.namespace.abandon()
        raise
    failure: KvdevError | None = None
    for service in services:
        try:
            service.close(Deadline.after(timeout_s))
        except LeaseLostError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _open_services(
    session: Session, uris: Sequence[str], services: list[PoolService], *, takeover: bool, timeout_s: float
) -> list[str]:
    """One service for each name, appended to ``services``; returns their volumes' URIs."""
    from kvdev.clock import Deadline
    from kvdev.errors import UsageError
    from kvdev.pool.service import PoolService
    from kvdev.uri import parse_kv_namespace_uri
    from kvdev_tools.pool import open_volume

    parsed = [parse_kv_namespace_uri(uri) for uri in uris]
    volumes: dict[str, Any] = {}
    for each in parsed:
        key = str(each.volume)
        if "mem:" in key:
            raise UsageError(
                f"{key}: expected devices that other processes reach as well, got memory of this one"
            )
        if key not in volumes:
            volumes[key] = open_volume(session, each.volume, deadline=operation_deadline(timeout_s))
        deadline = Deadline.after(SETTLE_TIMEOUT_S + timeout_s)
        services.append(PoolService(volumes[key], each.name, takeover=takeover, deadline=deadline))
    return [str(each.volume) for each in parsed]


def _supervise(
    uris: Sequence[str],
    path: str,
    ready_file: str | None,
    *,
    takeover: bool,
    host: tuple[str | None, str | None],
    scrub_rate: str | None,
    timeout_s: float,
) -> int:
    """Run the pool process as a child; start it again when it dies, until told to stop."""
    import os

    from kvdev.clock import Deadline
    from kvdev_tools import process

    arguments = ["pool", "serve", *uris, "--socket", path, "--timeout", str(timeout_s)]
    arguments += ["--parent-pid", str(os.getpid())]
    for name, value in (
        ("--host-nqn", host[0]),
        ("--host-id", host[1]),
        ("--ready-file", ready_file),
        ("--scrub-rate", scrub_rate),
    ):
        arguments += [name, value] if value is not None else []
    for name, place in session_keys().items():
        arguments += [f"--{name.replace('_', '-')}", place]
    wait_s, is_first = RESTART_S_MIN, True
    while True:
        started = Deadline.after(RESTART_CALM_S)
        extra = ["--takeover"] if takeover and is_first else []
        child = process.start("kvdev_tools.main", [*arguments, *extra], stderr=None)
        try:
            code = child.wait()
        except BaseException:  # Ctrl-C or SIGTERM: the child closes in order
            process.stop(child, timeout_s=2 * timeout_s)
            raise
        if code == 0 or (is_first and code == ExitCode.USAGE):
            return code  # what was asked for is wrong, and would be next time
        wait_s = RESTART_S_MIN if started.is_expired else min(2 * wait_s, RESTART_S_MAX)
        is_first = False
        click.echo(f"kvdev: pool: its process ended with {_describe_exit(child)}; started again", err=True)
        threading.Event().wait(wait_s)


def _describe_exit(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    return f"signal {-code}" if code < 0 else f"code {code}"


@pool.command()
@_socket_option
@timeout_option
@json_option
def status(socket_path: str | None, timeout_s: float, as_json: bool) -> None:
    """Show what a pool process serves, to how many clients.

    \b
    Example:
      kvdev pool status --json
    """
    from kvdev.pool.link import ask_status

    path = _socket_path(socket_path)
    found = ask_status(path, operation_deadline(timeout_s))

    def text() -> list[str]:
        lines = fields([(name, value) for name, value in found.items() if name != "namespaces"])
        for each in found["namespaces"]:
            lines += ["", *fields(list(each.items()))]
        return lines

    emit(found, as_json=as_json, text=text)
