"""Weights that model servers share, without a server."""

from __future__ import annotations

import os
import stat

import pytest
import torch
from support.mounting import GpufsMount
from support.processes import NOBODY, PATIENCE

from gpufs.integrations._shared_weights import SharedWeights


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_weights_get_neither_owner_nor_rights_of_another_users_file(shared_mount: GpufsMount, content: bytes) -> None:
    """Whoever is not trusted could write to them otherwise, while engines use them."""
    weights = SharedWeights(shared_mount.device, f"server{len(content)}", "model", {"seed": 1})
    weights.path.parent.mkdir()
    weights.path.write_bytes(content)
    weights.path.chmod(0o666)
    os.chown(weights.path, NOBODY, NOBODY)
    with weights.claim(PATIENCE, lambda: None) as claimed:
        assert claimed
        opened = weights.publish(torch.nn.Linear(256, 256), {})
    status = weights.path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode) & 0o022) == (0, 0, 0)
    assert opened.checkpoint.places
