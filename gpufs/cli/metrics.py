"""gpufs metrics: the counters of all mounts for Prometheus."""

import sys
from typing import Any

import click

from gpufs import config
from gpufs.cli import _answers, _mounts, _queries
from gpufs.cli._options import address_option, complete_mounts, timeout_option
from gpufs.cli._output import Failure


@click.command(name="metrics")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@address_option("--listen", "Serve them by HTTP at this address until interrupted.")
@timeout_option(config.STATUS_TIMEOUT)
def command(mountpoints: tuple[str, ...], listen: tuple[str, int] | None, timeout: float) -> None:
    """Print the metrics of the mounts of this machine for Prometheus.

    Of all mounts, or of the given MOUNTPOINTs. Every series has the label mountpoint, that of a device the label
    device. The series gpufs_up is 0 for a mount that is dead or hangs; a dead one has no others.
    """
    # Other commands do not need them.
    from prometheus_client import start_http_server

    from gpufs.statistics import prometheus

    def read() -> list[dict[str, Any]]:
        """Return the counters of each mount. Where nothing is mounted, "error" says so."""
        counted = []
        for path in mountpoints:
            try:
                counted += _queries.counters([path], show, timeout)
            except Failure as failure:
                counted.append({"mountpoint": _mounts.absolute(path), "error": str(failure).removeprefix(f"{path}: ")})
        return counted if mountpoints else _queries.counters([], show, timeout)

    def show(mount: dict[str, Any]) -> str:
        return prometheus.metrics([mount]).decode()

    if listen is None:
        counted = read()
        sys.stdout.write(prometheus.metrics(counted).decode())
        silent = [(mount["mountpoint"], mount["error"]) for mount in counted if mount.get("error")]
        _answers.finish(silent, len(counted), named=bool(mountpoints))
        return
    host, port = listen
    try:
        _, serving = start_http_server(port, host, prometheus.registry(read))
    except UnicodeError:  # such as a name with an empty part
        raise Failure(f"--listen: {host!r} is not an address", 2) from None
    except OSError as error:
        raise Failure(f"--listen {host}:{port}: {error.strerror}") from None
    serving.join()
