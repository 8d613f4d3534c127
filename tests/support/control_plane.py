"""The control plane without a mount: its parts over a fake inode table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gpufs.fs.backing import BackingHandler, Share
from gpufs.fs.dispatch import Operations
from gpufs.fs.handles import Handles
from gpufs.fs.names import NamesHandler
from gpufs.fs.replies import Replies
from gpufs.fs.tree import Tree


def control_plane(tree: Tree, table: Any, shares: Sequence[Share] = ()) -> Operations:
    """The operations of a mount with this tree, which shows these directories of the host."""
    handles, replies = Handles(), Replies(1, 1)
    names = NamesHandler(tree, table, handles, replies)
    if not shares:
        return Operations(table, handles, names)
    ids = {"uid": os.geteuid(), "gid": os.getegid()}
    return Operations(table, handles, names, BackingHandler(tree, table, handles, replies, shares, device=0, **ids))
