"""The pool process: one owner of KV namespaces for all engine processes of a host, and its client.

Not here: the page table and the order of writes (``kvdev.store``); the command (``kvdev_tools.cmd_pool``).
"""

from kvdev.pool.client import PoolStore
from kvdev.pool.server import PoolServer

__all__ = ["PoolServer", "PoolStore"]
