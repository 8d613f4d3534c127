"""Parses the options of mount(8) and fstab: knobs by name, flags of the mount, and options that gpufs ignores."""

import re
from dataclasses import dataclass, field
from typing import Final

from gpufs import config, mounting
from gpufs.cli._errors import Failure
from gpufs.config import kinds

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


@dataclass(frozen=True, slots=True)
class Options:
    """The options given: texts by knob (and config_file), names of mounting.FLAGS, and whether to change a mount."""

    knobs: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    remount: bool = False


def origin(knob: config.Knob) -> str:
    """How messages name the place of a knob's value."""
    return f"mount option {knob.name}="


def parse(text: str, *, sloppy: bool = False) -> Options:
    """Parses options separated by commas. If options contradict each other, the last one applies.

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
