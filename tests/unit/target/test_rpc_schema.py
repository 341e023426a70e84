"""Our parameters and the typed client's against SPDK's own schema, where that third-party file is at hand."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvdev.target import rpc_params as p
from kvdev.target.model import TargetModel
from kvdev.target.rpc_methods import RpcMethods
from kvdev.testing.target_backend import MemoryBackend
from spdk_rpc import RpcProtocolError, SpdkRpc

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


class Recorder:
    """Stands for a client: keeps what would be sent."""

    def __init__(self) -> None:
        self.method = ""
        self.params: Mapping[str, Any] = {}

    def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        self.method, self.params = method, params or {}
        return object()


def made_up(annotation: str) -> Any:
    for text, value in (
        ("Sequence[str]", ["x"]),
        ("bool", True),
        ("int", 1),
        ("Literal", "all"),
        ("str", "x"),
    ):
        if text in annotation:
            return value
    return "x"


def typed_methods() -> list[str]:
    helpers = {"call", "within"}
    return [
        name
        for name, _ in inspect.getmembers(SpdkRpc, inspect.isfunction)
        if name[0] != "_" and name not in helpers
    ]


@pytest.mark.parametrize("method", typed_methods())
def test_typed_client_sends_what_the_schema_knows(schema: Mapping[str, Params], method: str) -> None:
    recorder = Recorder()
    function = getattr(SpdkRpc(recorder), method)  # type: ignore[arg-type]
    arguments = {
        name: made_up(str(each.annotation)) for name, each in inspect.signature(function).parameters.items()
    }
    with pytest.raises(RpcProtocolError, match=f"{method}: result: expected"):
        function(**arguments)
    assert recorder.method == method
    known = schema[method]
    assert recorder.params.keys() <= known.keys()
    assert {name for name, (_, is_required) in known.items() if is_required} <= recorder.params.keys()
    for name, value in recorder.params.items():
        kind = known[name][0]
        expected: dict[str, type] = {
            "boolean": bool,
            "array": list,
            "object": dict,
            "string": str,
            "enum": str,
        }
        assert isinstance(value, expected.get(kind, str if kind == "uuid" else int)), f"{name}: {kind}"
