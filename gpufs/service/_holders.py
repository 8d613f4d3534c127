"""Who uses a mount's memory in place: the leases and registrations, and how many a user may have."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from errno import EBUSY, EMFILE, ENOSPC
from typing import Any, Final

from gpufs.service._channel import Peer
from gpufs.service._resources import Resources
from gpufs.service._user import Limits, trusted
from gpufs.units import bytes_text

REGISTERED: Final = "registered"  # the mode of a registration


@dataclass(eq=False, slots=True)
class Holder:
    """One lease or registration, and the program that has it."""

    peer: Peer
    mode: str
    path: str = ""  # the name at the beginning, as this process sees it
    ino: int = 0
    private: bool = False
    bytes: int = 0
    charged: tuple[int, int] = (0, 0)  # the device of a private copy, and the bytes that it takes there
    since: float = field(default_factory=time.time)
    resources: Resources | None = None  # of a lease, which ends with them
    revoked: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For ``.gpufs/leases``."""
        return {
            "path": self.path,
            "inode": self.ino,
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "program": self.peer.program,
            "mode": self.mode,
            "private": self.private,
            "bytes": self.bytes,
            "since": self.since,
        }


class HolderTable:
    """All leases and registrations of a mount. Any thread may call."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # guards all below
        self._holders: set[Holder] = set()
        self._counts: Counter[tuple[int, bool]] = Counter()  # by user, and whether they are registrations
        self._private: Counter[tuple[int, int]] = Counter()  # bytes of private copies by user and device

    def enter(self, holder: Holder) -> None:
        """Add one. OSError EMFILE or EBUSY if its user has too many."""
        uid, registered = key = holder.peer.uid, holder.mode == REGISTERED
        with self._lock:
            if registered and self._counts[key] >= self._limits.registrations_per_user:
                raise OSError(EBUSY, f"a user may have {self._limits.registrations_per_user} registrations at a time")
            if not registered and self._counts[key] >= self._limits.attachments_per_user:
                raise OSError(EMFILE, f"user {uid} has {self._counts[key]} files attached already")
            self._counts[key] += 1
            self._holders.add(holder)

    def leave(self, holder: Holder) -> None:
        """Remove one that has been entered."""
        with self._lock:
            self._holders.remove(holder)
            self._counts[holder.peer.uid, holder.mode == REGISTERED] -= 1
            device, size = holder.charged
            self._private[holder.peer.uid, device] -= size

    def charge(self, holder: Holder, device: int, size: int, total: int) -> None:
        """Count a private copy of ``size`` bytes on a device of ``total``. OSError ENOSPC beyond a user's share."""
        uid = holder.peer.uid
        with self._lock:
            used = self._private[uid, device]
            most = total if trusted(uid) else int(total * self._limits.private_share)
            if used + size > most:
                raise OSError(
                    ENOSPC,
                    f"private copies of user {uid} on gpu{device} may take {bytes_text(most)}: {bytes_text(used)} are "
                    f"in use, {bytes_text(size)} more are needed (files that the user may write need no copy)",
                )
            self._private[uid, device] += size
            holder.charged = (device, size)

    def leases_on(self, ino: int) -> list[tuple[Holder, Resources]]:
        """The leases on the file itself; private copies keep nobody from anything."""
        with self._lock:
            holders = [holder for holder in self._holders if holder.ino == ino and not holder.private]
        return [(holder, holder.resources) for holder in holders if holder.resources is not None]

    def as_list(self, uid: int) -> list[dict[str, Any]]:
        """Those that a user may see, oldest first: root and the mount's owner all, others their own."""
        with self._lock:
            seen = [holder for holder in self._holders if trusted(uid) or holder.peer.uid == uid]
        return [holder.as_dict() for holder in sorted(seen, key=lambda holder: holder.since)]
