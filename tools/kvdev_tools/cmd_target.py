"""``kvdev target``: the embedded NVMe/TCP target, configured over SPDK's JSON-RPC."""

from __future__ import annotations

from dataclasses import replace

import click

from kvdev_tools.output import json_option

DEFAULT_RPC_SOCKET = "/var/tmp/kvdev.sock"


@click.group()
def target() -> None:
    """Run the embedded NVMe/TCP target."""


@target.command()
@click.option(
    "--rpc-socket",
    metavar="PATH",
    default=DEFAULT_RPC_SOCKET,
    show_default=True,
    help="UNIX socket of the RPC server; it gets mode 0600.",
)
@click.option("--config", metavar="FILE", help="JSON file of RPC calls to run before it is ready.")
@click.option("--state", metavar="FILE", help="File to keep the configuration in across restarts.")
@click.option("--ready-file", metavar="FILE", help="File to write once it is ready; removed at the end.")
@click.option("--allow-remote", is_flag=True, help="Let listeners bind to addresses other than loopback.")
@click.option("--populate", is_flag=True, help="Touch the memory of malloc bdevs when they are made.")
@click.option(
    "--volatile-cache",
    metavar="SEED",
    type=click.IntRange(0, 2**64 - 1),
    help="For drills: give files a volatile cache; a kill drops what was not flushed, but for blocks the seed chooses.",
)
@click.option(
    "--dhchap-digests", metavar="NAMES", help="Hashes that hosts may authenticate with: sha256,sha384,sha512."
)
@click.option(
    "--dhchap-dhgroups",
    metavar="NAMES",
    help="Groups they may: ffdhe2048,ffdhe3072,ffdhe4096,ffdhe6144,ffdhe8192,null.",
)
@click.option("--verbose", is_flag=True, help="Log to standard error.")
@click.option("--parent-pid", type=int, hidden=True, help="End when this process, our parent, ends.")
@json_option
def serve(
    rpc_socket: str,
    config: str | None,
    state: str | None,
    ready_file: str | None,
    allow_remote: bool,
    populate: bool,
    volatile_cache: int | None,
    dhchap_digests: str | None,
    dhchap_dhgroups: str | None,
    verbose: bool,
    parent_pid: int | None,
    as_json: bool,
) -> int:
    """Serve in the foreground until Ctrl-C or SIGTERM.

    The target starts empty; what it serves is configured over its RPC socket with SPDK's methods, by
    ``spdk_rpc``, by SPDK's own rpc.py, or from a file of calls.

    \b
    Example: a memory-backed namespace on port 4420
      kvdev target serve --config target.json
      target.json:
        [{"method": "nvmf_create_transport", "params": {"trtype": "TCP"}},
         {"method": "bdev_malloc_create",
          "params": {"name": "m0", "num_blocks": 262144, "block_size": 4096}},
         {"method": "nvmf_create_subsystem",
          "params": {"nqn": "nqn.2026-01.io.kvdev:demo", "allow_any_host": true}},
         {"method": "nvmf_subsystem_add_ns",
          "params": {"nqn": "nqn.2026-01.io.kvdev:demo", "namespace": {"bdev_name": "m0"}}},
         {"method": "nvmf_subsystem_add_listener",
          "params": {"nqn": "nqn.2026-01.io.kvdev:demo", "listen_address":
            {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "4420"}}}]
    """
    if parent_pid is not None:
        from kvdev_tools.process import die_with_parent

        die_with_parent(parent_pid)
    if verbose:
        import logging
        import sys

        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s"
        )
    from kvdev.target.serve import ServeOptions
    from kvdev.target.serve import serve as run_target
    from kvdev.target.service import TargetOptions, TargetService
    from kvdev.wire.auth import DhGroupId, HashId, parse_names

    options = TargetOptions(populate_memory=populate, volatile_seed=volatile_cache)
    if dhchap_digests is not None:
        names = parse_names(dhchap_digests, HashId, field="--dhchap-digests")
        options = replace(options, dhchap_digests=names)
    if dhchap_dhgroups is not None:
        groups = parse_names(dhchap_dhgroups, DhGroupId, field="--dhchap-dhgroups")
        options = replace(options, dhchap_dhgroups=groups)
    return run_target(
        ServeOptions(
            rpc_socket=rpc_socket,
            allow_remote=allow_remote,
            config=config,
            state=state,
            ready_file=ready_file,
            is_json=as_json,
        ),
        make_backend=lambda: TargetService(options),
    )
