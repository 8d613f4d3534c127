"""Sleep and wake: attached memory leaves its device and comes back, at the same addresses of this program."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeAlias

from gpufs import mounting
from gpufs._naming import named_in
from gpufs.client import _daemons
from gpufs.client._array import DeviceArray
from gpufs.client._attach import Attachment, absolute_name, attachments
from gpufs.exceptions import failure_of_mount

What: TypeAlias = "str | os.PathLike[str] | DeviceArray | Iterable[DeviceArray] | None"

_RECONNECT_SECONDS: Final = 0.5


@named_in("gpufs")
def sleep(what: What = None) -> int:
    """Give up the device memory of attached files, and keep their addresses.

    Whatever this program has made of them (arrays, tensors, views, captured graphs) stays valid and must not be used
    until `gpufs.wake`: an access ends the program with SIGSEGV in host memory, and the context of a GPU with an error.
    When all programs that have a file attached sleep, the file leaves its device and lies in the host's memory of the
    mount (`gpufs mount --host-memory`), once for all of them.

    Parameters
    ----------
    what
        A file's path, arrays of `gpufs.attach`, or None for everything that this program has attached. In all cases the
        whole file sleeps, with all that this program has made of it. A path also means the older version that this
        program has of the file, if it follows the path or that version sleeps.

    Returns
    -------
    int
        The bytes of the files that sleep now and did not before.

    Raises
    ------
    OSError
        EOPNOTSUPP for a private copy and where the mount has no host memory, ENOSPC or EDQUOT if that is full. The file
        that failed is awake; those before it sleep.

    Examples
    --------
    >>> weights = gpufs.attach("/mnt/gpufs/gpu0/weights", "r+")  # doctest: +SKIP
    >>> gpufs.sleep(weights)  # doctest: +SKIP
    17179869184
    >>> gpufs.wake(weights)  # doctest: +SKIP
    17179869184
    """
    return change(chosen(what), Attachment.sleep)


@named_in("gpufs")
def wake(what: What = None) -> int:
    """Bring attached files that sleep back to their devices, at the same addresses.

    Parameters
    ----------
    what
        As for `gpufs.sleep`.

    Returns
    -------
    int
        The bytes of the files that are awake now and were not before.

    Raises
    ------
    DeviceFull, QuotaExceeded
        The device lacks memory; the text says how much and who has it. The file sleeps on.
    OSError
        ESTALE if the file was made smaller while it slept.
    """
    return change(chosen(what), Attachment.wake)


@named_in("gpufs")
def when_asked(sleep: Callable[[str], object] | None = None, wake: Callable[[str], object] | None = None) -> None:
    """Let `gpufs sleep` and `gpufs wake` of a shell ask this program.

    Each function is called with a file's path, on a thread of its own, and should make the program stop using the file
    and then call `gpufs.sleep` with the path, or `gpufs.wake` and go on. A program that does not call this is named to
    the user of the shell as one that cannot be asked.

    Parameters
    ----------
    sleep, wake
        None: `gpufs.sleep` and `gpufs.wake` themselves, for programs that use attached memory only while nobody asks.
        A later call replaces both.
    """
    _listeners.set(sleep or _sleep_path, wake or _wake_path)


def _sleep_path(path: str) -> None:
    sleep(path)


def _wake_path(path: str) -> None:
    wake(path)


def change(found: Iterable[Attachment], action: Callable[[Attachment], bool]) -> int:
    """Do something to attachments; returns the bytes of those that it changed. OSError of the first that fails."""
    return sum(attachment.size for attachment in found if action(attachment))


def chosen(what: What) -> list[Attachment]:
    """The attachments that somebody names."""
    everything = attachments()
    if what is None:
        return everything
    if isinstance(what, DeviceArray):
        what = [what]
    if isinstance(what, (str, os.PathLike)):
        return _named(os.fsdecode(what), everything)
    arrays = list(what)
    wanted = {id(array.attached) for array in arrays}
    found = [each for each in everything if id(each) in wanted]
    if len(found) != len(wanted):
        raise ValueError("a copy of a small file cannot sleep: only what gpufs.attach() returned can")
    return found


def _named(path: str, everything: Iterable[Attachment]) -> list[Attachment]:
    """The attachments of the file that has a name, and of older versions: those that sleep, or follow the name."""
    name = absolute_name(path)
    older = [each for each in everything if each.path == name and (each.is_asleep or each.followers)]
    try:
        status = os.stat(path)
    except OSError as error:
        if older:
            return older
        raise failure_of_mount(error, path) from None
    return [each for each in everything if each.identity == (status.st_dev, status.st_ino) or each in older]


# ---- what a shell asks ----


class _Listeners:
    """The threads that wait for questions about this program's files, one for each mount."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._sleep: Callable[[str], object] = _sleep_path
        self._wake: Callable[[str], object] = _wake_path
        self._mounts: set[int] = set()  # by st_dev
        self._active = False

    def set(self, sleep: Callable[[str], object], wake: Callable[[str], object]) -> None:
        with self._lock:
            self._sleep, self._wake = sleep, wake
            self._active = True
        for attachment in attachments(self.watch):
            self.watch(attachment)

    def watch(self, attachment: Attachment) -> None:
        """Listen for what is asked about the mount of an attachment."""
        st_dev = attachment.identity[0]
        with self._lock:
            if not self._active or st_dev in self._mounts:
                return
            threading.Thread(target=self._listen, args=(st_dev,), name="gpufs-asked", daemon=True).start()
            self._mounts.add(st_dev)

    def _listen(self, st_dev: int) -> None:
        """Listen until the mount has gone. Another daemon may take it over."""
        while mounts := mounting.by_device().get(st_dev):
            with suppress(OSError), _daemons.connect(st_dev, mounts, trusting=True) as daemon:
                daemon.listen(lambda inode, asked: self._answer((st_dev, inode), asked))
            time.sleep(_RECONNECT_SECONDS)
        with self._lock:
            self._mounts.discard(st_dev)

    def _answer(self, identity: tuple[int, int], asked: str) -> None:
        path = next((each.path for each in attachments() if each.identity == identity), None)
        if path is None:
            return
        with self._lock:
            function = self._sleep if asked == "sleep" else self._wake
        # A function that fails prints a traceback on the program's standard error, as on every thread.
        threading.Thread(target=function, args=(path,), name=f"gpufs-{asked}", daemon=True).start()


_listeners: Final = _Listeners()
