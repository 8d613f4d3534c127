"""Following a file: attached memory becomes that of the newest version, at the same addresses of this program."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from gpufs._naming import named_in
from gpufs.client._array import DeviceArray
from gpufs.client._attach import Attachment, following, take_versions
from gpufs.exceptions import as_failure_of_mount, failure_of_mount
from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile
from gpufs.formats.checkpoint import INDEX_NAME, find_files
from gpufs.formats.versions import FileLayout
from gpufs.modes import COPY_ON_WRITE
from gpufs.syscalls import Closing, closed_after, path_of

_TRIES: Final = 10  # to find a directory that nobody exchanges meanwhile


class _MovedError(Exception):
    """The directory has been exchanged since it was opened."""


@named_in("gpufs")
class Follower(Closing):
    """Keeps attached memory at the newest version of its file. `gpufs.follow` and `gpufs.torch.follow` make one.

    The memory stays attached as long as this object, or anything made of the memory, exists.

    Attributes
    ----------
    path : str
        The name that is followed, absolute: of a file, or of the directory of several files. A symbolic link in it
        counts as it leads now.
    version : int
        How often the memory has become a newer version's: 0 in the beginning.
    metadata : dict of str to str
        What the version in use says about itself: the metadata of the (first) safetensors file, such as a training
        step.
    is_whole : bool
        Whether all is of that version. False only after an ``update()`` that failed in the middle, which a later one
        completes.
    """

    def __init__(
        self,
        *attachments: Attachment,
        check: Callable[[], None] | None = None,
        changed: Callable[[], None] | None = None,
        closed: Callable[[], None] | None = None,
    ) -> None:
        """Several attachments are of files of one directory, and change together.

        ``check`` is called before each change of the version, and refuses it by a ValueError. ``changed`` is called
        after it, and again by later updates until it raises nothing; ``closed`` once, at the end.
        """
        files = sorted(attachments, key=lambda each: each.path)
        for each in files:
            if each.mode == COPY_ON_WRITE:
                raise ValueError(f'{each.path}: mode "c" keeps changes of this program, which a new version would drop')
            if each.is_asleep:
                raise ValueError(f"{each.path} sleeps: gpufs.wake() it, and follow it then")
        self.path = files[0].path if len(files) == 1 else os.path.dirname(files[0].path)
        self.version = 0
        self._files = files
        self._is_open = True
        self._check = check
        self._changed = changed
        self._closed = closed
        self._current = [each.identity for each in files]  # of the version that all is of that this object keeps
        for each in files:
            _note_layout(each)
        self.metadata: dict[str, str] = files[0].layout.metadata
        if len(files) > 1:
            with _opened(self.path) as directory:
                self._check_names(directory)
                state = _state(path_of(directory))
                with suppress(FileNotFoundError):
                    if all(each.identity == _identity(_below(directory, each)) for each in files):
                        for each in files:
                            each.directory = state
        for each in files:
            each.followers.add(self)

    def update(self) -> bool:
        """Take over the newest version, if there is one.

        Call it where no thread of this program uses the memory. It takes one stat(2) if nothing is to be done.
        Otherwise it leases the new version, checks its layout, waits for all work that this program has queued on the
        device, maps the new memory in place of the old, and ends the lease on that. All that was made of the memory,
        also captured graphs, then shows the new version.

        Returns
        -------
        bool
            Whether the memory is another version's now. False also while it sleeps: `gpufs.wake` takes over the newest
            version. False if the name is gone.

        Raises
        ------
        ValueError
            The new version has another layout, or this object is closed; or tensors that follow have become copies with
            other contents (see `gpufs.torch.follow`).
        DeviceFull, QuotaExceeded
            The memory is a private copy, and there is none for a second one.
        OSError
            EACCES, EBUSY, EXDEV, EFBIG: the new version cannot be used as the old one was; the text says why. The
            memory is the old version's in all these cases, and the next call tries again.
        Exception
            Whatever copying tensors raises that follow as copies, such as `torch.OutOfMemoryError`: then the memory is
            the new version's and some copies are the old one's. Use none of it before another call has completed that.
        """
        if not self._is_open:
            raise ValueError(f"what followed {self.path} is closed")
        if any(each.is_asleep for each in self._files):
            return False
        for each in self._files:
            with suppress(OSError):  # the newest version may be possible all the same
                each.restore()
        completed = self._complete()
        if not self._is_newer():
            for each in self._files:
                each.restore()
            return completed
        failures = self._take()
        if failures is not None and self in failures:
            raise failures[self]
        return completed or failures is not None

    @property
    def is_whole(self) -> bool:
        """Whether all is of one version."""
        same = [each.identity for each in self._files] == self._current
        return not self._is_open or (same and not any(each.is_lost for each in self._files))

    def _is_newer(self) -> bool:
        """Return whether the name leads to something else than what is in use."""
        files, _ = self._together()
        one = files[0]
        try:
            if len(files) == 1:
                return _identity(one.path) != one.identity
            return _state(os.path.dirname(one.path)) != one.directory
        except FileNotFoundError:
            return False
        except OSError as error:
            raise failure_of_mount(error, self.path) from None

    def _together(self) -> tuple[list[Attachment], list[Follower]]:
        """Return all files that change at once with those of this object, and all that follow one of them."""
        files: dict[Attachment, None] = {}
        followers: dict[Follower, None] = {}
        left = list(self._files)
        while left:
            file = left.pop()
            if file not in files:
                files[file] = None
                for follower in list(file.followers):
                    followers[follower] = None
                    left += follower._files
        return sorted(files, key=lambda each: each.path), list(followers)

    def _take(self) -> dict[Follower, Exception] | None:
        """Take over the newest version for all that follow the memory. None if there is none.

        Returns what has failed then, which the next update() of each tries again.
        """

        def check(attachment: Attachment, fd: int) -> FileLayout:
            layout = FileLayout.of_file(fd, attachment.path, f"the new version of {attachment.path}")
            attachment.layout.check(layout, attachment.path)
            return layout

        with following:
            files, followers = self._together()
            for follower in followers:
                if follower._check is not None and follower.is_whole:
                    follower._check()
            with as_failure_of_mount(self.path):
                is_newer = False
                with suppress(FileNotFoundError):  # the name is gone
                    if len(files) == 1:
                        is_newer = take_versions([(files[0], files[0].path)], check)
                    else:
                        is_newer = self._take_directory(files, followers, check)
                if not is_newer:
                    return None
            failures = {}
            for follower in followers:
                try:
                    follower._complete()
                except Exception as error:  # noqa: BLE001 - its own update() raises it
                    failures[follower] = error
            return failures

    def _check_names(self, directory: int) -> None:
        """Raise ValueError unless the files are those of an index in this directory."""
        listed: set[str] = set()
        with suppress(FileNotFoundError):
            listed = {os.path.relpath(each, path_of(directory)) for each in find_files(path_of(directory)).files}
        if others := sorted(listed ^ {os.path.basename(each.path) for each in self._files}):
            paths = ", ".join(each.path for each in self._files[:3])
            raise ValueError(
                f"the tensors lie in {len(self._files)} attached files ({paths}), and {self.path}/{INDEX_NAME} lists "
                f"others ({others[0]}): such files cannot be replaced in one step. gpufs.torch.publish() writes one"
            )

    def _take_directory(
        self, files: Sequence[Attachment], followers: Sequence[Follower], check: Callable[[Attachment, int], object]
    ) -> bool:
        """Take over the files of the directory that has the name now."""
        path = os.path.dirname(files[0].path)
        whole = next(follower for follower in followers if len(follower._files) == len(files))
        for _ in range(_TRIES):
            with _opened(path) as directory:
                state = _state(path_of(directory))

                def check_still(state: tuple[int, ...] = state) -> None:
                    # Whoever has exchanged the directory may write the next version into the former one.
                    if _state(path) != state:
                        raise _MovedError

                try:
                    try:
                        whole._check_names(directory)
                        _check_all_there(directory, files)
                        _check_not_alone(directory, state, files)
                        named = [(each, _below(directory, each)) for each in files]
                        is_newer = take_versions(named, check, check_still)
                    except (ValueError, FileNotFoundError):
                        check_still()
                        raise
                except _MovedError:
                    continue
                for each in files:
                    each.directory = state
                return is_newer
        raise OSError(errno.EBUSY, "is being replaced again and again", path)

    def _complete(self) -> bool:
        """Have what this object keeps become that of the version in the memory. False: it is that."""
        if self._current == [each.identity for each in self._files]:
            return False
        with following:
            identities = [each.identity for each in self._files]
            if any(each.is_lost for each in self._files) or identities == self._current:
                return False
            if self._changed is not None:
                self._changed()
            self._current = identities
            self.metadata = self._files[0].layout.metadata
            self.version += 1
            return True

    def take_newest(self) -> bool:
        """Update memory that goes to sleep or wakes. False if that fails, too: the old version stays.

        Files that follow together do that only while all of them sleep, or none.
        """
        if len({each.is_asleep for each in self._together()[0]}) > 1:
            return False
        try:
            failures = self._take() if self._is_newer() else None
        except (OSError, ValueError):  # the next update() says why
            return False
        for failure in (failures or {}).values():
            raise failure
        return failures is not None

    def close(self) -> None:
        """Follow no longer. The memory stays what it is. A second call does nothing."""
        was_open, self._is_open = self._is_open, False
        if was_open:
            for each in self._files:
                each.followers.discard(self)
            self._files = []
            if self._closed is not None:
                self._closed()

    def __repr__(self) -> str:
        return f"<gpufs.Follower of {self.path}: version {self.version}>"


def _note_layout(attachment: Attachment) -> None:
    """Read the layout of the version in use from the memory: the name may lead to another version already."""
    try:
        file = BoundedFile(
            attachment.size,
            lambda offset, count: attachment.mapping.read(attachment.placement + offset, count) if count else b"",
        )
        attachment.layout = FileLayout.read(attachment.path, file)
    except FormatError as error:
        raise FormatError(f"{attachment.path}: {error}") from None


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


@contextmanager
def _opened(directory: str) -> Iterator[int]:
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with closed_after(fd):
        yield fd


def _below(directory: int, attachment: Attachment) -> str:
    """Return a path of a file's name in an open directory."""
    return f"{path_of(directory)}/{os.path.basename(attachment.path)}"


def _check_all_there(directory: int, files: Sequence[Attachment]) -> None:
    """Raise ValueError if a file is missing in the directory: what is there alone would be a part of a version."""
    missing = sorted({os.path.basename(each.path) for each in files} - set(os.listdir(path_of(directory))))
    if missing:
        raise ValueError(f"{os.path.dirname(files[0].path)}: the new version has no {missing[0]}: complete it first")


def _check_not_alone(directory: int, state: tuple[int, int, int, int], files: Sequence[Attachment]) -> None:
    """Raise ValueError if files of the directory in use have been replaced there, one after the other.

    Such versions can be torn. A directory that has been exchanged, and comes back with new files, has been renamed
    since it got the last one: its change time is later than its modification time.
    """
    before, renamed = files[0].directory, state[3] > state[2]
    if before is None or before[:2] != state[:2] or renamed:
        return
    for each in files:
        if _identity(_below(directory, each)) != each.identity:
            text = "was replaced alone, and all files of its directory follow together: `gpufs replace NEWDIR DIR`"
            raise ValueError(f"{each.path} {text}")


def _state(path: str) -> tuple[int, int, int, int]:
    """Return what says that a directory is the same one, with the same names, and has not been renamed since."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


@named_in("gpufs")
def follow(array: DeviceArray) -> Follower:
    """Let attached memory become that of newer versions of its file, when this program asks for it.

    A new version is another file that takes the name by rename(2): by `gpufs.replace`, `gpufs.torch.publish` or mv(1).
    It has the same layout: the same size, and for files whose tensors gpufs finds the same tensors at the same offsets.

    Parameters
    ----------
    array
        What `gpufs.attach` returned, with mode "r" or "r+", or a part of it. All that was made of the file's memory
        follows it. A private copy becomes a copy of the new version.

    Returns
    -------
    Follower
        Its ``update()`` takes over the newest version.

    Raises
    ------
    ValueError
        The array's mode is "c", it sleeps, or it is a copy of a small file. A header that is damaged.

    See Also
    --------
    gpufs.torch.follow : does the same for tensors and modules.

    Examples
    --------
    >>> weights = gpufs.attach("/mnt/gpufs/gpu0/weights")  # doctest: +SKIP
    >>> follower = gpufs.follow(weights)  # doctest: +SKIP
    >>> while True:  # doctest: +SKIP
    ...     follower.update()
    ...     use(weights)
    """
    attachment = array.attached
    if not isinstance(attachment, Attachment):
        raise ValueError(
            f"{array.path}: a copy of a small file cannot follow it: only what gpufs.attach() returned can"
        )
    return Follower(attachment)
