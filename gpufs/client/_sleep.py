"""Sleep and wake: attached memory leaves its device and comes back, at the same addresses of this program."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from gpufs import mounting
from gpufs._naming import named_in
from gpufs.client import _daemons
from gpufs.client._array import DeviceArray
from gpufs.client._attach import Attachment, absolute_name, attachments, check_together
from gpufs.exceptions import failure_of_mount, text_of
from gpufs.protocol import Move

_One: TypeAlias = "str | os.PathLike[str] | DeviceArray"
What: TypeAlias = "_One | Iterable[_One] | None"
Asked: TypeAlias = Callable[[list[str]], object]

_RECONNECT_SECONDS: Final = 0.5


@named_in("gpufs")
def sleep(what: What = None) -> int:
    """Give up the device memory of attached files, and keep their addresses.

    Whatever this program has made of them (arrays, tensors, views, captured graphs) stays valid and must not be used
    until `gpufs.wake`: an access ends the program with SIGSEGV in host memory, and the context of a GPU with an error.
    When all programs that have a file attached sleep, the file leaves its device and lies in the host's memory of the
    mount (`gpufs mount --host-memory`), once for all of them. It needs one program among them that may write to the
    file, or whose user owns it.

    Parameters
    ----------
    what
        A file's path, an array of `gpufs.attach`, several of these, or None for everything that this program has
        attached. In all cases whole files sleep, with all that this program has made of them, and several sleep
        together or not at all. A path also means the older version that this program has of the file, if it follows the
        path or that version sleeps.

    Returns
    -------
    int
        The bytes of the files that sleep now and did not before.

    Raises
    ------
    OSError
        EOPNOTSUPP for a private copy and where the mount has no host memory, ENOSPC or EDQUOT if that has no space for
        all of the files. Nothing has changed then, unless the text says otherwise: other programs may take the space
        that a file leaves.

    Examples
    --------
    >>> weights = gpufs.attach("/mnt/gpufs/gpu0/weights", "r+")  # doctest: +SKIP
    >>> gpufs.sleep(weights)  # doctest: +SKIP
    17179869184
    >>> gpufs.wake(weights)  # doctest: +SKIP
    17179869184
    """
    return change(chosen(what), "sleep")


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
        The device lacks memory for all of the files; the text says how much and who has it. All sleep on, unless the
        text says otherwise.
    OSError
        ESTALE if a file was made smaller while it slept.
    """
    return change(chosen(what), "wake")


@named_in("gpufs")
def when_asked(sleep: Asked | None = None, wake: Asked | None = None) -> None:
    """Let `gpufs sleep` and `gpufs wake` of a shell ask this program.

    Each function is called once for a command, on a thread for that, with the paths of all files of this program that
    the command is about. The first should make the program stop using the files and then call `gpufs.sleep` with the
    paths, the second call `gpufs.wake` and let the program go on. What a function raises is shown to the user of the
    shell, and printed here. A program that does not call this is named to that user as one that cannot be asked.

    Parameters
    ----------
    sleep, wake
        None: `gpufs.sleep` and `gpufs.wake` themselves, for programs that use attached memory only while nobody asks.
        A later call replaces both.
    """
    _listeners.set({"sleep": sleep, "wake": wake})


def change(found: Sequence[Attachment], what: Move) -> int:
    """Let attachments sleep or wake, all of them or none; returns the bytes of those that it changed."""
    wakes = what == "wake"
    todo = [each for each in found if each.is_asleep == wakes]
    try:
        for each in todo:
            each.take_newest()  # which is awake
        left = [each for each in todo if each.is_asleep == wakes]
        if not wakes or len(left) > 1:  # one alone takes what it can get
            check_together(left, what)
        for each in todo:
            each.wake() if wakes else each.sleep()
    except BaseException as failure:
        stuck = [each.path for each in reversed(todo) if each.is_asleep != wakes and not _undone(each)]
        if stuck and isinstance(failure, OSError):
            text = f"{text_of(failure)}; {', '.join(stuck)} {'is awake' if wakes else 'sleeps'}"
            raise failure_of_mount(OSError(failure.errno, text), str(failure.filename or stuck[0])) from None
        raise
    return sum(each.size for each in todo if each.is_asleep != wakes)


def _undone(attachment: Attachment) -> bool:
    """Let an attachment wake that has gone to sleep, or the other way; return whether it does."""
    with suppress(OSError):
        attachment.wake() if attachment.is_asleep else attachment.sleep()
        return True
    return False


def chosen(what: What) -> list[Attachment]:
    """The attachments that somebody names, each once."""
    everything = attachments()
    if what is None:
        return everything
    items = [what] if isinstance(what, (str, os.PathLike, DeviceArray)) else list(what)
    found: dict[int, Attachment] = {}
    for item in items:
        if isinstance(item, DeviceArray):
            named = [each for each in everything if each is item.attached]
            if not named:
                raise ValueError("a copy of a small file cannot sleep: only what gpufs.attach() returned can")
        else:
            named = _named(os.fsdecode(item), everything)
        found |= {id(each): each for each in named}
    return list(found.values())


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
        self._lock = threading.Lock()  # guards the two below
        self._functions: dict[Move, Asked | None] = {}  # none before when_asked() is called
        self._mounts: set[int] = set()  # by st_dev

    def set(self, functions: dict[Move, Asked | None]) -> None:
        with self._lock:
            self._functions = functions
        for attachment in attachments(self.watch):
            self.watch(attachment)

    def watch(self, attachment: Attachment) -> None:
        st_dev = attachment.identity[0]
        with self._lock:
            if not self._functions or st_dev in self._mounts:
                return
            threading.Thread(target=self._listen, args=(st_dev,), name="gpufs-asked", daemon=True).start()
            self._mounts.add(st_dev)

    def _listen(self, st_dev: int) -> None:
        """Listen until the mount has gone. Another daemon may take it over."""
        while mounts := mounting.by_device().get(st_dev):
            with suppress(OSError), _daemons.connect(st_dev, mounts, trusting=True) as daemon:
                daemon.listen(functools.partial(self._answer, st_dev))
            time.sleep(_RECONNECT_SECONDS)
        with self._lock:
            self._mounts.discard(st_dev)

    def _answer(self, st_dev: int, inodes: Sequence[int], what: Move) -> str:
        """Do what is asked; return why that failed, or "". One question after the other, in their order."""
        asked = {(st_dev, inode) for inode in inodes}
        concerned = [each for each in attachments() if each.identity in asked and each.is_asleep == (what == "wake")]
        paths = list(dict.fromkeys(each.path for each in concerned))
        if not paths:
            return ""
        function = self._functions[what] or (lambda paths: change(chosen(paths), what))
        try:
            function(paths)
        except Exception as error:  # noqa: BLE001 - shown here, and to the user of the shell
            # On the program's standard error, as on every thread.
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            return text_of(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        return ""


_listeners: Final = _Listeners()
