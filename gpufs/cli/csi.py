"""gpufs csi: the CSI node plug-in for Kubernetes."""

import os
import shlex
import sys

import click

from gpufs.cli._main import complete_directories
from gpufs.cli._options import address_option
from gpufs.cli._output import Failure, complain

_DRIVER = "gpufs.dev"


@click.command(name="csi")
@click.option(
    "--endpoint",
    envvar="CSI_ENDPOINT",
    default="unix:///csi/csi.sock",
    show_default=True,
    metavar="unix://PATH",
    help="The socket for the kubelet.",
)
@click.option(
    "--mount",
    "mountpoint",
    default="/mnt/gpufs/node",
    show_default=True,
    metavar="DIR",
    shell_complete=complete_directories,
    help="The node's mount.",
)
@click.option("--node", envvar="NODE_NAME", metavar="NAME", help="The node's name; by default the machine's.")
@click.option("--driver-name", default=_DRIVER, show_default=True, metavar="NAME", help="The name of this driver.")
@click.option(
    "--kubelet-dir",
    default="/var/lib/kubelet",
    show_default=True,
    metavar="DIR",
    shell_complete=complete_directories,
    help="The directory of the kubelet. Volumes are below it.",
)
@click.option("--label-node", is_flag=True, help="Label the node with the models that its mount has.")
@click.option(
    "--account-dir",
    default="/var/run/secrets/kubernetes.io/serviceaccount",
    show_default=True,
    metavar="DIR",
    shell_complete=complete_directories,
    help="The service account that may label it.",
)
@address_option("--metrics", "Serve the counters of what failed by HTTP, for Prometheus.")
def command(
    endpoint: str,
    mountpoint: str,
    node: str | None,
    driver_name: str,
    kubelet_dir: str,
    label_node: bool,
    account_dir: str,
    metrics: tuple[str, int] | None,
) -> None:
    """Serve volumes of Kubernetes: models on this node's mount, read-only in pods.

    A pod names a source, and the plug-in puts it on the mount if it is not there:

    \b
      volumes:
      - name: model
        csi:
          driver: gpufs.dev
          readOnly: true
          volumeAttributes: {source: "hf://Qwen/Qwen3-8B", device: gpu0}

    The plug-in runs as root until SIGTERM, and mounts nothing itself: docs/containers.md has both.
    """
    path = endpoint.removeprefix("unix:").removeprefix("//")
    if not endpoint.startswith("unix:") or not os.path.isabs(path):
        raise Failure(f"--endpoint: {endpoint} is not unix://PATH with an absolute path", 2)
    for name, value in (("--mount", mountpoint), ("--kubelet-dir", kubelet_dir)):
        if not os.path.isabs(value):
            raise Failure(f"{name}: {value} is not an absolute path", 2)
    if not os.path.isdir(kubelet_dir):
        raise Failure(f"--kubelet-dir: {kubelet_dir} is not a directory of this machine")
    if os.geteuid() != 0:
        raise Failure("gpufs csi binds directories into pods, which needs root")
    try:
        from gpufs.csi.labels import NodeLabels
        from gpufs.csi.server import Options, serve
    except ModuleNotFoundError:
        python = shlex.quote(sys.executable)
        raise Failure(f"gpufs csi needs grpcio and protobuf: {python} -m pip install grpcio protobuf") from None
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    node = node or os.uname().nodename
    labels = None
    if label_node:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        if not host:
            raise Failure("--label-node needs the Kubernetes API: KUBERNETES_SERVICE_HOST is not set")
        labels = NodeLabels(node, f"{f'[{host}]' if ':' in host else host}:{port or 443}", account_dir)
    state = os.path.join(kubelet_dir, "plugins", driver_name, "state")
    options = Options(path, mountpoint, node, driver_name, kubelet_dir, state, labels, metrics)
    try:
        serve(options, lambda: complain(f"serving {driver_name} at {path}"))
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise Failure(f"{named}{error.strerror or error}") from None
    logging.shutdown()
    os._exit(0)  # without the threads, which may wait for a mount that does not answer
