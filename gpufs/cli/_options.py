"""Options and arguments that several commands have, and what a shell offers for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

from gpufs import config, mounting
from gpufs.cli import _mounts
from gpufs.cli._main import complete_files
from gpufs.cli._output import Failure, complain
from gpufs.config import kinds

_ALL = "gpufs.help_all"
Function: TypeAlias = Callable[..., Any]


def complete_mounts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the mountpoints of this machine, for a shell."""
    return [CompletionItem(entry.mountpoint) for entry in mounting.mounts() if entry.mountpoint.startswith(incomplete)]


def _completion(kind: kinds.Kind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return what a shell offers for a value of this kind: its choices, files, or nothing."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if kind is kinds.PATH:
            return complete_files(ctx, parameter, incomplete)
        return [CompletionItem(word) for word in kind.choices if word.startswith(incomplete)]

    return complete


def for_each_mount(mountpoints: Sequence[str], every: bool, work: Callable[[str], None]) -> int:
    """Call ``work`` for each of the MOUNTPOINTs, or with --all for each mount of this user. Return the exit code.

    A Failure is printed, and the others follow all the same.
    """
    if every == bool(mountpoints):
        raise click.UsageError("Give either a MOUNTPOINT or --all.")
    if every:
        # A mount inside another one comes later in the list and keeps the other one busy.
        mine = [entry.mountpoint for entry in mounting.mounts() if entry.uid == os.geteuid()]
        mountpoints = mine[::-1]
    code = 0
    for mountpoint in mountpoints:
        try:
            work(mountpoint)
        except Failure as failure:
            complain(str(failure))
            code = code or failure.code
    return code


class KnobCommand(click.Command):
    """A command with so many knobs that ``--help`` shows the everyday ones, and ``--help-all`` the rest as well."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        hidden = {knob.name for knob in config.KNOBS if not knob.everyday} if _ALL not in ctx.meta else set()
        shown = [
            option for option in self.get_params(ctx) if isinstance(option, click.Option) and option.name not in hidden
        ]
        with formatter.section("Options"):
            formatter.write_dl([record for option in shown if (record := option.get_help_record(ctx)) is not None])


def show_all_options(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the help with all options: the callback of --help-all of a KnobCommand."""
    if value:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def time_option(
    name: str, least: float, most: float, text: str, default: str | None = None
) -> Callable[[Function], Function]:
    """Add an option for a time; the argument is in seconds, or None."""
    kind = kinds.duration(least, most)

    def seconds(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
        try:
            return None if value is None else float(kind.parse(value))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not {kind.allowed}.", ctx, parameter) from None

    return click.option(name, metavar=kind.metavar, default=default, callback=seconds, help=text)


def address_option(name: str, text: str) -> Callable[[Function], Function]:
    """Add an option for where to serve by HTTP; the argument is the address and the port, or None."""

    def parse(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, int] | None:
        if value is None:
            return None
        host, colon, port = value.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise Failure(f"{name}: {value} is not ADDRESS:PORT, for example localhost:9400", 2)
        return host.strip("[]"), int(port)

    return click.option(name, metavar="ADDRESS:PORT", callback=parse, help=text)


def timeout_option(knob: config.Knob) -> Callable[[Function], Function]:
    """Add the option of config.STATUS_TIMEOUT or config.UMOUNT_TIMEOUT; the argument ``timeout`` is in seconds."""
    return click.option(
        knob.option,
        "timeout",
        metavar=knob.kind.metavar,
        envvar=knob.variable,
        default=knob.describe_default(),
        callback=lambda ctx, parameter, text: knob.coerce(text, knob.option),
        help=f"{knob.text}  [default: {knob.describe_default()}; env: {knob.variable}]",
    )


def knob_options(function: Function) -> Function:
    """Add the options of all knobs, and --config; each argument is the text given or None."""
    function = click.option(
        "--config",
        "config_file",
        metavar="FILE",
        shell_complete=complete_files,
        help=f"Configuration file, instead of ~/.config/gpufs/config.toml and {config.SYSTEM_FILE}.  "
        f"[env: {config.CONFIG_VARIABLE}]",
    )(function)
    for knob in reversed(config.KNOBS):
        text = f"{knob.text}  [default: {knob.describe_default()}; env: {knob.variable}]"
        if knob.kind is kinds.BOOLEAN:
            option = click.option(
                f"{knob.option}/--no-{knob.option[2:]}", knob.name, default=None, help=text, hidden=knob.hidden
            )
        else:
            option = click.option(
                knob.option,
                knob.name,
                metavar=knob.kind.metavar,
                multiple=knob.kind is kinds.BACKINGS,
                shell_complete=_completion(knob.kind),
                help=text,
                hidden=knob.hidden,
            )
        function = option(function)
    return function


def settings(
    arguments: Mapping[str, Any],
    mountpoint: str,
    *,
    origin_of: Callable[[config.Knob], str] = lambda knob: knob.option,
) -> config.Settings:
    """Return the settings of a mount for the arguments of knob_options; ``origin_of`` names one in messages."""
    given = {name: value for name, value in arguments.items() if name in config.BY_NAME and value != ()}
    file, path = arguments.get("config_file"), _mounts.absolute(mountpoint)
    return config.load(given, config_file=file, mountpoint=path, origin_of=origin_of)
