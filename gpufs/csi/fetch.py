"""Fetches a model: the process that `gpufs csi` starts for each, so that each has credentials of its own.

It reads its order from standard input, as one line of JSON, and its credentials with it: they are in no file, and not
among its arguments. It ends when standard input does, because then the plug-in has ended. Standard output gets the
progress and the result, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

# The credentials of the plug-in's own environment. A volume with secrets gets none of them.
_OWN: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_", "GOOGLE_", "AZURE_")
_NO_CREDENTIALS: Final = ("AWS_CA_BUNDLE", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
_REPORT_SECONDS: Final = 1.0


def _end_with_the_plugin() -> None:
    sys.stdin.read()
    os._exit(1)


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _reporter() -> Callable[[Any], None]:
    from gpufs.copying.types import check_memory

    last = 0.0

    def report(progress: Any) -> None:
        nonlocal last
        try:
            check_memory()
        except OSError as error:
            _say(ok=False, errno=error.errno, text=error.strerror)
            os._exit(1)  # a thread that asks a store may not end soon
        if time.monotonic() - last >= _REPORT_SECONDS:
            last = time.monotonic()
            _say(moved=progress.moved, total=progress.total)

    return report


def _fetch(order: dict[str, Any]) -> None:
    import gpufs

    os.fchdir(order["target"])  # the directory that the plug-in has opened
    # Not `partial`: what does not fit is refused before the first byte.
    results = gpufs.copy_tree(
        order["source"],
        ".",
        include=order["include"],
        exclude=[*order["exclude"], ".gpufs"],
        update=True,
        progress=_reporter(),
    )
    _say(ok=True, bytes=sum(result.bytes for result in results), files=_files())


def _files() -> dict[str, int]:
    """Return the sizes of all files that are there. Those that processes before this one have begun are removed."""
    from gpufs.copying.entries import Entry
    from gpufs.copying.walk import walk_files
    from gpufs.new_file import PREFIX

    def fail(path: str, error: OSError) -> None:
        raise error

    files = {}
    for step in walk_files(Entry.of(".", follow=False), fail, recursive=True, dereference=False):
        if step.kind == "file" and step.folder is not None:
            if step.name.startswith(PREFIX):
                os.unlink(step.name, dir_fd=step.folder.fd)
            else:
                files[step.below] = step.size
    return files


def main() -> None:
    """Fetch, and report."""
    os.umask(0o022)  # pods of any user read what it fetches; the directory above is closed
    order = json.loads(sys.stdin.readline())
    if order["secrets"]:
        for name in list(os.environ):
            if name.startswith(_OWN) and name not in _NO_CREDENTIALS:
                del os.environ[name]
        # What is stored on the node is not the pod's: a token, and files that another one may have loaded.
        os.environ.update({"HF_TOKEN_PATH": os.devnull, "HF_HUB_CACHE": os.devnull}, **order["secrets"])
    threading.Thread(target=_end_with_the_plugin, daemon=True).start()
    try:
        _fetch(order)
    except Exception as error:  # noqa: BLE001 - reported to the plug-in
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        number = first.errno if isinstance(first, OSError) else None
        _say(ok=False, errno=number, text=str(first).partition("\n")[0] or type(first).__name__)


if __name__ == "__main__":
    main()
