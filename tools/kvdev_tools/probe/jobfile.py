"""Job files and command lines: sections and options as text, each with the place where it stands.

The format is fio's: ``[global]`` and job sections, ``name=value`` lines, comments after ``;`` or ``#``, ``include``,
``${VARIABLE}``. One thing differs: the ``#`` of a KV namespace's URI (``vol:...#NAME``) starts no comment.
Not here: what the options mean (``option``, ``job``).
Trust: every text is untrusted; raises only UsageError naming file and line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvdev.errors import UsageError
from kvdev_tools.probe.option import OPTIONS, find_option

FILE_SIZE_MAX = 1 << 20
LINE_SIZE_MAX = 1 << 16
INCLUDE_DEPTH_MAX = 8
SECTION_COUNT_MAX = 4096
VARIABLE_DEPTH_MAX = 16

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_KEYWORDS = re.compile(r"\$(pagesize|mb_memory|ncpus)\b")


@dataclass(frozen=True)
class Entry:
    """The text of one option and where it stands (``FILE:LINE`` or ``command line``)."""

    text: str | None
    where: str


@dataclass
class Section:
    """One job as written; options are by canonical name, the last of a name counts."""

    name: str
    options: dict[str, Entry] = field(default_factory=dict)
    inherited: dict[str, Entry] = field(default_factory=dict)
    """What was global when the section began; options of its own come before."""

    def merged(self) -> dict[str, Entry]:
        return {**self.inherited, **self.options}


@dataclass
class JobText:
    """All sections in order, and what was global at the end."""

    sections: list[Section] = field(default_factory=list)
    globals: dict[str, Entry] = field(default_factory=dict)


class Reader:
    """Collects sections from files and from the command line, in the order that they are given."""

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        self.text = JobText()
        self._environment = os.environ if environment is None else environment

    # ---- the command line ----

    def take_arguments(self, arguments: Sequence[str]) -> list[str]:
        """Take the job options of a command line in fio's form; returns the names of job files among them.

        Options before the first ``--name`` are global.
        """
        files: list[str] = []
        current: Section | None = None
        index = 0
        while index < len(arguments):
            argument = arguments[index]
            index += 1
            if not argument.startswith("--"):
                files.append(argument)
                continue
            name, equals, text = argument[2:].partition("=")
            value: str | None = text if equals else None
            option = find_option(name, where="command line")
            if value is None and option.needs_value and not option.is_flag and index < len(arguments):
                value = arguments[index]
                index += 1
            entry = self._entry(name, value, "command line")
            if option.name == "name":
                current = self._section(entry.text or "", "command line")
            elif current is None:
                self.text.globals[option.name] = entry
            else:
                current.options[option.name] = entry
        return files

    def _section(self, name: str, where: str) -> Section:
        if len(self.text.sections) == SECTION_COUNT_MAX:
            raise UsageError(f"{where}: expected at most {SECTION_COUNT_MAX} jobs")
        section = Section(name, inherited=dict(self.text.globals))
        self.text.sections.append(section)
        return section

    def _entry(self, name: str, value: str | None, where: str) -> Entry:
        option = OPTIONS[name]
        if value is None and option.needs_value and not option.is_flag:
            raise UsageError(f"{where}: {name}: expected a value: {name}=VALUE")
        if value is not None:
            if not value.strip() and option.needs_value:
                raise UsageError(f"{where}: {name}: expected a value, got none after the =")
            value = self._expand(value, where)
        return Entry(value, where)

    def _expand(self, text: str, where: str) -> str:
        """Put environment variables and fio's keywords in their places."""
        for _ in range(VARIABLE_DEPTH_MAX):
            match = _VARIABLE.search(text)
            if match is None:
                break
            found = self._environment.get(match.group(1))
            if found is None:
                raise UsageError(f"{where}: ${{{match.group(1)}}}: this environment variable is not set")
            text = text[: match.start()] + found + text[match.end() :]
        else:
            raise UsageError(f"{where}: variables: expected at most {VARIABLE_DEPTH_MAX} in a value")
        return _KEYWORDS.sub(lambda word: str(_keyword(word.group(1))), text)

    # ---- files ----

    def take_files(self, names: Sequence[str], *, sections: frozenset[str] = frozenset()) -> None:
        """Take job files; with ``sections`` only those jobs of them, each of which some file has."""
        before = len(self.text.sections)
        for name in names:
            self.take_file(name, sections=sections)
        for section in sorted(sections - {each.name for each in self.text.sections[before:]}):
            where = ", ".join(names) or "no job file is named"
            raise UsageError(f"--section: {where}: expected a job of the name {section!r:.80}, found none")

    def take_file(self, name: str, *, sections: frozenset[str] = frozenset()) -> None:
        """Take a job file; with ``sections`` only those jobs of it."""
        before = len(self.text.sections)
        lines = self._read(Path(name), name)
        self._take_lines(lines, Path(name), None, 0, is_global=None)
        if sections:
            kept = [each for each in self.text.sections[before:] if each.name in sections]
            self.text.sections[before:] = kept

    def _read(self, path: Path, shown: str) -> list[str]:
        try:
            if path.is_file() and path.stat().st_size > FILE_SIZE_MAX:
                raise UsageError(f"{shown}: expected at most {FILE_SIZE_MAX} bytes of job file")
            with path.open("rb") as file:
                raw = file.read(FILE_SIZE_MAX + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"{shown}: job file cannot be read: {reason}") from error
        if len(raw) > FILE_SIZE_MAX:
            raise UsageError(f"{shown}: expected at most {FILE_SIZE_MAX} bytes of job file")
        try:
            return raw.decode().splitlines()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{shown}: expected a text file, got byte {error.object[error.start]:#04x} at "
                f"offset {error.start}"
            ) from error

    def _take_lines(
        self, lines: list[str], path: Path, section: Section | None, depth: int, *, is_global: bool | None
    ) -> None:
        """Sections and options of one file; an included one goes on in the section that includes it."""
        for number, line in _statements(lines):
            where = f"{path}:{number}"
            if len(line) > LINE_SIZE_MAX:
                raise UsageError(f"{where}: expected at most {LINE_SIZE_MAX} characters in a line")
            if line.startswith("["):
                name = line[1:].rpartition("]")[0] or line[1:]
                if not name.strip("] \t"):
                    raise UsageError(f"{where}: {line:.80}: expected a job's name in the brackets: [NAME]")
                if depth:
                    raise UsageError(f"{where}: [{name}]: expected options only in an included file")
                # As in fio: whatever begins with it.
                is_global = name.startswith("global")
                section = None if is_global else self._section(name, where)
                continue
            if re.match(r"include\s", line):
                self._include(
                    line[len("include") :].strip(), path, section, depth, where, is_global=is_global
                )
                continue
            if is_global is None:
                raise UsageError(f"{where}: {line!r:.80}: option outside of a [section]")
            name, equals, value = line.partition("=")
            name = name.rstrip()
            option = find_option(name, where=where)
            entry = self._entry(name, value.strip() if equals else None, where)
            target = self.text.globals if section is None else section.options
            target[option.name] = entry
            if section is not None and option.name == "name":
                section.name = entry.text or section.name

    def _include(
        self,
        name: str,
        path: Path,
        section: Section | None,
        depth: int,
        where: str,
        *,
        is_global: bool | None,
    ) -> None:
        if depth == INCLUDE_DEPTH_MAX:
            raise UsageError(
                f"{where}: include: expected at most {INCLUDE_DEPTH_MAX} files within each other"
            )
        found = Path(name)
        if not found.exists():
            found = path.parent / name
        if not found.exists():
            raise UsageError(f"{where}: include {name}: there is no such file, here or beside {path}")
        self._take_lines(self._read(found, str(found)), found, section, depth + 1, is_global=is_global)


def _statements(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Numbers and texts of lines that say something, without comments."""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text[0] in ";#":
            continue
        text = _without_comment(text)
        if text:
            yield number, text


def _without_comment(text: str) -> str:
    value = text.partition("=")[2].lstrip()
    is_volume = value.startswith(("vol:", "vol+"))
    for index, sign in enumerate(text):
        if sign == ";" or (sign == "#" and not (is_volume and not text[index - 1].isspace())):
            return text[:index].rstrip()
    return text


def _keyword(name: str) -> int:
    if name == "pagesize":
        return os.sysconf("SC_PAGE_SIZE")
    if name == "ncpus":
        return os.cpu_count() or 1
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
