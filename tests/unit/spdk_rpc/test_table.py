"""The table of methods: its text, the code generated from it, and SPDK's own schema where that file is at hand."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any, TypedDict

import pytest

from spdk_rpc import AsyncSpdkRpc, RpcUsageError, SpdkRpc, calls, generate, results, table
from spdk_rpc.call import Call, Shape, check_params

FOLDER = Path(table.__file__).parent
SCHEMA = Path(__file__).resolve().parents[4] / "shared" / "reference" / "spdk" / "schema.yaml"


class SchemaParam(TypedDict):
    kind: str
    class_name: str
    required: bool


class Schema(TypedDict):
    enums: dict[str, tuple[str, ...]]
    objects: dict[str, dict[str, SchemaParam]]
    arrays: dict[str, tuple[str, int]]
    bitmasks: dict[str, str]
    methods: dict[str, dict[str, SchemaParam]]


@pytest.fixture(scope="module")
def schema() -> Schema:
    """SPDK's schema, read off its own indentation."""
    if not SCHEMA.exists():
        pytest.skip(f"SPDK's schema is a third-party file, looked for at {SCHEMA}")
    read: dict[str, dict[str, Any]] = {name: {} for name in Schema.__annotations__}
    section = name = field = ""
    for line in SCHEMA.read_text(encoding="utf-8").splitlines():
        indent = len(line) - len(line.lstrip())
        key, _, value = line.strip().removeprefix("- ").partition(": ")
        value = value.strip("\"'")
        if indent == 0:
            section = line.rstrip(":") if line.rstrip(":") in read else section
        elif indent == 2 and line.startswith("  - name: "):
            name = value
            read[section][name] = {}
        elif indent == 4 and section in ("arrays", "bitmasks"):
            read[section][name][key] = value
        elif indent == 6 and line.startswith("      - name: "):
            field = value
            read[section][name][field] = {"kind": "", "class_name": "", "required": False}
        elif indent == 8 and section in ("objects", "methods") and key in ("type", "class", "required"):
            renamed = {"type": "kind", "class": "class_name"}.get(key, key)
            read[section][name][field][renamed] = value == "true" if key == "required" else value
    assert len(read["methods"]) > 250
    return {
        "enums": {each: tuple(fields) for each, fields in read["enums"].items()},
        "objects": read["objects"],
        "arrays": {each: (of["item_type"], int(of["max_count"])) for each, of in read["arrays"].items()},
        "bitmasks": {each: of["enum"] for each, of in read["bitmasks"].items()},
        "methods": read["methods"],
    }


def faults(
    schema: Schema, where: str, ours: tuple[table.Param, ...], theirs: dict[str, SchemaParam]
) -> list[str]:
    """Where our fields differ from the schema's."""
    found = [f"{where}.{name}: not in the table" for name in theirs.keys() - {each.name for each in ours}]
    for field in ours:
        known = theirs.get(field.name)
        if known is None:
            found.append(f"{where}.{field.name}: not in the schema")
            continue
        if known["required"] != field.is_required:
            found.append(f"{where}.{field.name}: required {known['required']} in the schema")
        kind, class_name = known["kind"], known["class_name"]
        expected: tuple[str, int, bool] = (kind, 0, False)
        if kind in ("enum", "object"):
            expected = (class_name, 0, False)
        elif kind == "array":
            expected = (*schema["arrays"][class_name], False)
        elif kind == "bitmask":
            expected = (schema["bitmasks"][class_name], 0, True)
        if (field.type, field.element_count_limit, field.is_set) != expected:
            found.append(f"{where}.{field.name}: {expected} in the schema, {field.type} in the table")
    return found


def test_methods_are_those_of_the_schema(schema: Schema) -> None:
    wrong: list[str] = []
    for method in table.methods().values():
        if method.name not in schema["methods"]:
            wrong.append(f"{method.name}: not in the schema")
        else:
            wrong += faults(schema, method.name, method.params, schema["methods"][method.name])
    for name, fields in table.objects().items():
        wrong += faults(schema, name, fields, schema["objects"][name])
    assert not wrong, "\n".join(wrong)


def test_enums_are_those_of_the_schema(schema: Schema) -> None:
    assert {name: schema["enums"][name] for name in table.enums()} == dict(table.enums())


def test_every_type_of_the_table_is_known() -> None:
    known = {"string", "uuid", "boolean", *table.INTEGERS, *table.enums(), *table.objects()}
    for method in table.methods().values():
        for field in method.params:
            assert field.type in known, f"{method.name}.{field.name}: {field.type}"


@pytest.mark.parametrize(
    ("name", "source"), [("calls.py", generate.calls_source), ("methods.py", generate.methods_source)]
)
def test_generated_code_is_what_the_table_says(name: str, source: Any) -> None:
    there = ast.parse((FOLDER / name).read_text(encoding="utf-8"))
    assert ast.dump(there) == ast.dump(ast.parse(source())), "run python -m spdk_rpc.generate and make format"


def test_both_facades_have_every_method() -> None:
    for name in table.methods():
        assert inspect.signature(getattr(SpdkRpc, name)) == inspect.signature(getattr(calls, name))
        assert inspect.iscoroutinefunction(getattr(AsyncSpdkRpc, name))


def made_up(field: table.Param) -> Any:
    """A value of a parameter's type."""
    if field.type in table.INTEGERS:
        value: Any = 1
    elif field.type in table.enums():
        value = table.enums()[field.type][-1]
    elif field.type in table.objects():
        value = {each.name: made_up(each) for each in table.objects()[field.type]}
    else:
        value = {
            "string": "1",
            "boolean": True,
            "uuid": "ceccf520-691e-4b46-9546-34af789907c5",
        }[field.type]
    return [value] if field.is_set or field.element_count_limit else value


@pytest.mark.parametrize("name", table.methods())
def test_call_carries_every_argument_under_spdks_name(name: str) -> None:
    method = table.methods()[name]
    by_python_name = {
        each.python_name: each
        for field in method.params
        for each in ((field, *table.objects()[field.type]) if field.type in table.objects() else (field,))
    }
    build = getattr(calls, name)
    arguments = {each: made_up(by_python_name[each]) for each in inspect.signature(build).parameters}
    call = build(**arguments)
    assert isinstance(call, Call) and call.method == name
    assert set(call.params) == {each.name for each in method.params if not each.is_deprecated}
    required = {each.python_name for each in by_python_name.values() if each.is_required}
    only_required = build(
        **{each: value for each, value in arguments.items() if each in required | {"trsvcid"}}
    )
    assert {each.name for each in method.params if each.is_required} <= set(only_required.params)


@pytest.mark.parametrize("name", {each.result for each in table.methods().values()})
def test_result_types_are_there(name: str) -> None:
    scope = {**vars(results), "Any": Any}
    assert eval(name, scope) is not None


@pytest.mark.parametrize(
    ("method", "params", "text"),
    [
        ("bdev_malloc_create", {"block_size": 512}, "num_blocks: missing"),
        (
            "bdev_malloc_create",
            {"num_blocks": -1},
            "num_blocks: expected a whole number from 0 to .*, got -1",
        ),
        ("bdev_malloc_create", {"num_blocks": True}, "num_blocks: expected a whole number"),
        ("bdev_malloc_create", {"nam": "x"}, "nam: no such parameter"),
        ("bdev_malloc_create", {"uuid": "x"}, "uuid: expected a UUID, got 'x'"),
        ("bdev_raid_create", {"base_bdevs": ["a"] * 256}, "base_bdevs: expected at most 255 elements"),
        ("bdev_raid_create", {"base_bdevs": "ab"}, "base_bdevs: expected a list"),
        ("bdev_raid_create", {"base_bdevs": [5]}, "base_bdevs: expected a string"),
        (
            "bdev_raid_get_bdevs",
            {"category": "some"},
            "category: expected one of online, configuring, offline, all",
        ),
        ("nvmf_subsystem_add_ns", {"nqn": "n", "namespace": {}}, "namespace: bdev_name: missing"),
        ("nvmf_subsystem_add_ns", {"nqn": "n", "namespace": []}, "namespace: expected an object"),
        ("nvmf_subsystem_allow_any_host", {"allow_any_host": 1}, "allow_any_host: expected true or false"),
        ("bdev_nvme_set_options", {"dhchap_digests": ["md5"]}, "dhchap_digests: expected one of sha256"),
        ("nvmf_subsystem_add_host", {"psk": 77}, "psk: expected a string$"),
    ],
)
def test_parameter_of_a_wrong_kind_is_refused_before_it_is_sent(
    method: str, params: dict[str, Any], text: str
) -> None:
    with pytest.raises(RpcUsageError, match=f"^{method}: .*{text}"):
        check_params(method, params)


def test_method_the_table_does_not_have_is_let_through() -> None:
    check_params("bdev_of_the_future_create", {"anything": object()})


def test_repr_of_a_call_hides_secrets_at_any_depth() -> None:
    call: Call[bool] = Call("m", {"psk": "NVMeTLSkey-1:01:x", "list": [{"password": "p"}], "name": "n"})
    assert repr(call) == "Call('m', {'psk': '***', 'list': [{'password': '***'}], 'name': 'n'})"
    with pytest.raises(RpcUsageError) as caught:
        calls.bdev_nvme_attach_controller(name="N", traddr="::1", psk="hidden!", num_io_queues=-1)
    assert "hidden" not in str(caught.value)


def test_secret_parameters_of_the_table_are_hidden() -> None:
    marked = {each.name for method in table.methods().values() for each in method.params if each.is_secret}
    assert {"psk", "dhchap_key", "dhchap_ctrlr_key", "password"} == marked <= table.SECRET_NAMES


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        (Shape.BOOLEAN, True, 1),
        (Shape.INTEGER, 1, True),
        (Shape.TEXT, "x", None),
        (Shape.OBJECT, {}, []),
        (Shape.OBJECTS, [{}], ["x"]),
        (Shape.OBJECTS, [], None),
        (Shape.OBJECTS_OR_NULL, None, {}),
        (Shape.TEXTS, ["x"], [1]),
    ],
)
def test_shape_of_a_result(shape: Shape, good: Any, bad: Any) -> None:
    assert shape.fits(good) and not shape.fits(bad)


def test_address_family_follows_from_the_address() -> None:
    attach = calls.bdev_nvme_attach_controller(name="N", traddr="fd00::1", trsvcid=4420)
    assert (attach.params["adrfam"], attach.params["trsvcid"], attach.params["trtype"]) == (
        "ipv6",
        "4420",
        "TCP",
    )
    pcie = calls.bdev_nvme_attach_controller(name="N", traddr="0000:01:00.0", trtype="PCIe")
    assert "adrfam" not in pcie.params and "trsvcid" not in pcie.params
