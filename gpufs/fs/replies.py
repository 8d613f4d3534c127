"""The replies that describe an inode to the kernel."""

import pyfuse3


class Replies:
    """Builds replies with the mount's time-outs: for how many seconds the kernel may trust a name and attributes.

    A name that does not exist may be remembered as well: ``no_entry`` is that reply.
    """

    def __init__(self, entry_timeout: float, attribute_timeout: float) -> None:
        self._entry_timeout = entry_timeout
        self._attribute_timeout = attribute_timeout
        self.no_entry = self.entry(0, 0)

    def entry(self, ino: int, kind: int) -> pyfuse3.EntryAttributes:
        """The reply for an inode; ``kind`` is its S_IF type, with or without permission bits."""
        reply = pyfuse3.EntryAttributes()
        reply.st_ino = ino
        reply.st_mode = kind
        reply.entry_timeout = self._entry_timeout
        reply.attr_timeout = self._attribute_timeout
        return reply
