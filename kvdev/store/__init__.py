"""The KV page store: volumes over block devices, KV namespaces on them, pages in those.

Not here: the devices (``kvdev.block``, ``kvdev.initiator``); memory for pages (``kvdev.staging``).
"""

from kvdev.store.namespace import KvNamespace
from kvdev.store.page_store import GetResult, PageStatus, PageStore, PutResult
from kvdev.store.volume import NamespaceInfo, Volume

__all__ = [
    "GetResult",
    "KvNamespace",
    "NamespaceInfo",
    "PageStatus",
    "PageStore",
    "PutResult",
    "Volume",
]
