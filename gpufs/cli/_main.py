"""The command group."""

import importlib
import math
from typing import Final

import click
from click.shell_completion import CompletionItem, FishComplete, add_completion_class

from gpufs import __version__

# name: the module that defines `command`
COMMANDS: Final = {
    "mount": "gpufs.cli.mount",
    "cp": "gpufs.cli.cp",
    "run": "gpufs.cli.run",
    "umount": "gpufs.cli.umount",
    "status": "gpufs.cli.status",
    "df": "gpufs.cli.df",
    "ls": "gpufs.cli.ls",
    "top": "gpufs.cli.top",
    "inspect": "gpufs.cli.inspect",
    "diff": "gpufs.cli.diff",
    "leases": "gpufs.cli.leases",
    "quota": "gpufs.cli.quota",
    "stats": "gpufs.cli.stats",
    "metrics": "gpufs.cli.metrics",
    "trace": "gpufs.cli.trace",
    "doctor": "gpufs.cli.doctor",
    "mount-helper": "gpufs.cli.mount_helper",
}


@add_completion_class
class _Fish(FishComplete):
    """As click's, whose script cuts values and descriptions at their first comma."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')


class _Commands(click.Group):
    """Loads a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            import difflib

            visible = [name for name in COMMANDS if name != "mount-helper"]
            near = difflib.get_close_matches(args[0], visible, 1)
            hint = f" Did you mean '{near[0]}'?" if near else f" There are: {', '.join(visible)}."
            ctx.fail(f"No such command '{args[0]}'.{hint}")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name]).command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="gpufs")
def program() -> None:
    """GPU memory as files.

    `gpufs mount DIR` shows every GPU as a directory below DIR. A file there is memory of that GPU. Without a GPU it
    uses host memory.

    \b
      sudo install -d -o "$USER" /mnt/gpufs
      gpufs mount /mnt/gpufs
      gpufs cp model.safetensors /mnt/gpufs/gpu0/
      gpufs umount /mnt/gpufs

    Exit codes: 0 success, 1 failure (one line on standard error gives the reason), 2 a wrong command line or
    configuration.
    """


def rewrite_for_mount(arguments: list[str]) -> list[str]:
    """The arguments. A call by mount(8), `gpufs SRC MNT -o OPTIONS` (type fuse.gpufs), becomes one of mount-helper."""
    if len(arguments) >= 3 and "-o" in arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        return ["mount-helper", *arguments]
    return arguments


# Not click.Path, which calls stat(2): that never returns for a mount that hangs.
def complete_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of file names."""
    return [CompletionItem(incomplete, type="file")]


def complete_directories(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of directory names."""
    return [CompletionItem(incomplete, type="dir")]


def check_seconds(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuses nan as an option's seconds."""
    if value is not None and math.isnan(value):  # which is in every range
        raise click.BadParameter("nan is not a number of seconds.", ctx, parameter)
    return value
