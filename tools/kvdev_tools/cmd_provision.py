"""``kvdev provision``: targets, hosts, volumes and KV namespaces from one file: plan, apply, status, destroy, adopt."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvdev_tools.connect import timeout_option
from kvdev_tools.output import Progress, emit, json_option

if TYPE_CHECKING:
    from kvdev_tools.provision.document import Deployment
    from kvdev_tools.provision.work import Outcome, WholePlan

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def provision() -> None:
    """Make what a file describes: targets, hosts, volumes, KV namespaces.

    \b
    The file says what shall be, docs/provision.md every field of it. A plan says what would change and with
    which RPCs; apply does it, checks each step by reading, and stops at the first that fails. Applying twice
    changes nothing. What the file does not name is left alone.
    """


def plan_options(command: _Command) -> _Command:
    """``--replace``, ``--remove`` and ``--prune``."""
    for option in (
        click.option(
            "--prune",
            is_flag=True,
            help="Remove hosts, namespaces and listeners of the file's subsystems, and limits of its bdevs, that "
            "it does not name.",
        ),
        click.option(
            "--remove",
            metavar="KIND:NAME",
            multiple=True,
            help="Take down this, which runs and is not in the file; such as vhost:old.0 or ENTRY/bdev:m9.",
        ),
        click.option(
            "--replace",
            metavar="KIND:NAME",
            multiple=True,
            help="Remove this and make it anew, if it differs; such as raid:R0 or ENTRY/bdev:m0.",
        ),
    ):
        command = option(command)
    return command


def color_option(command: _Command) -> _Command:
    return click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Colours; auto: on a terminal, unless NO_COLOR is set.",
    )(command)


@provision.command()
@click.argument("file", metavar="FILE")
@plan_options
@color_option
@timeout_option
@json_option
def plan(
    file: str,
    replace: tuple[str, ...],
    remove: tuple[str, ...],
    prune: bool,
    color: str,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Show what apply would do; changes nothing. The exit code is 2 when something stands in the way.

    \b
    Example:
      kvdev provision plan site.yaml
    """
    from kvdev_tools.provision.document import load_deployment
    from kvdev_tools.provision.work import looking, plan_everything

    with looking(load_deployment(file), timeout_s=timeout_s) as look:
        whole = plan_everything(look, replace=replace, remove=remove, prune=prune)
        return _show_plan(whole, color=color, as_json=as_json)


@provision.command(short_help="Make what the file describes, step by step.")
@click.argument("file", metavar="FILE")
@click.option("--dry-run", is_flag=True, help="As plan.")
@plan_options
@color_option
@timeout_option
@json_option
def apply(
    file: str,
    dry_run: bool,
    replace: tuple[str, ...],
    remove: tuple[str, ...],
    prune: bool,
    color: str,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Make what the file describes, step by step, each checked by reading.

    Stops at the first step that fails; what was done stays, and the next apply goes on from there. A second
    apply at the same time is refused.

    \b
    Example:
      kvdev provision apply site.yaml
    """
    from kvdev_tools.provision.document import load_deployment
    from kvdev_tools.provision.lock import locked
    from kvdev_tools.provision.work import looking, plan_everything

    deployment = load_deployment(file)
    if dry_run:
        with looking(deployment, timeout_s=timeout_s) as look:
            whole = plan_everything(look, replace=replace, remove=remove, prune=prune)
            return _show_plan(whole, color=color, as_json=as_json)
    with locked(deployment):
        with looking(deployment, timeout_s=timeout_s) as look:
            whole = plan_everything(look, replace=replace, remove=remove, prune=prune)
        if whole.problems:
            return _show_plan(whole, color=color, as_json=as_json)
        return _carry_out(whole, timeout_s=timeout_s, as_json=as_json)


@provision.command()
@click.argument("file", metavar="FILE")
@click.option("--yes", metavar="NAME", help="The deployment's name again, instead of typing it.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@click.option(
    "--assume-dead", is_flag=True, help="Count writers that cannot be asked, such as on other hosts, as dead."
)
@color_option
@timeout_option
@json_option
def destroy(
    file: str,
    yes: str | None,
    dry_run: bool,
    assume_dead: bool,
    color: str,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Take down what the file describes, hosts first. Refused while a KV namespace has a live writer.

    The bytes of malloc bdevs and lvols are lost; files and SSDs keep theirs, with the volume on them, so
    that an apply brings it back.

    \b
    Example:
      kvdev provision destroy site.yaml
    """
    from kvdev.errors import KvdevError
    from kvdev_tools.provision.document import load_deployment
    from kvdev_tools.provision.lock import locked
    from kvdev_tools.provision.work import live_writers, looking, plan_destruction

    deployment = load_deployment(file)
    if dry_run:
        with looking(deployment, timeout_s=timeout_s, stray_limit=None) as look:
            whole = plan_destruction(look)
            whole.warnings = [
                f"would be refused: {each}" for each in live_writers(look, assume_dead=assume_dead)
            ]
            return _show_plan(whole, color=color, as_json=as_json)
    with locked(deployment):
        with looking(deployment, timeout_s=timeout_s, stray_limit=None) as look:
            whole = plan_destruction(look)
            writers = live_writers(look, assume_dead=assume_dead)
        if writers:
            more = f" (and {len(writers) - 1} more)" if len(writers) > 1 else ""
            raise KvdevError(f"destroy {deployment.name}: {writers[0]}{more}; stop it first")
        if whole.problems:
            return _show_plan(whole, color=color, as_json=as_json)
        if not whole.is_empty:
            _confirm(deployment, whole, yes, color)
        return _carry_out(whole, timeout_s=timeout_s, as_json=as_json)


@provision.command(short_help="Show what of the file is there, and in what state.")
@click.argument("file", metavar="FILE")
@color_option
@timeout_option
@json_option
def status(file: str, color: str, timeout_s: float, as_json: bool) -> int:
    """Show targets, subsystems, namespaces, members, volumes and KV namespaces, and how they are.

    For each way to a volume it says what becomes of a flush at every hop: effective, swallowed, or not
    needed. The exit code is 3 when an SPDK is unreachable, or something that the file names is not as it says.

    \b
    Example:
      kvdev provision status site.yaml
    """
    from kvdev_tools.exits import ExitCode
    from kvdev_tools.provision.document import load_deployment
    from kvdev_tools.provision.render import Painter
    from kvdev_tools.provision.tree import status_document, tree_lines
    from kvdev_tools.provision.work import looking, plan_everything

    with looking(load_deployment(file), timeout_s=timeout_s, stray_limit=None) as look:
        is_readable = all(view.is_up for view in look.endpoints)
        whole = plan_everything(look) if is_readable else None
        document = status_document(look, whole, timeout_s=timeout_s)
    painter = Painter(sys.stdout, when=color)
    _show(document, tree_lines(document, painter), as_json=as_json)
    parts = (*document["targets"], *document["hosts"], *document["volumes"])
    is_well = all(each["health"] in ("ok", "not checked") for each in parts)
    return int(ExitCode.OK if is_readable and is_well else ExitCode.UNREACHABLE)


@provision.command(short_help="Write the file from what runs.")
@click.option("--name", default="adopted", show_default=True, help="Name of the deployment.")
@click.option(
    "--target", "targets", metavar="NAME=RPC", multiple=True, help="A target's SPDK and its socket."
)
@click.option("--host", "hosts", metavar="NAME=RPC", multiple=True, help="A host's SPDK and its socket.")
@click.option("--host-nqn", metavar="NQN", help="Look for volumes as this host.")
@click.option("-o", "--output", metavar="FILE", help="Write there; never over a file that exists.")
@timeout_option
@json_option
def adopt(
    name: str,
    targets: tuple[str, ...],
    hosts: tuple[str, ...],
    host_nqn: str | None,
    output: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Write the file from what runs; what it has no words for is left out and named on standard error.

    \b
    Example:
      kvdev provision adopt --target array0=/var/tmp/spdk.sock -o site.yaml
    """
    from kvdev.errors import UsageError
    from kvdev_tools.provision.adopt import adopt as adopt_running

    entries = [_named_rpcs(each, option) for each, option in ((targets, "target"), (hosts, "host"))]
    if not any(entries):
        raise UsageError("adopt: expected --target NAME=RPC or --host NAME=RPC")
    adopted = adopt_running(
        name, targets=entries[0], hosts=entries[1], host_nqn=host_nqn, timeout_s=timeout_s
    )
    text = adopted.text()
    if output is not None:
        _write_new(output, text)
    for note in () if as_json else adopted.notes:
        click.echo(f"note: {note}", err=True)
    document = {"file": output, "text": text, "notes": adopted.notes}
    emit(document, as_json=as_json, text=lambda: [f"wrote {output}"] if output else [text.rstrip()])


@provision.command(short_help="Write the configuration that SPDK reads at its start.")
@click.argument("file", metavar="FILE")
@click.argument("entry", metavar="ENTRY")
@click.option("-o", "--output", metavar="FILE", help="Write there, in one step  [default: standard output]")
@timeout_option
@json_option
def export(file: str, entry: str, output: str | None, timeout_s: float, as_json: bool) -> None:
    """Write the configuration that SPDK reads at its start (--json), so that it survives a restart.

    \b
    Example:
      kvdev provision export site.yaml array0 -o /etc/kvdev/spdk-array0.json
    """
    from kvdev_tools.provision.adopt import export_config
    from kvdev_tools.provision.document import load_deployment
    from spdk_rpc import Client

    endpoint = load_deployment(file).endpoint(entry)
    with Client(endpoint.rpc, timeout_s=timeout_s) as client:
        config = export_config(client)
    text = json.dumps(config, indent=2) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    _replace_file(output, text)
    document = {"file": output, "calls": sum(len(each["config"] or ()) for each in config["subsystems"])}
    emit(document, as_json=as_json, text=lambda: [f"wrote {output}: {document['calls']} calls"])


@provision.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors."""
    from kvdev_tools.provision.schema import SCHEMA

    click.echo(json.dumps(SCHEMA, indent=2))


def _show(document: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        emit(document, as_json=True, text=tuple)
        return
    for line in lines:
        # The painter has decided; click would take colours out wherever there is no terminal.
        click.echo(line, color=True)


def _show_plan(whole: WholePlan, *, color: str, as_json: bool) -> int:
    from kvdev.errors import UsageError
    from kvdev_tools.provision.render import Painter, plan_document, plan_lines

    painter = Painter(sys.stdout, when=color)
    _show(plan_document(whole), plan_lines(whole, painter), as_json=as_json)
    if whole.problems:
        more = f" (and {len(whole.problems) - 1} more)" if len(whole.problems) > 1 else ""
        raise UsageError(f"{whole.problems[0]}{more}; nothing was changed")
    return 0


def _carry_out(whole: WholePlan, *, timeout_s: float, as_json: bool) -> int:
    from kvdev_tools.exits import ExitCode, exit_code_of
    from kvdev_tools.provision.render import outcome_document, summary
    from kvdev_tools.provision.work import carry_out

    bar = Progress("apply", whole.step_count, is_quiet=as_json)

    def heard(index: int, text: str) -> None:
        bar.close()
        if not as_json:
            click.echo(f"[{index + 1}/{max(index + 1, whole.step_count)}] {text}")
        bar.update(index, text)

    try:
        outcome = carry_out(whole, timeout_s=timeout_s, on_step=heard)
    finally:
        bar.close()
        for view, _ in whole.endpoints:
            view.client.close()
    emit(
        outcome_document(outcome),
        as_json=as_json,
        text=lambda: [summary(whole) if whole.step_count == 0 else f"{outcome.done_count} steps done"],
    )
    if outcome.error is None:
        return 0
    _complain(outcome)
    code = exit_code_of(outcome.error)
    # A wrong argument is what it says of a run that changed nothing; this one stopped half way.
    return int(ExitCode.REFUSED if code is ExitCode.USAGE and outcome.done_count else code)


def _complain(outcome: Outcome) -> None:
    fate = "; whether it took effect is not known" if outcome.is_fate_unknown else ""
    undone = "; it was undone" if outcome.was_undone else ""
    text = "".join(c if c.isprintable() else " " for c in str(outcome.error))
    click.echo(
        f"kvdev: {outcome.failed}: {text}{fate}{undone}; {outcome.done_count} of {outcome.step_count} steps "
        f"are done, the next apply goes on from there",
        err=True,
    )


def _confirm(deployment: Deployment, whole: WholePlan, yes: str | None, color: str) -> None:
    from kvdev.errors import UsageError
    from kvdev_tools.provision.render import Painter, plan_lines

    volumes = ", ".join(f"volume {name}" for name in deployment.volumes)
    if yes is None and sys.stdin.isatty():
        for line in plan_lines(whole, Painter(sys.stderr, when=color), shows_rpcs=False):
            click.echo(line, err=True)
        question = f"Type {deployment.name} to destroy it{f', with {volumes}' if volumes else ''}"
        yes = click.prompt(question, err=True, default="", show_default=False)
    if yes != deployment.name:
        got = "no --yes" if yes is None else repr(yes)
        goes = f" ({volumes} would go with it)" if volumes else ""
        raise UsageError(f"yes: expected the name {deployment.name!r}, got {got}{goes}; nothing was changed")


def _named_rpcs(given: tuple[str, ...], option: str) -> dict[str, str]:
    from kvdev.errors import UsageError
    from spdk_rpc import parse_address

    found: dict[str, str] = {}
    for each in given:
        name, equals, rpc = each.partition("=")
        if not equals or not name or not rpc:
            raise UsageError(f"{option}: expected NAME=RPC, got {each!r}")
        if name in found:
            raise UsageError(f"{option}: {name}: is there twice")
        parse_address(rpc, field=f"--{option} {name}")
        found[name] = rpc
    return found


def _write_new(path: str, text: str) -> None:
    from kvdev.errors import UsageError

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UsageError(f"output: {path}: {error.strerror}") from error
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)


def _replace_file(path: str, text: str) -> None:
    """Whoever reads it sees the old or the new text, also after a crash."""
    from kvdev.errors import UsageError
    from kvdev.files import open_kept

    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fd = open_kept(temporary, os.O_EXCL)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        raise UsageError(f"output: {path}: {error.strerror}") from error
