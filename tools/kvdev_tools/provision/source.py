"""Read the file as YAML and keep the line and column of every value, so that an error can point there.

Not here: what may stand in it (``schema``), what it means (``document``).
Trust: the text is ``untrusted``; raises only UsageError. Neither tags nor merge keys are taken, nothing is
constructed but text, numbers, booleans, null, lists and mappings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from kvdev.errors import UsageError
from kvdev.files import read_regular

Path_: TypeAlias = tuple[str | int, ...]
"""Where a value stands: names of mappings and indices of lists, from the top."""

FILE_SIZE_LIMIT_BYTES = 1 << 20
NODE_COUNT_LIMIT = 100_000
"""Values of one file, aliases counted each time: a file of nested aliases would have no end."""
DEPTH_LIMIT = 32

_SECRET = re.compile(r"(NVMeTLSkey-|DHHC-)[^\s'\"]*")
"""A key in its interchange form; a file has only names and paths of keys, but people paste."""
_KEY_FIELDS = ("keys", "psk", "dhchap_key", "dhchap_ctrlr_key")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?[0-9]+\.[0-9]+")
_DIGIT_LIMIT = 30


@dataclass(frozen=True)
class Source:
    """A file's values and where each stands."""

    filename: str
    value: Any
    marks: dict[Path_, tuple[int, int]]

    def error(self, path: Path_, text: str) -> UsageError:
        """An error that names file, line, column and the value's path."""
        return UsageError(self.message(path, text))

    def message(self, path: Path_, text: str) -> str:
        place = path
        while place not in self.marks and place:
            place = place[:-1]  # what is missing has no place of its own
        line, column = self.marks.get(place, (1, 1))
        where = path_text(path)
        if ", got '" in text and any(field in path for field in _KEY_FIELDS):
            # Whatever stands there may be a key: it is not repeated.
            text = f"{text.partition(', got ')[0]}; a key itself stands in a file of mode 0600"
        return hide_keys(f"{self.filename}:{line}:{column}: {where + ': ' if where else ''}{text}")


def hide_keys(text: str) -> str:
    """The text with every key in it as stars."""
    return _SECRET.sub(r"\1***", text)


def path_text(path: Path_) -> str:
    """``targets.array0.raids.r0.members[1]``"""
    text = ""
    for each in path:
        text += f"[{each}]" if isinstance(each, int) else f".{each}" if text else str(each)
    return text


def load_file(filename: str) -> Source:
    """Read a file of at most 1 MiB."""
    try:
        data = read_regular(filename, FILE_SIZE_LIMIT_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{filename}: {reason}; name the file of the deployment") from error
    if len(data) > FILE_SIZE_LIMIT_BYTES:
        raise UsageError(f"{filename}: expected at most {FILE_SIZE_LIMIT_BYTES} bytes")
    return load_text(data, filename)


def load_text(untrusted: bytes | str, filename: str = "file") -> Source:
    """Parse YAML. Raises UsageError with line and column."""
    try:
        text = untrusted.decode("utf-8") if isinstance(untrusted, bytes) else untrusted
        _check_depth(text, filename)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise UsageError(f"{filename}: expected UTF-8 text, byte {error.start} is none") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{filename}:{mark.line + 1}:{mark.column + 1}" if mark else filename
        raise UsageError(hide_keys(f"{where}: {error.problem or 'no YAML'}")) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{filename}: no YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UsageError(f"{filename}: is nested too deeply") from None
    if node is None:
        raise UsageError(f"{filename}: expected a description of targets and hosts, got an empty file")
    builder = _Builder(filename)
    return Source(filename, builder.build(node, ()), builder.marks)


def _check_depth(text: str, filename: str) -> None:
    """Refuse deep nesting by the events, which come one by one: building the nodes takes minutes then."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
            if depth > DEPTH_LIMIT:
                mark = event.start_mark
                where = filename if mark is None else f"{filename}:{mark.line + 1}:{mark.column + 1}"
                raise UsageError(f"{where}: expected at most {DEPTH_LIMIT} levels")
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1


class _Builder:
    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.marks: dict[Path_, tuple[int, int]] = {}
        self._count = 0

    def build(self, node: yaml.Node, path: Path_) -> Any:
        self._count += 1
        if self._count > NODE_COUNT_LIMIT:
            raise UsageError(f"{self.filename}: expected at most {NODE_COUNT_LIMIT} values")
        if len(path) > DEPTH_LIMIT:
            raise self._error(node, f"expected at most {DEPTH_LIMIT} levels")
        self.marks[path] = (node.start_mark.line + 1, node.start_mark.column + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(each, (*path, index)) for index, each in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), "a YAML node is one of three"
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "expected a name, got a list or mapping")
            # A name is its text, also where a value of that text would be a number or null.
            self._scalar(key_node)
            key: str = key_node.value
            here = (*path, key)
            if key == "<<" and key_node.style is None:
                raise self._error(key_node, "merge keys are not taken; write the fields out")
            if key in built:
                raise self._error(key_node, f"{path_text(here)}: is there twice")
            built[key] = self.build(value_node, here)
            # The name marks the place, not its value, which may stand lines below.
            self.marks[here] = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        return built

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if node.tag.startswith("!") or node.tag not in _PLAIN_TAGS:
            raise self._error(node, f"tag {node.tag}: no tags are taken")
        if node.style is not None:
            return text
        # Only what every YAML reader agrees on: no yes/no/on/off, octal, or numbers in base 60.
        if text in ("", "~", "null"):
            return None
        if text in ("true", "false"):
            return text == "true"
        if _INTEGER.fullmatch(text) and len(text) <= _DIGIT_LIMIT:
            return int(text)
        if _HEX.fullmatch(text) and len(text) <= _DIGIT_LIMIT:
            return int(text, 16)
        if _FLOAT.fullmatch(text) and len(text) <= _DIGIT_LIMIT:
            return float(text)
        return text

    def _error(self, node: yaml.Node, text: str) -> UsageError:
        mark = node.start_mark
        return UsageError(hide_keys(f"{self.filename}:{mark.line + 1}:{mark.column + 1}: {text}"))


_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value", "binary")
)
