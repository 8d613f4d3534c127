"""gpufs mount: starts a daemon and returns when its mount works. Its options -o are those of mount(8) and fstab."""

import re
import signal
import sys
from dataclasses import dataclass, field
from typing import Any, Final

import click

from gpufs import config, launching, mounting
from gpufs.cli import _mounts
from gpufs.cli._main import complete_directories
from gpufs.cli._options import KnobCommand, knob_options, settings, show_all_options
from gpufs.cli._output import Failure, complain
from gpufs.config import kinds
from gpufs.daemon.startup import MountRequest

# The rest of a list of devices that was written with commas.
_DEVICE: Final = re.compile(r"\d+|(GPU|MIG)-[\w-]+", re.ASCII)
# name: the flag that it turns off
_OPPOSITES: Final = {
    "rw": "ro",
    "exec": "noexec",
    "async": "sync",
    "atime": "noatime",
    "diratime": "nodiratime",
    "norelatime": "relatime",
    "nostrictatime": "strictatime",
    "nolazytime": "lazytime",
    "loud": "silent",
    "symfollow": "nosymfollow",
}
# As in mount(8), these imply noexec unless a later option overrides it.
_NOEXEC: Final = frozenset({"user", "users", "owner", "group"})
# Options for mount(8), boot scripts and systemd; options that always apply (nodev, nosuid); options that fusermount3
# and mount(8) read from /proc/mounts when they mount again.
_IGNORED: Final = frozenset(
    (
        "auto noauto nofail _netdev nouser nousers noowner nogroup dev nodev suid nosuid mand nomand iversion "
        "noiversion helper uhelper default_permissions nonempty fd rootmode user_id group_id max_read blksize fsname "
        "subtype"
    ).split()
)
_REFUSED: Final = {
    "bind": "mount --bind does that, on any file system",
    "rbind": "mount --rbind does that, on any file system",
    "move": "mount --move does that, on any file system",
    "drop_privileges": "the daemon opens the devices itself: mount as the user instead",
    "uid": "a file belongs to the user who creates it: use chown",
    "gid": "a file belongs to the group of its creator: use chgrp, or a set-group-id directory",
    "umask": "each program chooses the mode of its files: use chmod",
    "mode": "each program chooses the mode of its files: use chmod",
    "allow_root": "allow_other also admits root",
}


@click.command(name="mount", cls=KnobCommand)
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
    "--restore",
    "saved",
    metavar="SAVE",
    shell_complete=complete_directories,
    help="Restore SAVE, as gpufs restore does; if that fails, nothing is mounted.",
)
@click.option(
    "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=show_all_options, help="Show all options."
)
def command(mountpoint: str, options: tuple[str, ...], saved: str | None, **arguments: Any) -> int:
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
    chosen = settings(
        arguments, mountpoint, origin_of=lambda knob: origin(knob) if knob.name in given.knobs else knob.option
    )
    if saved is None:
        mount(mountpoint, chosen, flags=given.flags)
        return 0
    if chosen["foreground"] or "ro" in given.flags:
        raise Failure("--restore needs a mount in the background that is not read-only: restore after it", 2)
    return _mount_and_restore(mountpoint, chosen, given.flags, saved)


def _mount_and_restore(mountpoint: str, chosen: config.Settings, flags: tuple[str, ...], saved: str) -> int:
    """Mount, and restore a save. Return the exit code; nothing is mounted unless it is 0."""
    from gpufs.cli import _save_run, umount  # which other mounts do without

    with _save_run.opened_save(saved) as save:
        mount(mountpoint, chosen, flags=flags)
        good = False
        try:
            report = _save_run.restore(save, mountpoint, _save_run.SaveOptions(command="restore", verify=True))
            good = report.is_good
        finally:
            if not good:
                umount.umount(mountpoint, force=True, lazy=False, timeout=config.UMOUNT_TIMEOUT.default)
                complain(f"{mountpoint}: nothing is mounted, since the save could not be restored")
    return report.end()


def mount(
    path: str,
    chosen: config.Settings,
    source: str = "gpufs",
    flags: tuple[str, ...] = (),
    *,
    non_empty: bool | None = None,
) -> None:
    """Mount at a path. Raise Failure or ConfigError, with one line each.

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
        # These signals end the daemon that is being started, as Ctrl-C does.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda arrived, _: sys.exit(128 + arrived))
        process, answer = launching.launch(request, chosen["mount_timeout"], service=True)
    except BaseException as failure:
        for note in getattr(failure, "__notes__", ()):
            complain(note)
        if isinstance(failure, OSError):
            raise Failure(failure.strerror or str(failure)) from None
        raise
    process.returncode = 0  # the daemon lives on: Popen must not wait for it
    for note in answer["notes"]:
        complain(note)


# ---- options of mount(8) ----


@dataclass(frozen=True, slots=True)
class Options:
    """The options given: texts by knob (and config_file), names of mounting.FLAGS, and whether to change a mount."""

    knobs: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    remount: bool = False


def origin(knob: config.Knob) -> str:
    """Return how messages name the place of a knob's value."""
    return f"mount option {knob.name}="


def parse(text: str, *, sloppy: bool = False) -> Options:
    """Parse options separated by commas. If options contradict each other, the last one applies.

    Raises Failure with exit code 2 for an unknown or wrong option.
    """
    knobs: dict[str, str] = {}
    flags: dict[str, None] = {}
    remount = False
    for option in filter(None, text.split(",")):
        name, equals, value = option.partition("=")
        if name == "config" and value:
            knobs["config_file"] = value
        elif name in config.BY_NAME:
            knob = config.BY_NAME[name]
            if not equals and knob.kind is not kinds.BOOLEAN:
                raise Failure(f"mount option {name} needs a value: {knob.kind.allowed}", 2)
            value = value if equals else "true"
            knobs[name] = f"{knobs[name]},{value}" if name == "backing" and name in knobs else value
        elif name.startswith("no") and name[2:] in config.BY_NAME and not equals:
            if config.BY_NAME[name[2:]].kind is not kinds.BOOLEAN:
                raise Failure(f"unknown mount option {name}", 2)
            knobs[name[2:]] = "false"
        elif name in mounting.FLAGS:
            flags[name] = None
        elif name in _OPPOSITES:
            flags.pop(_OPPOSITES[name], None)
        elif name in _NOEXEC:
            flags["noexec"] = None
        elif name == "defaults":
            flags.clear()
        elif name == "remount":
            remount = True
        elif name in _REFUSED:
            raise Failure(f"mount option {name} is not supported: {_REFUSED[name]}", 2)
        elif "devices" in knobs and _DEVICE.fullmatch(name):
            raise Failure(f"mount option {name} after devices={knobs['devices']}: write devices=0:2, with colons", 2)
        elif name not in _IGNORED and not name.startswith(("x-", "X-", "comment")) and not sloppy:
            raise Failure(f"unknown mount option {name}", 2)
    return Options(knobs, tuple(flags), remount)
