"""Prints a manual page, made from the texts of `gpufs --help` and the table of knobs.

Usage: generate_manual.py gpufs|mount.gpufs     for gpufs(1) and mount.gpufs(8)
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Final

import click

from gpufs import __version__, config
from gpufs.cli._main import COMMANDS, program
from gpufs.config import kinds

# click's mark of a paragraph whose lines stay.
_VERBATIM: Final = "\b"
_FSTAB: Final = "gpufs  /mnt/gpufs  gpufs  driver=cuda,memory=4G,allow_other,nofail  0  0"

_EXAMPLES: Final = (
    ("Mount the memory of every GPU, put a file into it, and look at it:",
     "gpufs mount /mnt/gpufs", "cp model.safetensors /mnt/gpufs/gpu0/", "gpufs df /mnt/gpufs"),
    ("Without a GPU, two simulated devices of 1 GiB:",
     "gpufs mount /mnt/gpufs --driver host --devices 2 --memory 1G"),
    ("For all users, as a service:",
     "systemctl enable --now gpufs@mnt-gpufs.service"),
    ("Whether a mount works, for scripts and health checks:",
     "gpufs status --check /mnt/gpufs"),
    ("Unmount, and end the copies that run:",
     "gpufs umount --force /mnt/gpufs"),
)  # fmt: skip
_EXIT_STATUS: Final = (
    ("0", "Success."),
    ("1", "Failure. One line on standard error gives the reason."),
    ("2", "A wrong command line or configuration."),
    ("130", "Interrupted."),
)
_ENVIRONMENT: Final = (
    (config.CONFIG_VARIABLE, "Configuration file, instead of those below FILES."),
    ("XDG_RUNTIME_DIR", "Where a plain user's mounts have their sockets and counters, in the directory gpufs."),
    ("JOURNAL_STREAM", "Set by systemd: the daemon then logs to the journal unless log_file names a file."),
)
_FILES: Final = (
    (
        "/etc/gpufs.toml, ~/.config/gpufs/config.toml",
        'Every knob as a key: memory = "4G". Options and variables override it.',
    ),
    ("/run/gpufs", "Sockets and counters of root's mounts."),
)

_HELPER_TEXT: Final = """
    mount.gpufs is what mount(8) runs for the type gpufs. It starts the daemon that serves the mount, and returns when
    the mount answers. The SOURCE is a name that df(1) and findmnt(8) show; it has no effect.

    OPTIONS are separated by commas: the knobs below by name, and those of mount(8) that gpufs knows. Name the driver:
    without it a machine whose GPU driver does not load gets a mount of host memory.
    """
_HELPER_OPTIONS: Final = (
    ("config=FILE", "Configuration file, instead of /etc/gpufs.toml."),
    ("ro, rw, noexec, exec, sync, dirsync, nosymfollow", "As for other file systems."),
    ("noatime, nodiratime, relatime, strictatime", "Which reads set access times."),
    ("remount", "As root, changes the options of the two lines above. Knobs cannot be changed."),
    ("user, users, owner, group", "Users may mount, by fusermount3(1)."),
    ("auto, noauto, nofail, _netdev, x-*, comment=", "For mount(8) and systemd(1)."),
)
_HELPER_EXAMPLES: Final = (
    ("By hand:", "mount -t gpufs gpufs /mnt/gpufs -o driver=cuda,memory=4G,allow_other",
     "mount -o remount,ro /mnt/gpufs", "umount /mnt/gpufs"),
    ("At boot, a line of /etc/fstab:", _FSTAB),
    ("At the first access:", _FSTAB.replace("nofail", "noauto,x-systemd.automount")),
)  # fmt: skip
_HELPER_EXIT_STATUS: Final = (
    ("0", "Success."),
    ("1", "Wrong options."),
    ("32", "The mount failed. One line on standard error gives the reason."),
)


def _escape(text: str) -> str:
    """Plain text as roff: no line of it is taken for a request."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for index, paragraph in enumerate(texts):
        if index:
            yield ".PP"
        first, *lines = paragraph.splitlines()
        if first.strip() == _VERBATIM:
            yield from _lines(lines)
        else:
            yield _escape(paragraph)


def _lines(lines: Iterable[str]) -> Iterator[str]:
    """Lines that stay as they are, with their blanks: commands, columns of fstab."""
    yield ".nf"
    for line in lines:
        yield "    " + line.strip().replace("\\", "\\e").replace("-", "\\-")
    yield ".fi"


def _list(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, text in entries:
        yield ".TP"
        yield f"\\fB{_escape(name)}\\fR"
        yield _escape(text)


def _examples(entries: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield ".SH EXAMPLES"
    for text, *commands in entries:
        yield ".PP"
        yield _escape(text)
        yield ".PP"
        yield from _lines(commands)


def _options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record:
            yield from _list([record])


def _knobs() -> Iterator[tuple[str, str]]:
    """The options of a mount that are knobs."""
    for knob in config.KNOBS:
        if not knob.hidden and knob.name != "foreground":
            value = "" if knob.kind is kinds.BOOLEAN else f"={knob.kind.metavar}"
            yield f"{knob.name}{value}", f"{knob.text} [default: {knob.describe_default()}]"


def _variables() -> Iterator[tuple[str, str]]:
    yield "GPUFS_NAME", "Sets the knob NAME, as the option --name does: GPUFS_MEMORY=4G, GPUFS_DRIVER=cuda."
    yield from _ENVIRONMENT


def gpufs_manual() -> Iterator[str]:
    """The lines of gpufs(1), in the man macros of roff."""
    root = click.Context(program, info_name="gpufs")
    yield f'.TH GPUFS 1 "" "gpufs {__version__}" "User Commands"'
    yield from (".SH NAME", "gpufs \\- GPU memory as files", ".SH SYNOPSIS", ".B gpufs")
    yield "\\fICOMMAND\\fR [\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]..."
    yield ".SH DESCRIPTION"
    yield from _paragraphs((program.help or "").strip().split("\n\n"))
    yield ".SH COMMANDS"
    for name in COMMANDS:
        command = program.get_command(root, name)
        assert command is not None
        if command.hidden:
            continue
        ctx = click.Context(command, info_name=name, parent=root)
        yield f".SS gpufs {_escape(name)} {_escape(' '.join(command.collect_usage_pieces(ctx)))}"
        yield from _paragraphs((command.help or "").strip().split("\n\n"))
        yield from _options(command, ctx)
    yield ".SH EXIT STATUS"
    yield from _list(_EXIT_STATUS)
    yield ".SH ENVIRONMENT"
    yield from _list(_variables())
    yield ".SH FILES"
    yield from _list(_FILES)
    yield from _examples(_EXAMPLES)
    yield from (".SH SEE ALSO", "mount.gpufs(8), mount(8), fusermount3(1), fuse(4)")


def helper_manual() -> Iterator[str]:
    """The lines of mount.gpufs(8)."""
    yield f'.TH MOUNT.GPUFS 8 "" "gpufs {__version__}" "System Administration"'
    yield from (".SH NAME", "mount.gpufs \\- mount GPU memory as files", ".SH SYNOPSIS")
    yield ".B mount \\-t gpufs\n\\fISOURCE\\fR \\fIDIRECTORY\\fR [\\fB\\-o\\fR \\fIOPTIONS\\fR]"
    yield ".SH DESCRIPTION"
    yield from _paragraphs(_HELPER_TEXT.strip().split("\n\n"))
    yield ".SH OPTIONS"
    yield from _list(_HELPER_OPTIONS)
    yield ".SH KNOBS"
    yield _escape(
        "A knob that is true or false is set by its name, and unset by its name after no: allow_other, noauto_unmount."
    )
    yield from _list(_knobs())
    yield ".SH EXIT STATUS"
    yield from _list(_HELPER_EXIT_STATUS)
    yield ".SH ENVIRONMENT"
    yield from _list(_variables())
    yield ".SH FILES"
    yield from _list(_FILES)
    yield from _examples(_HELPER_EXAMPLES)
    yield from (".SH SEE ALSO", "gpufs(1), mount(8), fstab(5), systemd.mount(5), fusermount3(1)")


PAGES: Final = {"gpufs": gpufs_manual, "mount.gpufs": helper_manual}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        sys.exit(f"usage: generate_manual.py {'|'.join(PAGES)}")
    print("\n".join(PAGES[sys.argv[1]]()))
