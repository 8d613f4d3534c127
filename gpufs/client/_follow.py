"""Following a file: attached memory becomes that of the newest version, at the same addresses of this program."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from gpufs._naming import named_in
from gpufs.client._array import DeviceArray
from gpufs.client._attach import Attachment
from gpufs.exceptions import as_failure_of_mount, failure_of_mount
from gpufs.formats import FormatError
from gpufs.formats.budget import BoundedFile
from gpufs.formats.versions import FileLayout
from gpufs.modes import COPY_ON_WRITE
from gpufs.syscalls import Closing


@named_in("gpufs")
class Follower(Closing):
    """Keeps attached memory at the newest version of its file. `gpufs.follow` and `gpufs.torch.follow` make one.

    The memory stays attached as long as this object, or anything made of the memory, exists.

    Attributes
    ----------
    path : str
        The name that is followed, absolute. A symbolic link in it counts as it leads now.
    version : int
        How often the memory has become a newer version's: 0 in the beginning.
    metadata : dict of str to str
        What the version in use says about itself: the metadata of a safetensors file, such as a training step.
    is_whole : bool
        Whether all is of that version. False only after an ``update()`` that failed in the middle, which a later one
        completes.
    """

    def __init__(
        self,
        attachment: Attachment,
        *,
        check: Callable[[], None] | None = None,
        changed: Callable[[], None] | None = None,
        closed: Callable[[], None] | None = None,
    ) -> None:
        """``check`` is called before each change of the version, and refuses it by a ValueError.

        ``changed`` is called after it, and again by later updates until it raises nothing; ``closed`` once, at the end.
        """
        if attachment.mode == COPY_ON_WRITE:
            raise ValueError(
                f'{attachment.path}: mode "c" keeps changes of this program, which a new version would drop'
            )
        if attachment.is_asleep:
            raise ValueError(f"{attachment.path} sleeps: gpufs.wake() it, and follow it then")
        self.path = attachment.path
        self.version = 0
        self._attachment: Attachment | None = attachment
        self._check = check
        self._changed = changed
        self._closed = closed
        self._current = attachment.identity  # of the version that all is of that this object keeps
        # Read from the memory: the name may lead to another version already.
        try:
            file = BoundedFile(
                attachment.size,
                lambda offset, count: attachment.mapping.read(attachment.placement + offset, count) if count else b"",
            )
            attachment.layout = FileLayout.read(self.path, file)
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from None
        self.metadata: dict[str, str] = attachment.layout.metadata
        attachment.followers.add(self)

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
        attachment = self._open()
        if attachment.is_asleep:
            return False
        with suppress(OSError):  # the newest version may be possible all the same
            attachment.restore()
        completed = self._complete(attachment)
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            status = None
        except OSError as error:
            raise failure_of_mount(error, self.path) from None
        if status is None or (status.st_dev, status.st_ino) == attachment.identity:
            attachment.restore()
            return completed
        failures = self._take(attachment)
        if failures is not None and self in failures:
            raise failures[self]
        return completed or failures is not None

    @property
    def is_whole(self) -> bool:
        """Whether all is of one version."""
        attachment = self._attachment
        return attachment is None or (attachment.identity == self._current and not attachment.is_lost)

    def _take(self, attachment: Attachment) -> dict[Follower, Exception] | None:
        """Take over the newest version for all that follow the memory. None if there is none.

        Returns what has failed then, which the next update() of each tries again.
        """

        def check(fd: int) -> FileLayout:
            layout = FileLayout.of_file(fd, self.path, f"the new version of {self.path}")
            attachment.layout.check(layout, self.path)
            return layout

        with attachment.following:
            followers: list[Follower] = list(attachment.followers)
            for follower in followers:
                if follower._check is not None and follower.is_whole:
                    follower._check()
            with as_failure_of_mount(self.path):
                if not attachment.take_version(self.path, check):
                    return None
            failures = {}
            for follower in followers:
                try:
                    follower._complete(attachment)
                except Exception as error:  # noqa: BLE001 - its own update() raises it
                    failures[follower] = error
            return failures

    def _complete(self, attachment: Attachment) -> bool:
        """Have what this object keeps become that of the version in the memory. False: it is that."""
        with attachment.following:
            if attachment.is_lost or attachment.identity == self._current:
                return False
            if self._changed is not None:
                self._changed()
            self._current = attachment.identity
            self.metadata = attachment.layout.metadata
            self.version += 1
            return True

    def take_newest(self) -> bool:
        """Update memory that goes to sleep or wakes. False if that fails, too: the old version stays."""
        attachment = self._attachment
        if attachment is None:
            return False
        try:
            failures = self._take(attachment)
        except (OSError, ValueError):  # the next update() says why
            return False
        for failure in (failures or {}).values():
            raise failure
        return failures is not None

    def close(self) -> None:
        """Follow no longer. The memory stays what it is. A second call does nothing."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.followers.discard(self)
            if self._closed is not None:
                self._closed()

    def _open(self) -> Attachment:
        if self._attachment is None:
            raise ValueError(f"what followed {self.path} is closed")
        return self._attachment

    def __repr__(self) -> str:
        return f"<gpufs.Follower of {self.path}: version {self.version}>"


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
