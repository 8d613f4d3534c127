"""gpufs leases: the programs that have memory of a mount attached, or show theirs as files."""

import click

from gpufs import config
from gpufs.cli import _answers, _mounts, _queries
from gpufs.cli._main import complete_files
from gpufs.cli._options import complete_mounts, timeout_option
from gpufs.cli._output import Failure, json_text, table
from gpufs.client import _daemons


@click.command(name="leases")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with an object for each lease.")
@click.option(
    "--revoke",
    metavar="PATH",
    multiple=True,
    shell_complete=complete_files,
    help="End all leases on this file. May be repeated.",
)
@timeout_option(config.STATUS_TIMEOUT)
def command(mountpoints: tuple[str, ...], as_json: bool, revoke: tuple[str, ...], timeout: float) -> None:
    """Show the programs that have files attached, or have registered memory of theirs as files.

    Of all mounts, or of the given MOUNTPOINTs. Users other than root and the one who mounted see their own programs.
    A file that was renamed has its new path. "(removed)" is a file that no name leads to any more, "(replaced)" one
    whose name is another file's now: its memory is released when the program ends.

    With --revoke, the file's owner or root ends the leases on a file: it can be truncated and replaced then. The
    programs keep their mappings, which may show what the file was before.
    """
    if revoke:
        if mountpoints:
            raise Failure("--revoke: takes no MOUNTPOINT", 2)
        for path in revoke:
            try:
                _daemons.revoke(path)
            except OSError as error:
                raise Failure(f"{path}: {error.strerror}") from None
        return
    entries = _mounts.chosen(mountpoints)
    answers = _queries.leases_of(entries, timeout)
    rows = [lease for leases in answers if not isinstance(leases, OSError) for lease in leases]
    silent = _mounts.silent(entries, answers, named=bool(mountpoints))
    if as_json:
        print(json_text(rows))
    elif rows:
        headers = ("PATH", "PID", "USER", "PROGRAM", "MODE", "SIZE", "AGE")
        table(headers, [_queries.lease_row(lease) for lease in rows], right=frozenset({1, 5, 6}))
    elif not silent:
        print("nothing is attached" if entries else "no gpufs is mounted")
    _answers.finish(silent, len(entries), named=bool(mountpoints))
