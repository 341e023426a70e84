"""Write ``calls`` and ``methods`` from the table: ``python -m spdk_rpc.generate`` in a checkout.

Not here: the table; formatting (``make format`` afterwards). A test compares what is there with this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from spdk_rpc import table

_PLAIN = {"string": "str", "uuid": "str", "boolean": "bool", **dict.fromkeys(table.INTEGERS, "int")}
_SHAPES = {
    "Any": "ANY",
    "bool": "BOOLEAN",
    "int": "INTEGER",
    "str": "TEXT",
    "list[str]": "TEXTS",
    "list[ConfigCall] | None": "OBJECTS_OR_NULL",
}
# An object parameter whose fields are arguments of their own, and its builder.
_FLAT = {"nvmf_listen_address": "listen_address", "nvmf_namespace": "without_none"}

_CALLS_HEAD = '''"""A function for each method of the table: keyword arguments in, a checked call out.

Generated from ``table`` by ``generate``; edit these two. An argument left at None is not sent, so SPDK's own
default holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from spdk_rpc.address import address_family, listen_address, without_none
from spdk_rpc.call import Call, Shape, build_call
from spdk_rpc.results import (
{results}
)
'''

_METHODS_HEAD = '''"""Typed methods over one client: ``SpdkRpc`` runs each of ``calls``, ``AsyncSpdkRpc`` awaits it.

Generated from ``table`` by ``generate``; edit these two. Every method raises what the client's ``call``
raises.
"""

from __future__ import annotations

from spdk_rpc import calls
from spdk_rpc.runner import AsyncRunner, Runner, awaited, run_now
'''


def alias(name: str) -> str:
    """CamelCase of an enum's or object's name."""
    return "".join(word.capitalize() for word in name.split("_"))


def shape_of(result: str) -> str:
    """The name of the ``Shape`` of a result type."""
    return _SHAPES.get(result) or ("OBJECTS" if result.startswith("list[") else "OBJECT")


def _type_of(field: table.Param) -> str:
    if field.name == "trsvcid":
        return "int | str"
    plain = _PLAIN.get(field.type) or alias(field.type)
    return f"Sequence[{plain}]" if field.is_set or field.element_count_limit else plain


def _arguments(method: table.Method) -> list[table.Param]:
    """The parameters as Python has them: offered ones, flat, the required ones first."""
    flat: list[table.Param] = []
    for field in method.params:
        if field.is_deprecated:
            continue
        flat += table.objects()[field.type] if field.type in _FLAT else (field,)
    offered = [each for each in flat if not each.is_deprecated]
    return sorted(offered, key=lambda each: not (each.is_required and each.default is None))


def _signature(method: table.Method) -> Iterator[str]:
    arguments = _arguments(method)
    required = [each for each in arguments if each.is_required]
    positional = required[0] if len(required) == 1 else None
    if positional is not None:
        arguments = [positional, *(each for each in arguments if each is not positional)]
    for index, field in enumerate(arguments):
        if index == (1 if positional is not None else 0):
            yield "*"
        kind = _type_of(field)
        if field.default is not None:
            yield f'{field.python_name}: {kind} = "{field.default}"'
        elif field.is_required or (field.name == "trsvcid" and "listen_address" in str(method.params)):
            yield f"{field.python_name}: {kind}"
        else:
            yield f"{field.python_name}: {kind} | None = None"


def _value_of(field: table.Param) -> str:
    name = field.python_name
    if field.type in _FLAT:
        fields = [each for each in table.objects()[field.type] if not each.is_deprecated]
        arguments = ", ".join(f"{each.python_name}={each.python_name}" for each in fields)
        return f"{_FLAT[field.type]}({arguments})"
    if field.name == "trsvcid":
        return "None if trsvcid is None else str(trsvcid)"
    if field.name == "adrfam":
        return "address_family(traddr) if adrfam is None else adrfam"
    if field.is_set or field.element_count_limit:
        return f"list({name})" if field.is_required else f"None if {name} is None else list({name})"
    return name


def _function(method: table.Method) -> Iterator[str]:
    yield f"\n\ndef {method.name}({', '.join(_signature(method))}) -> Call[{method.result}]:"
    if method.note:
        yield f'    """{method.note}"""'
    offered = [each for each in method.params if not each.is_deprecated]
    params = ", ".join(f'"{each.name}": {_value_of(each)}' for each in offered)
    yield f'    return build_call("{method.name}", {{{params}}}, Shape.{shape_of(method.result)})'


def _literal(values: tuple[str, ...]) -> str:
    return ", ".join(f'"{each}"' for each in values)


def calls_source() -> str:
    """The text of ``calls``, not formatted."""
    methods = table.methods().values()
    named = {word for each in methods for word in re.findall(r"\b[A-Z]\w+", each.result)}
    results = sorted(named - {"Any", "None"}, key=lambda name: (name.lower(), name))
    lines = [_CALLS_HEAD.replace("{results}", "\n".join(f"    {each}," for each in results))]
    lines += [f"{alias(name)} = Literal[{_literal(values)}]" for name, values in table.enums().items()]
    for name, fields in table.objects().items():
        if name not in _FLAT:
            lines.append(f"\n\nclass {alias(name)}(TypedDict, total=False):")
            lines += [f"    {each.name}: {_type_of(each)}" for each in fields]
    for method in methods:
        lines += _function(method)
    return "\n".join(lines) + "\n"


def methods_source() -> str:
    """The text of ``methods``, not formatted."""
    names = list(table.methods())
    lines = [_METHODS_HEAD]
    for name, base, how, note in (
        ("SpdkRpc", "Runner", "run_now", "Each method sends its call and returns the result."),
        ("AsyncSpdkRpc", "AsyncRunner", "awaited", "Each method returns an awaitable of the result."),
    ):
        lines += [f"\nclass {name}({base}):", f'    """{note}"""\n']
        lines += [f"    {each} = {how}(calls.{each})" for each in names]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    folder = Path(__file__).parent
    (folder / "calls.py").write_text(calls_source(), encoding="utf-8")
    (folder / "methods.py").write_text(methods_source(), encoding="utf-8")


if __name__ == "__main__":
    main()
