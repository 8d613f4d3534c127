"""gpufs mount-helper: how mount(8) and /etc/fstab mount a gpufs.

mount(8) runs `mount.gpufs SRC MNT [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]` for the type gpufs, which is installed
as a script that calls this, and `gpufs SRC MNT -o OPTIONS` for the type fuse.gpufs (by way of mount.fuse3).
"""

from typing import Any, Final

import click

from gpufs import config
from gpufs.cli._errors import Failure
from gpufs.cli._main import settings
from gpufs.cli.mount import mount

# What mount(8) and fstab may say and what says nothing to a file system in memory.
_IGNORED: Final = frozenset(
    (
        "rw defaults auto noauto nofail _netdev user nouser users nousers owner noowner group nogroup dev nodev suid "
        "nosuid exec noexec sync async dirsync atime noatime diratime nodiratime relatime norelatime strictatime "
        "nostrictatime lazytime nolazytime mand nomand silent loud iversion noiversion default_permissions nonempty "
        "auto_unmount"
    ).split()
)
_REFUSED: Final = frozenset({"ro", "remount", "bind", "move", "drop_privileges"})


@click.command(name="mount-helper", hidden=True)
@click.argument("source")
@click.argument("mountpoint")
@click.option("-o", "options", multiple=True, metavar="OPTIONS", help="Mount options, separated by commas.")
@click.option("-t", "kind", metavar="TYPE", help="Ignored.")
@click.option("-N", "namespace", metavar="NAMESPACE", help="Ignored: mount(8) has changed to it.")
@click.option("-s", "sloppy", is_flag=True, help="Tolerate unknown options.")
@click.option("-f", "fake", is_flag=True, help="Check the options, mount nothing.")
@click.option("-n", "no_mtab", is_flag=True, help="Ignored.")
@click.option("-v", "verbose", is_flag=True, help="Ignored.")
def command(source: str, mountpoint: str, options: tuple[str, ...], sloppy: bool, fake: bool, **_: Any) -> None:
    """Mount at MOUNTPOINT as mount(8) asks for it.

    The OPTIONS are the knobs by name (memory=4G,driver=host,allow_other), config=FILE, and mount's own.
    """
    if mountpoint.startswith("/dev/fd/"):  # what mount.fuse3 makes of it
        raise Failure("mount option drop_privileges is not supported", 2)
    chosen = settings(parse(",".join(options), sloppy=sloppy))
    if not fake:
        mount(mountpoint, chosen, source)


def parse(options: str, *, sloppy: bool = False) -> dict[str, str]:
    """The texts by knob (and config_file) from mount options. Failure, exit code 2, for what is not understood."""
    given = {}
    for option in filter(None, options.split(",")):
        name, equals, value = option.partition("=")
        if name == "config" and value:
            given["config_file"] = value
        elif name in config.BY_NAME:
            knob = config.BY_NAME[name]
            if not equals and knob.kind is not config.BOOLEAN:
                raise Failure(f"mount option {name} needs a value: {knob.kind.allowed}", 2)
            given[name] = value if equals else "true"
        elif name in _REFUSED:
            raise Failure(f"mount option {name} is not supported", 2)
        elif name not in _IGNORED and not name.startswith(("x-", "comment")) and not sloppy:
            raise Failure(f"unknown mount option {name}", 2)
    return given
