"""The command group."""

from __future__ import annotations

import importlib
from typing import Final

import click
from click.shell_completion import CompletionItem

from gpufs import __version__

# Each command, and what it does; the module of that name in gpufs/cli defines it as `command`. Those without a text are
# not for people.
COMMANDS: Final = {
    "mount": "Mount the memory of the GPUs.",
    "cp": "Copy files into, out of and between devices.",
    "sync": "Make a directory the copy of another.",
    "save": "Save the files of a mount, to outlive it.",
    "restore": "Restore a save.",
    "run": "Run a program that uses safetensors files of a mount in place.",
    "umount": "Unmount, and wait for the end of the mount.",
    "restart": "Serve a mount by a new daemon of the installed version.",
    "status": "Show the mounts of this machine.",
    "df": "Show the memory of each device, and limits.",
    "ls": "List files with the memory they hold.",
    "top": "Show what happens now.",
    "inspect": "Show the tensors of files.",
    "diff": "Compare two files or checkpoints, tensor by tensor.",
    "replace": "Give a file's name to a new version of it.",
    "sleep": "Move files of idle programs to the host's memory.",
    "wake": "Bring sleeping files back to their device.",
    "pin": "Keep files on a device that parks idle ones.",
    "unpin": "Let files be parked again.",
    "leases": "Show the programs that use files in place.",
    "quota": "Limit the memory of users and directories.",
    "stats": "Show what the mounts have moved.",
    "metrics": "Print metrics for Prometheus.",
    "csi": "Serve volumes of Kubernetes.",
    "trace": "Record what a mount does, for Perfetto.",
    "doctor": "Say what this machine lacks.",
    "mount-helper": "",
    "serve-copy": "",
}
VISIBLE: Final = {name: text for name, text in COMMANDS.items() if text}


class _Commands(click.Group):
    """Loads a command's module when the command is used. The list of all commands needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from gpufs.config import suggestion

            hint = suggestion(args[0], VISIBLE) or f". There are: {', '.join(VISIBLE)}."
            ctx.fail(f"No such command '{args[0]}'{hint}")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gpufs.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VISIBLE.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [CompletionItem(name, help=text) for name, text in VISIBLE.items() if name.startswith(incomplete)]
        return commands + click.Command.shell_complete(self, ctx, incomplete)


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
    configuration, 130 interrupted.
    """


def rewrite_for_mount(arguments: list[str]) -> list[str]:
    """Make a call by mount(8), `gpufs SRC MNT -o OPTIONS` (type fuse.gpufs), one of mount-helper."""
    if len(arguments) >= 3 and "-o" in arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        return ["mount-helper", *arguments]
    return arguments


# Not click.Path, which calls stat(2): that never returns for a mount that hangs.
def complete_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete file names for a shell."""
    return [CompletionItem(incomplete, type="file")]


def complete_directories(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete directory names for a shell."""
    return [CompletionItem(incomplete, type="dir")]
