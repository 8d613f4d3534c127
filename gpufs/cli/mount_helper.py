"""gpufs mount-helper: how mount(8) and /etc/fstab mount a gpufs.

mount(8) runs `mount.gpufs SRC MNT [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]` for the type gpufs, which is installed
as a script that calls this, and `gpufs SRC MNT -o OPTIONS` for the type fuse.gpufs (by way of mount.fuse3).
"""

import functools
import json
import os
from typing import Any, Final

import click

from gpufs import config, mounting
from gpufs.cli import _answers, _mounts
from gpufs.cli._options import settings
from gpufs.cli._output import Failure
from gpufs.cli.mount import Options, mount, origin, parse
from gpufs.client._daemons import control_file

# Exit codes of mount(8), which returns ours.
_WRONG_USE: Final = 1
_FAILED: Final = 32
_ANSWER_SECONDS: Final = 5.0  # seconds for the answer of the mount to change


@click.command(name="mount-helper", hidden=True)
@click.argument("source")
@click.argument("mountpoint")
@click.option("-o", "options", multiple=True, metavar="OPTIONS", help="Mount options, separated by commas.")
@click.option("-t", "kind", metavar="TYPE", help="Ignored.")
@click.option("-N", "namespace", metavar="NAMESPACE", help="Ignored: mount(8) has entered it.")
@click.option("-s", "sloppy", is_flag=True, help="Tolerate unknown options.")
@click.option("-f", "fake", is_flag=True, help="Check the options, mount nothing.")
@click.option("-n", "no_mtab", is_flag=True, help="Ignored.")
@click.option("-v", "verbose", is_flag=True, help="Ignored.")
def command(source: str, mountpoint: str, options: tuple[str, ...], sloppy: bool, fake: bool, **_: Any) -> None:
    """Mount at MOUNTPOINT, called by mount(8).

    The OPTIONS are the knobs by name (memory=4G,driver=host,allow_other), config=FILE, and mount's own. Exit codes are
    those of mount(8): 1 wrong options, 32 failure.
    """
    try:
        if mountpoint.startswith("/dev/fd/"):  # passed by mount.fuse3 for drop_privileges
            parse("drop_privileges")
        given = parse(",".join(options), sloppy=sloppy)
        chosen = settings(given.knobs, mountpoint, origin_of=origin)
        if fake:
            return
        if given.remount:
            _remount(mountpoint, given, chosen)
        else:
            mount(mountpoint, chosen, source, given.flags, non_empty=True)  # as mount(8) does for all types
    except config.ConfigError as error:
        raise Failure(str(error), _WRONG_USE) from None
    except Failure as error:
        raise Failure(str(error), _WRONG_USE if error.code == 2 else _FAILED) from None


def _remount(path: str, given: Options, chosen: config.Settings) -> None:
    """Change the flags of a mount. Knobs cannot change: they may only be given with their present values."""
    entry = _mounts.find(path)
    if os.geteuid() != 0:
        raise Failure(f"{path}: only root may remount; unmount it and mount it again")
    (running,) = _answers.ask([functools.partial(control_file, entry, "status")], dict, _ANSWER_SECONDS)
    if isinstance(running, OSError):
        raise Failure(f"{path}: cannot be remounted: {running.strerror}")
    for name in given.knobs.keys() & config.BY_NAME.keys():
        wanted = json.loads(json.dumps(chosen[name]))
        if wanted != running["knobs"].get(name):
            raise Failure(f"mount option {name} cannot be changed by a remount: unmount {path} and mount it again", 2)
    try:
        mounting.remount(entry, given.flags)
    except OSError as error:
        hint = " (files are open for writing)" if "ro" in given.flags else ""
        raise Failure(f"{error.strerror}{hint}") from None
