"""Our parameters against SPDK's own schema, where that third-party file is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvdev.target import rpc_params as p
from kvdev.target.model import TargetModel
from kvdev.target.rpc_methods import RpcMethods
from kvdev.testing.target_backend import MemoryBackend

SCHEMA = Path(__file__).resolve().parents[4] / "shared" / "reference" / "spdk" / "schema.yaml"
DECODERS: dict[str, set[p.Decoder]] = {
    "boolean": {p.boolean},
    "uint8": {p.uint8},
    "uint16": {p.uint16},
    "uint32": {p.uint32},
    "uint64": {p.uint64},
    "int32": {p.int32},
    "uuid": {p.uuid},
    "string": {p.text, p.secret},
}
# Parameters of other transports, and deprecated ones: the method takes any and reads its own.
RELAXED = {"nvmf_create_transport", "nvmf_subsystem_add_host"}
Params = dict[str, tuple[str, bool]]


@pytest.fixture(scope="module")
def schema() -> dict[str, Params]:
    """Method -> parameter -> (type, required), read off the file's own indentation."""
    if not SCHEMA.exists():
        pytest.skip(f"SPDK's schema is a third-party file, looked for at {SCHEMA}")
    methods: dict[str, Params] = {}
    section = method = name = ""
    for line in SCHEMA.read_text(encoding="utf-8").splitlines():
        if line and not line[0].isspace():
            section = line.rstrip(":")
        elif section == "methods":
            if line.startswith("  - name: "):
                method = line.removeprefix("  - name: ").strip()
                methods[method] = {}
            elif line.startswith("      - name: "):
                name = line.removeprefix("      - name: ").strip()
                methods[method][name] = ("", False)
            elif line.startswith("        type: "):
                methods[method][name] = (line.removeprefix("        type: ").strip(), False)
            elif line.strip() == "required: true":
                methods[method][name] = (methods[method][name][0], True)
    assert len(methods) > 250
    return methods


def test_our_methods_take_what_the_schema_says(schema: Mapping[str, Params]) -> None:
    wrong: list[str] = []
    for method, fields in RpcMethods(TargetModel(MemoryBackend())).fields().items():
        params = schema.get(method)
        if params is None:
            wrong.append(f"{method}: not in the schema")
            continue
        wrong += [f"{method}.{name}: not in the schema" for name in fields.keys() - params.keys()]
        if method not in RELAXED:
            wrong += [f"{method}.{name}: not known here" for name in params.keys() - fields.keys()]
        for name in params.keys() & fields.keys():
            kind, is_required = params[name]
            if fields[name].is_required != is_required:
                wrong.append(f"{method}.{name}: required {is_required} in the schema")
            if fields[name].decode not in DECODERS.get(kind, {fields[name].decode}):
                wrong.append(f"{method}.{name}: {kind} in the schema")
    assert not wrong, "\n".join(wrong)
