"""gpufs metrics: the counters of all mounts for Prometheus."""

import functools
import socket
import sys
from collections.abc import Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import click

from gpufs.cli import _counters, _mounts
from gpufs.cli._errors import Failure, complain
from gpufs.cli._knobs import complete_mounts, knob_options, settings


@click.command(name="metrics")
@click.argument("mountpoints", metavar="[MOUNTPOINT...]", nargs=-1, shell_complete=complete_mounts)
@click.option("--listen", metavar="ADDRESS:PORT", help="Serve them by HTTP at this address until interrupted.")
@knob_options("metrics")
def command(mountpoints: tuple[str, ...], listen: str | None, **arguments: Any) -> None:
    """Print the metrics of the mounts of this machine for Prometheus.

    Of all mounts, or of the given MOUNTPOINTs. Every series has the label mountpoint, that of a device the label
    device. A mount that does not answer has only the series gpufs_up, with the value 0.
    """
    # Other commands do not need them.
    from prometheus_client import make_wsgi_app

    from gpufs.statistics import prometheus

    timeout: float = settings("metrics", arguments)["status_timeout"]
    read = functools.partial(_read, mountpoints, timeout)
    if listen is None:
        found = read()
        sys.stdout.write(prometheus.metrics(found).decode())
        failed = [one for one in found if one.get("error")]
        for one in failed:
            complain(f"{one['mountpoint']}: {one['error']}")
        if mountpoints and failed:
            raise Failure(f"{len(failed)} of {len(found)} mounts have no counters")
        return
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise Failure(f"--listen: {listen} is not ADDRESS:PORT, for example localhost:9400", 2)
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        server_class = type("Server", (WSGIServer,), {"address_family": family})
        server = make_server(str(address[0]), int(port), make_wsgi_app(prometheus.registry(read)), server_class, _Quiet)
    except OSError as error:
        raise Failure(f"--listen {listen}: {error.strerror}") from None
    with server:
        server.serve_forever()


def _read(mountpoints: Sequence[str], timeout: float) -> list[dict[str, Any]]:
    """The counters, as _counters.collect() returns them. Where nothing is mounted, "error" says so."""
    if not mountpoints:
        return _counters.collect([], timeout)
    found = []
    for path in mountpoints:
        try:
            found += _counters.collect([path], timeout)
        except Failure as failure:
            found.append({"mountpoint": _mounts.absolute(path), "error": str(failure)})
    return found


class _Quiet(WSGIRequestHandler):
    """Logs nothing. A client that sends no request for this time, in seconds, does not keep others waiting longer."""

    timeout = 5

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass
