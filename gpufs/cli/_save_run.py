"""One run of `gpufs save` or `gpufs restore`, also as options of `gpufs umount` and `gpufs mount`."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from gpufs import mounting, safe_path
from gpufs.cli import _mounts, _queries
from gpufs.cli._copy_report import CommandOptions, CopyReport
from gpufs.cli._files import raise_descriptor_limit
from gpufs.cli._output import Failure, complain
from gpufs.client import CopyResult
from gpufs.copying.entries import Entry, kind_of
from gpufs.copying.identity import TICK_NS
from gpufs.copying.loop import TreeCopy
from gpufs.copying.manifest import Header, Limit, Manifest, encoded, find_save
from gpufs.copying.restore import Restore
from gpufs.copying.save import Save
from gpufs.exceptions import text_of
from gpufs.syscalls import path_of


@dataclass(frozen=True, kw_only=True)
class SaveOptions(CommandOptions):
    """The options of `gpufs save` and `gpufs restore`."""

    overwrite: bool = False


class SaveReport(CopyReport):
    """Collects the reports of a save. The first failure ends a save: it is whole, or not there."""

    def _report(self, source: str, destination: str | None, number: int, text: str, *error: Any, **how: Any) -> None:
        if number == errno.ECANCELED and self.cancel.cancelled:
            return  # end() reports the interruption once
        super()._report(source, destination, number, text, *error, **how)
        if self._options.command == "save":
            self.cancel.cancel()

    def _copied(self, result: CopyResult) -> None:
        if result.method != "verify" or self._options.command == "restore":  # a save has counted the file already
            super()._copied(result)

    @property
    def is_good(self) -> bool:
        """Whether nothing has failed, and nobody has interrupted it."""
        return not self.failures and not self.cancel.cancelled


@contextmanager
def _explained(command: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        raise Failure(f"{where}{text_of(error)}", command=command) from None


def check_local(command: str, name: str) -> None:
    """Raise Failure unless a save's name is one of this machine."""
    if not name:
        raise Failure("an empty name is given where a directory belongs", 2, command=command)
    if kind_of([name]) != "file":
        text = "a save is a directory of this machine: rsync -aSH or tar -S copies it to others and to stores"
        raise Failure(f"{name}: {text}", 2, command=command)


# ---- save ----


def find_saved(path: str, timeout: float, opened: ExitStack) -> tuple[Header, list[tuple[Entry, str]]]:
    """Find what SOURCE names: a whole mount, or a directory on one, which stays open. Failure if it is neither.

    Returns the directories as Save() takes them.
    """
    mountpoint = _mounts.absolute(path)
    for entry in mounting.mounts():
        if entry.mountpoint == mountpoint and entry.root == "/":
            (status,) = _queries.statuses([entry], lambda status: [], timeout)
            if status["state"] != "ok":
                raise Failure(f"{mountpoint}: {status['error']}", command="save")
            names = [str(device["name"]) for device in status["devices"]]
            directories = [(Entry.of(os.path.join(mountpoint, name), follow=False), name) for name in names]
            return Header.of(mountpoint, _limits(status), mount=True), directories
    with _explained("save"):
        fd = safe_path.open_path(path, os.O_PATH)
        opened.callback(os.close, fd)
        found = os.fstat(fd)
        if found.st_dev not in mounting.by_device():
            raise OSError(errno.EXDEV, "is not on a gpufs mount: use rsync or tar", path)
        if not stat.S_ISDIR(found.st_mode):
            raise OSError(errno.ENOTDIR, "is not a directory: gpufs cp copies files", path)
        real = os.readlink(path_of(fd))
    return Header.of(real, [], mount=False), [(Entry(real, ".", fd, follow=False), "")]


def _limits(status: dict[str, Any]) -> list[Limit]:
    """Return the limits of directories and users of a mount that the caller sees."""
    limits = []
    for quota in status.get("quotas", []):
        limit, uid = quota["limit_bytes"], quota["uid"]
        if limit is not None and (uid is None or limit != status["knobs"].get("user_memory")):
            limits.append(Limit(path=encoded(quota["path"]), limit_bytes=limit, uid=uid))
    return limits


def save(path: str, destination: str, options: SaveOptions, timeout: float, *, last: bool = False) -> SaveReport:
    """Save a mount or a directory, and return the report, which has not ended. Raise Failure if no save can start.

    ``last``: the files are lost afterwards, so it fails if anything is left out, or is changed during the save.
    """
    check_local("save", destination)
    raise_descriptor_limit()
    report = SaveReport(options)
    began = time.time_ns()
    # The first signal only cancels, from before there is anything to remove until it is removed.
    with ExitStack() as opened, report.running(), _explained("save"):
        save = Save(*find_saved(path, timeout, opened), destination, options, report)
        opened.callback(save.close)
        _run(save, report, options)
        if report.is_good:
            save.seal()
        if report.is_good and options.verify:
            with closing(save.open()) as manifest:
                _run(Restore(manifest, "", report), report, options)
        if report.is_good and last and save.left_out:
            text = "is another user's, and you may not read it: nothing is unmounted"
            report.failed(save.left_out[0], None, OSError(errno.EACCES, text))
        if report.is_good and last and (changed := save.changed_since(began - TICK_NS)):
            report.failed(changed, None, OSError(errno.EBUSY, "was changed during the save: nothing is unmounted"))
        complete = report.is_good
        if complete:
            save.complete()
    if report.signal is not None and not complete:
        complain("interrupted: nothing is left of it", "save")
    elif save.left_out and report.is_good:
        more = f" and {len(save.left_out) - 1} more" if len(save.left_out) > 1 else ""
        report.noticed(f"not in the save: {save.left_out[0]}{more}, which you may not read")
    return report


def _run(copier: Save | Restore, report: SaveReport, options: SaveOptions) -> None:
    loop = TreeCopy(copier, report.cancel, report)
    loop.run(lambda: copier.find(loop), options.jobs)


# ---- restore ----


@contextmanager
def opened_save(path: str) -> Iterator[tuple[Manifest, str]]:
    """Open the save that a name means, and yield it with the part that is meant. Failure if it is none."""
    check_local("restore", path)
    with _explained("restore"):
        root, part = find_save(path)
        manifest = Manifest(root)
    try:
        yield manifest, part
    finally:
        manifest.close()


def restore(source: tuple[Manifest, str], destination: str | None, options: SaveOptions) -> SaveReport:
    """Restore a save, or with ``destination`` None only check it. Return the report, which has not ended."""
    manifest, part = source
    raise_descriptor_limit()
    report = SaveReport(options)
    with report.running(), _explained("restore"):
        restore = Restore(manifest, part, report, destination, overwrite=options.overwrite, verify=options.verify)
        with closing(restore):
            _run(restore, report, options)
            if not report.cancel.cancelled:
                restore.finish()
    if report.signal is not None:
        complain("interrupted: files that were complete stay", "restore")
    if restore.not_kept and destination is not None:
        why = "only root may set them, and limits the user who mounted"
        if not manifest.trusted:
            why = f"{manifest.path} belongs to another user, or others may write to it (chown -R and chmod change that)"
        report.noticed(f"{restore.not_kept} owners, attributes, device nodes or limits are not restored: {why}")
    return report
