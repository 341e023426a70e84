"""A pool server in the test's own process, on files, with pages that follow from their numbers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from kvdev.clock import Deadline
from kvdev.geometry import Geometry
from kvdev.pool.server import PoolServer
from kvdev.pool.service import PoolService
from kvdev.session import Session
from kvdev.store import Volume

GEOMETRY = Geometry(model_id="pool", layer_count=1, kv_head_count=1, head_size=64, tokens_per_page=32)
PAGE = GEOMETRY.page_size_bytes
QUOTA = 64


def soon() -> Deadline:
    return Deadline.after(60)


def keys_of(numbers: Any) -> Any:
    keys = np.zeros((len(numbers), 32), dtype=np.uint8)
    keys[:, :8] = np.asarray(numbers, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return keys


def pages_of(numbers: Any) -> Any:
    return np.stack([np.random.default_rng(n).integers(0, 256, PAGE, np.uint8) for n in numbers])


def make_volume(folder: Path, **policies: str) -> str:
    """A volume on two files with the KV namespaces ``kv`` and ``rank1``, or these by policy; its URI."""
    paths = [folder / f"m{index}" for index in range(2)]
    for path in paths:
        path.touch()
        os.truncate(path, 8 << 20)
    uri = "vol:" + ",".join(f"file:{path}" for path in paths)
    with Session() as session:
        made = Volume.create(session.open_members(uri), name="v", strip_size_bytes=16384, deadline=soon())
        for name, policy in (policies or {"kv": "lru", "rank1": "lru"}).items():
            made.create_namespace(name, GEOMETRY, quota_pages=QUOTA, eviction_policy=policy, deadline=soon())
    return uri


class ServerThread:
    """A pool server in this process."""

    def __init__(self, volume: str, path: Path, *names: str) -> None:
        self.path = str(path)
        self.session = Session()
        opened = self.session.open_volume(volume)
        self.services = [PoolService(opened, name, deadline=soon()) for name in names or ("kv",)]
        host = {"host_nqn": self.session.host.host_nqn, "host_id": str(self.session.host.host_id)}
        self.server = PoolServer(
            self.path, self.services, volume_uris=[volume] * len(self.services), host=host
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.serve, args=(self._stop.is_set,))
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self.server.close()
        for service in self.services:
            service.close(soon())
        self.session.close()
