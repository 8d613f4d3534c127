"""The failure of a call of the kubelet."""

from __future__ import annotations

import errno
from typing import Final

# What a code of gRPC says to the kubelet. After ABORTED, RESOURCE_EXHAUSTED and UNAVAILABLE it asks to unpublish a
# volume that it does not need any more; after the others it takes the volume for not published.
_UNCERTAIN: Final = frozenset({"ABORTED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})
_CODES: Final = {
    errno.ENOENT: "NOT_FOUND",
    errno.EACCES: "PERMISSION_DENIED",
    errno.EINVAL: "INVALID_ARGUMENT",
    errno.EISDIR: "INVALID_ARGUMENT",
    errno.ENOTDIR: "INVALID_ARGUMENT",
    errno.ENOSPC: "RESOURCE_EXHAUSTED",
    errno.EDQUOT: "RESOURCE_EXHAUSTED",
    errno.ENOPKG: "FAILED_PRECONDITION",
    errno.ENOTCONN: "UNAVAILABLE",
    errno.ECONNABORTED: "UNAVAILABLE",
    errno.ENODEV: "UNAVAILABLE",
    errno.EIO: "UNAVAILABLE",
    errno.ESTALE: "UNAVAILABLE",
    errno.ECANCELED: "ABORTED",
}


class CallError(Exception):
    """A call that fails: the name of gRPC's code, and one line for the events of the pod."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_uncertain(self) -> bool:
        """Whether the kubelet will publish the volume again, or unpublish it."""
        return self.code in _UNCERTAIN

    @classmethod
    def of(cls, error: OSError, text: str) -> CallError:
        """The error for one of the system, or of a copy."""
        return cls(_CODES.get(error.errno or 0, "INTERNAL"), text)
