"""The limits of mounts, as the mounts report them with their status."""

from collections.abc import Sequence
from typing import Any

from gpufs.cli._output import bytes_text, table_lines, user_name


def of_status(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The limits of one mount that this user may see, and what is used.

    For each: mountpoint, path (of the device or directory), uid and user (None for a directory), used_bytes,
    limit_bytes (None without a limit).
    """
    root = status["mountpoint"].rstrip("/")
    return [
        {
            "mountpoint": status["mountpoint"],
            "path": f"{root}/{quota['path']}",
            "uid": quota["uid"],
            "user": None if quota["uid"] is None else user_name(quota["uid"]),
            "used_bytes": quota["used_bytes"],
            "limit_bytes": quota["limit_bytes"],
        }
        for quota in status.get("quotas", [])
    ]


def lines(quotas: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table."""
    rows = []
    for quota in quotas:
        used, limit = quota["used_bytes"], quota["limit_bytes"]
        share = f"{100 * used / limit:.0f}%" if limit else "-"
        user = "all" if quota["user"] is None else quota["user"]
        rows.append((quota["path"], user, bytes_text(used), bytes_text(limit), share))
    return table_lines(("PATH", "USER", "USED", "LIMIT", "USE%"), rows, right=frozenset({2, 3, 4}))


def limits(statuses: Sequence[dict[str, Any]]) -> list[str]:
    """An empty line and the table of those that have a limit; nothing if none has one."""
    limited = [quota for status in statuses for quota in of_status(status) if quota["limit_bytes"] is not None]
    return ["", *lines(limited)] if limited else []
