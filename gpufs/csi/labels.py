"""Labels of the node for the models that its mount has, so that pods can be scheduled to them.

The label is ``models.gpufs.dev/NAME``, NAME the source without its scheme, with -- for a slash, and its value the
devices, as ``gpu0.gpu1``.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import ssl
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final
from urllib.parse import quote

from gpufs.csi.volumes import readable

_PREFIX: Final = "models.gpufs.dev/"
_MOST: Final = 63  # characters of a label's name, and of its value
_SECONDS: Final = 10.0
_AGAIN_SECONDS: Final = 300.0  # another program may have removed labels
_MOST_ANSWER: Final = 16 << 20


def label_of(source: str) -> str:
    """Return the label of a source."""
    name = readable(source)
    if len(name) > _MOST:
        name = f"{name[: _MOST - 9].rstrip('._-')}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    return _PREFIX + name


class NodeLabels:
    """The labels of one node. One thread calls.

    ``server``: the Kubernetes API, HOST:PORT. ``account``: the directory with the token and the certificate of the
    service account. Both are read again at each request, as the kubelet renews the token.
    """

    def __init__(self, node: str, server: str, account: str) -> None:
        self._path = f"/api/v1/nodes/{quote(node, safe='')}"
        self._server = server
        self._account = account
        self._set: dict[str, str] | None = None
        self._again = 0.0

    def set(self, resident: Mapping[str, set[str]]) -> None:
        """Set the labels to what is resident: the devices of each source. OSError if that fails: call it again."""
        wanted = {
            label_of(source): ".".join(sorted(devices))[:_MOST].rstrip(".") for source, devices in resident.items()
        }
        if wanted == self._set and time.monotonic() < self._again:
            return
        labels = self._request("GET")["metadata"].get("labels") or {}
        present = {name: value for name, value in labels.items() if name.startswith(_PREFIX)}
        changes: dict[str, str | None] = dict.fromkeys(present.keys() - wanted.keys())
        changes |= {name: value for name, value in wanted.items() if present.get(name) != value}
        if changes:
            self._request("PATCH", {"metadata": {"labels": changes}})
        self._set, self._again = wanted, time.monotonic() + _AGAIN_SECONDS

    def _request(self, method: str, body: object = None) -> Any:
        try:
            with open(os.path.join(self._account, "token"), encoding="ascii") as file:
                token = file.read().strip()
            context = ssl.create_default_context(cafile=os.path.join(self._account, "ca.crt"))
            with closing(http.client.HTTPSConnection(self._server, timeout=_SECONDS, context=context)) as connection:
                kind = "application/merge-patch+json" if body is not None else "application/json"
                headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
                connection.request(method, self._path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                content = answer.read(_MOST_ANSWER)
                if answer.status != http.client.OK:
                    raise OSError(f"status {answer.status}: {content[:200].decode(errors='replace')}")
                return json.loads(content)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise OSError(f"the labels of the node cannot be set: {error}") from None
