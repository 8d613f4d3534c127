"""The command group, and the options that the knob table makes."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from gpufs import __version__, config, kinds, mounting

# name: the module that has it as `command`
COMMANDS: Final = {
    "mount": "gpufs.cli.mount",
    "umount": "gpufs.cli.umount",
    "status": "gpufs.cli.status",
    "df": "gpufs.cli.df",
    "stats": "gpufs.cli.stats",
    "trace": "gpufs.cli.trace",
    "doctor": "gpufs.cli.doctor",
    "cp": "gpufs.cli.cp",
    "mount-helper": "gpufs.cli.mount_helper",
}


class _Commands(click.Group):
    """Loads the module of a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name]).command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="gpufs")
def program() -> None:
    """GPU memory as files.

    `gpufs mount DIR` shows every GPU as a directory below DIR; a file there is device memory. Where there is no GPU,
    host memory stands in. Exit codes: 0 success, 1 failure (one line on standard error says why), 2 a wrong command
    line or configuration.
    """


def rewrite_for_mount(arguments: list[str]) -> list[str]:
    """The arguments; where mount(8) calls us as `gpufs SRC MNT -o OPTIONS` (type fuse.gpufs), those of mount-helper."""
    if len(arguments) >= 3 and "-o" in arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        return ["mount-helper", *arguments]
    return arguments


def _completion(kind: kinds.Kind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """What a shell offers for a value of this kind: its choices, files, or nothing."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if kind is kinds.PATH:
            return complete_files(ctx, parameter, incomplete)
        return [CompletionItem(word) for word in kind.choices if word.startswith(incomplete)]

    return complete


# Not click.Path: that asks for the attributes of what it is given, and a mount that hangs would never answer.
def complete_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Has a shell offer names of files."""
    return [CompletionItem(incomplete, type="file")]


def complete_directories(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Has a shell offer names of directories."""
    return [CompletionItem(incomplete, type="dir")]


def complete_mounts(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The mountpoints of this machine, for a shell."""
    return [CompletionItem(one.mountpoint) for one in mounting.mounts() if one.mountpoint.startswith(incomplete)]


type_of_command = Callable[..., Any]


def knob_options(command: str) -> Callable[[type_of_command], type_of_command]:
    """Adds the options of all knobs of a command, and --config; each argument is the text given or None."""

    def decorate(function: type_of_command) -> type_of_command:
        function = click.option(
            "--config",
            "config_file",
            metavar="FILE",
            shell_complete=complete_files,
            help=f"Configuration file, instead of ~/.config/gpufs/config.toml and {config.SYSTEM_FILE}.  "
            f"[env: {config.CONFIG_VARIABLE}]",
        )(function)
        for knob in reversed(config.KNOBS):
            if command not in knob.commands:
                continue
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

    return decorate


def settings(
    command: str, arguments: Mapping[str, Any], *, said_by: Callable[[config.Knob], str] = lambda knob: knob.option
) -> config.Settings:
    """The settings for the arguments of a command that has knob_options; ``said_by`` names one in messages."""
    given = {
        name: (kinds.join_backings(value) or None) if isinstance(value, tuple) else value
        for name, value in arguments.items()
        if name in config.BY_NAME
    }
    return config.load(given, config_file=arguments.get("config_file"), said_by=said_by, command=command)
