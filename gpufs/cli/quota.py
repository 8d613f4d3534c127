"""gpufs quota: limits on the memory of users and directories."""

import click

from gpufs import config
from gpufs.cli import _answers, _mounts, _queries
from gpufs.cli._main import complete_directories
from gpufs.cli._options import complete_mounts, timeout_option
from gpufs.cli._output import Failure, json_text
from gpufs.client._daemons import set_quota
from gpufs.config import kinds
from gpufs.protocol import DEFAULT_LIMIT, MAX_OFFSET, NO_LIMIT


@click.group(name="quota")
def command() -> None:
    """Limit the memory of users and directories.

    A file that would exceed a limit gets "Disk quota exceeded" (EDQUOT). Limits last as long as the mount; the knobs
    user_memory and user_limits of the configuration file set those that each mount begins with.
    """


@command.command(name="set", short_help="Set the limit of a directory or a user.")
@click.argument("directory", metavar="DIR", shell_complete=complete_directories)
@click.argument("size", metavar="SIZE")
@click.option("-u", "--user", metavar="NAME|UID", help="Limit this user's files instead of a directory.")
def set_command(directory: str, size: str, user: str | None) -> None:
    """Let the files below DIR hold SIZE of memory, for example 8G.

    With --user: let the user's files hold SIZE. DIR is a device (MOUNT/gpu0) or the mountpoint, for each device; SIZE
    may be none. Only for root and the user who mounted.
    """
    if size == "none" and user is not None:
        limit = NO_LIMIT
    else:
        try:
            limit = kinds.parse_size(size)
        except ValueError:
            limit = MAX_OFFSET + 1
        if limit > MAX_OFFSET:
            raise Failure(f"SIZE: {size!r} is not allowed: a size such as 512M or 8G" + ", or none" * bool(user), 2)
    _change(directory, user, limit)


@command.command(name="remove", short_help="Remove the limit of a directory or a user.")
@click.argument("directory", metavar="DIR", shell_complete=complete_directories)
@click.option("-u", "--user", metavar="NAME|UID", help="Remove this user's limit instead of a directory's.")
def remove_command(directory: str, user: str | None) -> None:
    """Remove the limit of DIR. With --user that of a user: on DIR, a device, or on each device of DIR, a mountpoint.

    The limit of the knob user_memory then applies to the user again.
    """
    _change(directory, user, DEFAULT_LIMIT)


@command.command(name="list", short_help="Show what is held, and the limits.")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each user and directory.")
@timeout_option(config.STATUS_TIMEOUT)
def list_command(mountpoints: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Show what users and limited directories hold, and their limits.

    Of all mounts, or of the given MOUNTPOINTs. Users other than root and the one who mounted see their own.
    """
    entries = _mounts.chosen(mountpoints)
    statuses = _queries.statuses(entries, lambda status: _queries.quota_lines(_queries.quotas_of(status)), timeout)
    quotas = [quota for status in statuses for quota in _queries.quotas_of(status)]
    silent = _queries.silent_statuses(statuses, named=bool(mountpoints))
    if as_json:
        print(json_text(quotas))
    elif quotas:
        print("\n".join(_queries.quota_lines(quotas)))
    elif not silent:
        print("no limits, and no memory in use" if entries else "no gpufs is mounted")
    _answers.finish(silent, len(statuses), named=bool(mountpoints))


def _change(directory: str, user: str | None, limit: int) -> None:
    uid = None if user is None else _uid(user)
    try:
        set_quota(directory, uid, limit)
    except OSError as error:
        raise Failure(f"{directory}: {error.strerror}") from None


def _uid(user: str) -> int:
    try:
        return kinds.user_number(user)
    except ValueError:
        raise Failure(f"--user: there is no user {user!r}", 2) from None
