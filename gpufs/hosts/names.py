"""Names like HOST:PATH, by the rules of scp(1) and rsync(1)."""

from __future__ import annotations

import errno
import re
from typing import Final, NamedTuple

# The first colon comes before any slash. An IPv6 address is in brackets.
_NAME: Final = re.compile(r"((?:[^@:/]+@)?(?:\[[^]/]*\]|[^:/\[]*)):(.*)", re.DOTALL)
# What shells treat specially is not part of a name, as ssh(1) has it: commands in its configuration get both. No part
# begins with a dash, so none is an option.
_USER: Final = r"(?!-)[^\s\x00-\x1f\x7f'`\";&<>|(){}$\[\]@:/]+(?<!\\)"
_PLAIN: Final = r"(?!-)[^\s\x00-\x1f\x7f'`\";&<>|(){}$\\\[\]@]+"
_HOST: Final = re.compile(rf"((?:{_USER}@)?)(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|({_PLAIN}))")


class HostName(NamedTuple):
    """A file of another machine. ``path`` is relative to the remote user's home unless it begins with a slash."""

    host: str
    path: str

    def __str__(self) -> str:
        return f"{self.host}:{self.path}"


def is_host_name(name: str) -> bool:
    """Return whether a name means a file of another machine. A local file of such a name is written ./NAME."""
    return _NAME.fullmatch(name) is not None


def parse(name: str) -> HostName:
    """Return the parts of a name. OSError EINVAL if ssh could not reach such a host."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise OSError(errno.EINVAL, "is not HOST:PATH", name)
    host, path = match.groups()
    if not _HOST.fullmatch(host):
        text = "has no host before the colon" if not host else f"{host!r} is not a host"
        raise OSError(errno.EINVAL, f"{text} (a file of this name is ./NAME)", name)
    if "\0" in path:
        raise OSError(errno.EINVAL, "has a null character", name)
    return HostName(host, path)


def ssh_argument(host: str) -> str:
    """Return a host as ssh(1) takes it: an IPv6 address has no brackets there. OSError EINVAL if it is not a host."""
    match = _HOST.fullmatch(host)
    if match is None:
        raise OSError(errno.EINVAL, "is not a host", host)
    user, address, name = match.groups()
    return user + (address or name)
