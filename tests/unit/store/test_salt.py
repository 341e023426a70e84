"""The salt of a tenant's page keys: refused where it is another, in no text, and its pages are out of others' reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdev.clock import Deadline
from kvdev.errors import UsageError
from kvdev.geometry import Geometry
from kvdev.keys import PageKeys, derive_keys, salt_mark
from kvdev.security.salt import KeySalt
from kvdev.security.source import read_salt, write_key_file
from kvdev.store.page_store import PageStore
from kvdev.uri import parse_key_source

GEOMETRY = Geometry(model_id="unit", layer_count=1, kv_head_count=1, head_size=32, tokens_per_page=64)
MINE = KeySalt(bytes(range(32)))
THEIRS = KeySalt(bytes(range(1, 33)))
PROMPT = [b"block 0", b"block 1"]


def soon() -> Deadline:
    return Deadline.after(60)


def test_mark_tells_salts_apart_and_has_golden_values() -> None:
    assert salt_mark(b"") == 0 and salt_mark("") == 0
    assert MINE.mark == salt_mark(MINE.salt) != THEIRS.mark
    assert f"{MINE.mark:08x}" == "0adcc66d"
    assert "0001" not in repr(MINE) and MINE.salt.hex() not in repr(MINE)


def test_salt_file_when_it_is_read_by_others_or_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    write_key_file(str(path), MINE.text(), field="output")
    source = parse_key_source(f"file:{path}", field="salt")
    assert read_salt(source, field="salt") == MINE
    path.chmod(0o640)
    with pytest.raises(UsageError, match="mode: expected 0600, got 0640"):
        read_salt(source, field="salt")
    path.chmod(0o600)
    for text in (
        "",
        "KVSALT-1:",
        MINE.text() + "00",
        MINE.text().upper(),
        "DHHC-1:00:x:",
        MINE.text()[:-1] + "g",
    ):
        path.write_text(text)
        with pytest.raises(
            UsageError, match="expected one salt as KVSALT-1: with 64 hexadecimal digits"
        ) as refusal:
            read_salt(source, field="salt")
        assert MINE.salt.hex()[:16] not in str(refusal.value).lower()
    with pytest.raises(UsageError, match="salt: expected 32 bytes, got 31"):
        KeySalt(bytes(31))


def test_namespace_when_it_has_a_mark_takes_keys_of_its_salt_only(lab: Any) -> None:
    info = lab.volume.create_namespace(
        "mine", GEOMETRY, quota_pages=8, journal_block_count=8, salt_mark=MINE.mark, deadline=soon()
    )
    assert info.salt_mark == MINE.mark
    store = PageStore(lab.volume.open_namespace("mine", deadline=soon()))
    for salt, got in ((b"", "none"), (THEIRS.salt, f"one of mark {THEIRS.mark:08x}")):
        with pytest.raises(
            UsageError, match=f"v#mine: salt: expected .* of mark {MINE.mark:08x}, got {got}; name"
        ):
            store.page_keys(salt=salt)
    keys = store.page_keys(salt=MINE.salt, cache_group="lora").derive(PROMPT)
    assert np.array_equal(keys, derive_keys(MINE.salt, "lora", PROMPT))
    store.put(keys, np.zeros((2, GEOMETRY.page_size_bytes), dtype=np.uint8))
    assert store.contains(keys).all()
    for salt in (b"", THEIRS.salt):
        assert not store.contains(PageKeys(salt, "lora").derive(PROMPT)).any(), "others ask for other keys"
    store.close()
    # Nothing on the volume has the salt, or its text.
    for member in lab.members:
        assert MINE.salt not in bytes(member.data) and MINE.salt.hex().encode() not in bytes(member.data)
    assert lab.volume.clone_namespace("mine", "like", deadline=soon()).salt_mark == MINE.mark


def test_namespace_without_a_mark_is_shared_by_tenants_with_a_salt_each(lab: Any) -> None:
    store = lab.store()
    mine, theirs = (store.page_keys(salt=salt.salt).derive(PROMPT) for salt in (MINE, THEIRS))
    pages = np.zeros((2, GEOMETRY.page_size_bytes), dtype=np.uint8)
    store.put(mine, pages)
    assert store.longest_prefix(mine) == 2 and store.longest_prefix(theirs) == 0
