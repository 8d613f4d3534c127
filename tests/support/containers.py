"""Builds the image of deploy/Dockerfile by buildah, and runs containers of it by runc, without a daemon of an engine.

python -m support.containers ROOT FOLDER OPTIONS -- WORD...   runs a container with this root until its first process
ends. OPTIONS are JSON: {"privileged": BOOL, "binds": [[SOURCE, DESTINATION, PROPAGATION]]}. FOLDER is for runc's files.
Like `runc run`, it must not be killed alone: BIDIRECTIONAL of support.csi before it ends all of its processes with it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from support.mounting import REPOSITORY
from support.processes import run

UPGRADED: Final = "99.0"
_STORE: Final = REPOSITORY / "build/image"
_BASE: Final = "docker.io/library/python:3.12-slim-bookworm"
_PASSED: Final = ("HF_ENDPOINT", "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE")


def _buildah(*words: object) -> str:
    places = ["--root", _STORE / "store", "--runroot", _STORE / "run", "--storage-driver", "overlay"]
    return run("buildah", *map(str, places), *map(str, words), timeout=1200).stdout.strip()


@contextmanager
def image_roots() -> Iterator[tuple[Path, Path]]:
    """The file trees of containers of the image, and of one with the next version: UPGRADED.

    A Debian with its own Python stands for the image that they are based on.
    """
    base = _STORE / "base"
    if not base.exists():
        fresh = _STORE / "base.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        run("debootstrap", "--variant=minbase", "--include=python3-venv", "bookworm", fresh, timeout=1200)
        (fresh / "usr/bin/python").symlink_to("python3")
        fresh.rename(base)
    run(REPOSITORY / "scripts/wheel", timeout=1800)
    try:
        container = _buildah("from", "scratch")
        root = _buildah("mount", container)
        run("cp", "-a", f"{base}/.", root, timeout=600)
        if os.path.exists(certificates := os.environ.get("PIP_CERT", "")):
            shutil.copy(certificates, f"{root}/etc/registry.crt")
            _buildah("config", "--env", "PIP_CERT=/etc/registry.crt", container)
        _buildah("commit", "--rm", container, _BASE)
        dockerfile = REPOSITORY / "deploy/Dockerfile"
        _buildah("bud", "--pull-never", "--isolation", "chroot", "-f", dockerfile, "-t", "gpufs", REPOSITORY)
        first, second = (Path(_buildah("mount", _buildah("from", "localhost/gpufs"))) for _ in range(2))
        (version,) = second.glob("opt/gpufs/lib/python3*/site-packages/gpufs/_version.py")
        version.write_text(f'__version__ = "{UPGRADED}"\n')
        yield first, second
    finally:
        _buildah("rm", "--all")
        _buildah("rmi", "--all", "--force")


def remove_containers(folder: Path) -> None:
    """Remove what is left of the containers whose processes have ended."""
    for bundle in folder.glob("gpufs-test-*"):
        run("runc", "--root", folder / "runc", "delete", "--force", bundle.name, check=False)


def words_of(root: Path, folder: Path, privileged: bool, binds: Sequence[tuple[Path, str, str]]) -> list[str]:
    """The words before a command that run it in a container."""
    options = json.dumps({"privileged": privileged, "binds": [[str(source), *rest] for source, *rest in binds]})
    program = ["env", f"PYTHONPATH={REPOSITORY / 'tests'}", sys.executable, "-m", "support.containers"]
    return [*program, str(root), str(folder), options, "--"]


def _write_spec(path: Path, root: str, options: dict[str, Any], words: list[str]) -> None:
    """Write what runc(1) reads: a container as engines make it, on the network of this machine."""
    run("runc", "spec", cwd=path.parent)
    spec: dict[str, Any] = json.loads(path.read_bytes())
    process, linux = spec["process"], spec["linux"]
    spec["root"] = {"path": root, "readonly": False}
    passed = [f"{name}={os.environ[name]}" for name in _PASSED if name in os.environ]
    path_of_image = "PATH=/opt/gpufs/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    process |= {"terminal": False, "args": words, "env": [path_of_image, "PYTHONUNBUFFERED=1", *passed]}
    linux["namespaces"] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    for source, destination, propagation in options["binds"]:
        mount = {"source": source, "destination": destination, "type": "bind", "options": ["rbind", propagation]}
        spec["mounts"].append(mount)
    if options["privileged"]:
        (own,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line]
        names = [name for bit, name in enumerate(_CAPABILITIES) if int(own, 16) >> bit & 1]
        process["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), names)
        process["noNewPrivileges"] = False
        process["rlimits"] = []
        linux |= {"rootfsPropagation": "shared", "maskedPaths": [], "readonlyPaths": []}
        linux["resources"] = {"devices": [{"allow": True, "access": "rwm"}]}
        linux["devices"] = [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 0o666}]
        for mount in spec["mounts"]:
            mount["options"] = [each for each in mount.get("options", []) if each != "ro"]
    path.write_text(json.dumps(spec))


_CAPABILITIES: Final = [
    f"CAP_{name}"
    for name in (
        "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
        "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT "
        "SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL "
        "SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
    ).split()
]


if __name__ == "__main__":
    root, folder, text, _, *words = sys.argv[1:]
    bundle = Path(tempfile.mkdtemp(prefix="gpufs-test-", dir=folder))
    _write_spec(bundle / "config.json", root, json.loads(text), words)
    os.execvp("runc", ["runc", "--root", f"{folder}/runc", "run", "--bundle", str(bundle), bundle.name])
