"""``python -m kvdev.target``: the embedded target in the foreground, for tests and scripts."""

from __future__ import annotations

import argparse
import logging
import sys

from kvdev.target.serve import ServeOptions, serve


def parse_arguments(arguments: list[str] | None = None) -> ServeOptions:
    parser = argparse.ArgumentParser(
        prog="python -m kvdev.target", description="Serve NVMe/TCP, configured by SPDK's JSON-RPC."
    )
    parser.add_argument("--rpc-socket", required=True, metavar="PATH", help="UNIX socket of the RPC server")
    parser.add_argument(
        "--allow-remote", action="store_true", help="let listeners bind to addresses other than loopback"
    )
    parser.add_argument("--config", metavar="FILE", help="JSON file of RPC calls to run before it is ready")
    parser.add_argument("--state", metavar="FILE", help="file to keep the configuration in across restarts")
    parser.add_argument("--ready-file", metavar="FILE", help="file to write once it is ready")
    parser.add_argument(
        "--volatile-cache",
        metavar="SEED",
        type=int,
        help="give files a volatile cache: a kill drops what was not flushed, but for blocks the seed chooses",
    )
    parser.add_argument("--json", action="store_true", help="print the ready line as JSON")
    parser.add_argument("--verbose", action="store_true", help="log to standard error")
    given = parser.parse_args(arguments)
    if given.verbose:
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s"
        )
    return ServeOptions(
        rpc_socket=given.rpc_socket,
        allow_remote=given.allow_remote,
        config=given.config,
        state=given.state,
        ready_file=given.ready_file,
        is_json=given.json,
        volatile_seed=given.volatile_cache,
    )


if __name__ == "__main__":
    sys.exit(serve(parse_arguments()))
