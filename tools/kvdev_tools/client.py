"""The process that replays: opens the volume and KV namespace, goes through its share of the requests, keeps its state.

It runs in the command's own process, or as ``python -m kvdev_tools.client CONFIG`` under a supervisor that may kill
it between two requests; then the next one goes on from the state file.
Not here: provisioning (``kvdev_tools.rig``); one request (``kvdev_tools.replay``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kvdev.errors import ConnectionLostError, TransportError, UsageError
from kvdev.geometry import Geometry
from kvdev_tools.exits import ExitCode
from kvdev_tools.output import Progress
from kvdev_tools.progress import ProgressFile, trim_progress
from kvdev_tools.trace import Request, generate_conversations, read_trace

PAUSED_LINE = b"paused\n"
"""What a client under a supervisor writes on stdout when it has stopped between two requests."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Everything a client process needs to know; JSON values only."""

    kv_namespace: str
    geometry: dict[str, Any]
    layout: str
    block_tokens: int
    tensor_page_count: int
    batch_page_count: int
    arena_size_bytes: int
    request_count: int
    seed: int
    trace: str | None
    progress_path: str
    info_path: str
    timeout_s: float
    io_queue_count: int
    kato_ms: int
    host_nqn: str | None
    host_id: str | None
    keys: dict[str, str] = field(default_factory=dict)
    """Places of secrets, never secrets."""
    salt_file: str | None = None
    """Place of the salt of page keys, never the salt."""
    pause_after: int | None = None
    """Requests after which to say so and wait; None runs through."""
    parent_pid: int | None = None

    def requests(self) -> Iterator[Request]:
        """The trace from its start, ``request_count`` of it at most."""
        if self.trace is not None:
            return read_trace(Path(self.trace), limit=self.request_count)
        return islice(generate_conversations(seed=self.seed), self.request_count)


def run_client(config: ClientConfig, *, pause: Callable[[], None] | None = None) -> None:
    """Replay what the state file does not have yet; ``pause`` is called once ``pause_after`` requests are done."""
    from kvdev_kernels import PageKernels
    from kvdev_tools.connect import make_session
    from kvdev_tools.pool import opened_store
    from kvdev_tools.replay import Replayer
    from kvdev_tools.salt import read_salt_file
    from kvdev_tools.tensors import EngineTensors

    geometry = Geometry.from_dict(config.geometry)
    progress_path = Path(config.progress_path)
    first = trim_progress(progress_path)
    bar = Progress("replay", config.request_count)
    session = make_session(
        config.host_nqn,
        config.host_id,
        timeout_s=config.timeout_s,
        io_queue_count=config.io_queue_count,
        kato_ms=config.kato_ms,
        keys=config.keys,
        is_writer=True,
    )
    with (
        session,
        opened_store(session, config.kv_namespace, geometry=geometry, timeout_s=config.timeout_s) as (
            volume,
            store,
        ),
        session.make_arena(config.arena_size_bytes) as arena,
        PageKernels() as kernels,
        ProgressFile(progress_path) as progress,
    ):
        salt = b"" if config.salt_file is None else read_salt_file(config.salt_file).salt
        page_keys = store.page_keys(salt=salt) if salt or store.namespace.salt_mark else None
        tensors = EngineTensors(
            geometry,
            layout=config.layout,
            page_count=config.tensor_page_count,
            block_tokens=config.block_tokens,
        )
        info: dict[str, Any] = {
            "arena_backing": arena.backing,
            "arena_size_bytes": arena.size_bytes,
            "kernels": kernels.backend,
        }
        replayer = Replayer(
            store=store,
            tensors=tensors,
            arena=arena,
            kernels=kernels,
            batch_page_count=config.batch_page_count,
            seed=config.seed,
            page_keys=page_keys,
        )
        replayer.warm_up()
        done = first
        try:
            for index, request in enumerate(config.requests()):
                if index < first:
                    continue
                progress.append(replayer.replay(index, request))
                done = index + 1
                bar.update(index + 1, f"{index + 1} of {config.request_count} requests")
                if pause is not None and index + 1 == config.pause_after:
                    pause()
        except TransportError as error:
            raise ConnectionLostError(
                f"replay: {config.kv_namespace}: lost after {done} of {config.request_count} requests: {error}",
                errno=error.errno or 0,
                trid=error.trid,
            ) from error
        finally:
            bar.close()
        stored = store.namespace.member_bytes().tolist()
        info["members"] = [
            {"uri": member.uri, "stored_bytes": count}
            for member, count in zip(volume.members, stored, strict=True)
        ]
        Path(config.info_path).write_text(json.dumps(info))


def _pause_for_supervisor() -> None:
    """Say that we stand between two requests, then wait for the supervisor: it kills us, or it has died itself."""
    sys.stdout.buffer.write(PAUSED_LINE)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read(1)


def main(arguments: list[str]) -> int:
    """Entry of the client process; errors are printed and coded as the command line's."""
    import click

    from kvdev_tools.main import run
    from kvdev_tools.process import die_with_parent

    @click.command()
    @click.argument("path")
    def client(path: str) -> int:
        try:
            config = ClientConfig(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"client: {path}: expected the configuration of a client ({error})") from error
        if config.parent_pid is not None:
            die_with_parent(config.parent_pid)
        run_client(config, pause=_pause_for_supervisor if config.pause_after else None)
        return int(ExitCode.OK)

    return run(arguments, group=client, is_child=True)


def write_config(config: ClientConfig, path: Path) -> None:
    """Keep the configuration where a client process reads it."""
    path.write_text(json.dumps(asdict(config)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
