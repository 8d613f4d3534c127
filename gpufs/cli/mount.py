"""gpufs mount: starts a daemon and returns when its mount works."""

import signal
import sys
from typing import Any

import click

from gpufs import config, launching
from gpufs.cli import _mounts
from gpufs.cli._errors import Failure, complain
from gpufs.cli._knobs import KnobCommand, knob_options, settings, show_all_options
from gpufs.cli._main import complete_directories
from gpufs.cli._options import origin, parse
from gpufs.daemon.startup import MountRequest


@click.command(name="mount", short_help="Mount the memory of the GPUs.", cls=KnobCommand)
@click.argument("mountpoint", shell_complete=complete_directories)
@knob_options
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="OPTIONS",
    help="Options of mount(8), separated by commas: ro, noexec, noatime, ..., and those above as name=value.",
)
@click.option(
    "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=show_all_options, help="Show all options."
)
def command(mountpoint: str, options: tuple[str, ...], **arguments: Any) -> None:
    """Mount the devices' memory at MOUNTPOINT.

    MOUNTPOINT is a directory. Below it each device is a directory, gpu0, gpu1, ...; a file there is memory of that
    device. A daemon serves the mount; this command returns when the mount works, or fails and leaves nothing behind.
    """
    given = parse(",".join(options))
    if given.remount:
        raise Failure("remount is for mount(8): mount -o remount,... MOUNTPOINT", 2)
    named = {name for name, value in arguments.items() if value not in (None, ())}
    for name, text in given.knobs.items():
        if name in named:
            raise Failure(f"{name} is given twice, by an option of its own and by -o", 2)
        arguments[name] = text
    chosen = settings(arguments, name_of=lambda knob: origin(knob) if knob.name in given.knobs else knob.option)
    mount(mountpoint, chosen, flags=given.flags)


def mount(
    path: str,
    chosen: config.Settings,
    source: str = "gpufs",
    flags: tuple[str, ...] = (),
    *,
    non_empty: bool | None = None,
) -> None:
    """Mounts at a path. Raises Failure or ConfigError, with one line each.

    ``non_empty``: whether the directory may have files; by default as ``chosen`` says.
    """
    mountpoint = _mounts.absolute(path)
    for line in config.unknown_variables():
        complain(line)
    config.check_host(chosen.values)
    request = MountRequest(mountpoint, source, dict(chosen.values), flags)
    try:
        allowed = chosen["allow_non_empty"] if non_empty is None else non_empty
        launching.check_mountpoint(path, mountpoint, non_empty=allowed)
        if request.foreground:
            sys.stdout.flush()
            launching.run_in_foreground(request)
        # As Ctrl-C does, it ends the daemon that is being started.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        process, answer = launching.launch(request, chosen["mount_timeout"])
    except BaseException as failure:
        for note in getattr(failure, "__notes__", ()):
            complain(note)
        if isinstance(failure, OSError):
            raise Failure(failure.strerror or str(failure)) from None
        raise
    process.returncode = 0  # the daemon lives on: Popen must not wait for it
    for note in answer["notes"]:
        complain(note)
