"""`gpufs csi`: models as volumes of pods, called by a real gRPC client over the plug-in's socket."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("grpc")

from support.cli import fails, gpufs, user_gpufs
from support.csi import (
    BLOCK,
    MOUNT,
    WRITER,
    ApiServer,
    Kubelet,
    Refused,
    at_once,
    field,
    fields,
    pod_words,
    unless_it_dies,
)
from support.data import KIB, MIB, assert_same, noise
from support.processes import NOBODY, run, wait_until
from support.stores import Model, WebServer, web_server
from support.surviving import Survivor, mounted

from gpufs.mounting import listed

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="binds directories, which takes root")]

WEIGHTS = noise(3 * MIB + 5)
FILES = {"config.json": b"{}", "weights.safetensors": WEIGHTS, "deep/a b.txt": b"text"}


class Node(NamedTuple):
    """A node: its mount, its plug-in, and the Hub that it reaches."""

    mount: Survivor
    kubelet: Kubelet
    hub: WebServer

    def models(self) -> list[str]:
        """The directories of models on gpu0, complete or not."""
        folder = self.mount.device / "csi"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def used(self) -> int:
        return int(self.mount.report()["devices"][0]["held_bytes"])

    def is_clean(self) -> bool:
        """Whether nothing of any volume is left."""
        return not (self.kubelet.bound() or self.models() or self.used())


@pytest.fixture(scope="module")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    with web_server() as hub, mounted(folder / "mnt", "--allow-other", memory="32M") as mount:
        names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE")
        environment = {**dict.fromkeys(names, ""), "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "cache")}
        with Kubelet(folder, mount.path, environment) as kubelet:
            yield Node(mount, kubelet, hub)


@pytest.fixture
def node(request: pytest.FixtureRequest, _node: Node) -> Iterator[Node]:
    """A node, on which each test leaves nothing."""
    hub, failures = _node.hub, request.session.testsfailed
    hub.models.clear()
    hub.requests.clear()
    hub.models["org/model"] = Model(dict(FILES), lfs=("weights.safetensors",))
    yield _node
    if request.session.testsfailed == failures:
        wait_until(_node.is_clean, 10, "the end of all volumes")
        assert b"Traceback" not in _node.kubelet.log.read_bytes()
    else:
        _node.kubelet.unpublish_all()


def refused(code: str, action: partial[Any]) -> str:
    with pytest.raises(Refused) as caught:
        action()
    assert caught.value.code == code, caught.value
    return str(caught.value)


def check(path: Path) -> None:
    for name, data in FILES.items():
        assert_same((path / name).read_bytes(), data)


def test_a_pod_attaches(node: Node, open_directory: Path) -> None:
    """It sees the model read-only, and uses it in place, with the volume alone, also after the daemon has died."""
    kubelet = node.kubelet
    volume = kubelet.publish("v1", device="gpu0", mode="r")
    check(volume)
    with pytest.raises(OSError, match="Read-only"):
        (volume / "config.json").write_bytes(b"x")
    with pytest.raises(OSError, match="Read-only"):
        (volume / ".gpufs/run/x").touch()
    assert os.listdir(volume / ".gpufs/run") == ["socket"]  # and nothing of other mounts
    command, environment = user_gpufs({})
    script = """
import gpufs, hashlib, os
data = os.environ["DATA"]
assert not os.path.exists("/run/gpufs")
with gpufs.attach(f"{data}/weights.safetensors") as array:
    print(hashlib.sha256(array.memoryview()).hexdigest(), array.private)
"""
    words = pod_words(volume, node.mount.path, open_directory, NOBODY, command[0], "-c", script)
    expected = run("sha256sum", node.mount.device / "csi" / node.models()[0] / "weights.safetensors").stdout.split()[0]
    for _ in range(2):
        assert run(*words, env={**os.environ, **environment}).stdout.split() == [expected, "False"]
        node.mount.kill()
    kubelet.unpublish("v1")
    assert not volume.exists()


def test_volumes_share_a_model(node: Node) -> None:
    """It is fetched once, also for pods that start at once, and goes with the last one."""
    kubelet = node.kubelet
    actions = [partial(kubelet.publish, f"v{number}") for number in range(3)]
    volumes = at_once(*actions)
    for volume in volumes:
        check(volume)
    requests = node.hub.requested("/blobs/org/model/weights.safetensors")
    assert requests == [(0, len(WEIGHTS))]
    assert kubelet.publish("v0") == volumes[0]  # the same again
    assert len(kubelet.bound()) == 3 * 3
    for number in range(2):
        kubelet.unpublish(f"v{number}")
        kubelet.unpublish(f"v{number}")
    check(volumes[2])
    assert node.used() >= len(WEIGHTS)
    kubelet.unpublish("v2")
    assert node.is_clean()
    # One that stays, which the next volume finds.
    kubelet.publish("v3", keep="true")
    kubelet.unpublish("v3")
    node.hub.requests.clear()
    kubelet.end(signal.SIGKILL)
    kubelet.start()
    check(kubelet.publish("v4"))
    kubelet.unpublish("v4")
    (name,) = node.models()
    assert not node.hub.requests
    kubelet.end()  # also in order
    kubelet.start()
    assert node.models() == [name]
    shutil.rmtree(node.mount.device / "csi" / name)


def test_a_plugin_that_is_started_again(node: Node) -> None:
    """The kubelet's next call names the volume again. Models that pods use stay, and go with the last of them."""
    kubelet = node.kubelet
    first = kubelet.publish("v1")
    (shown,) = node.models()
    kubelet.publish("v2", include="*.json", keep="true")
    kubelet.unpublish("v2")
    gone = kubelet.publish("v3", exclude="deep")
    kubelet.end(signal.SIGKILL)
    run("umount", first / ".gpufs/run")  # as of a plug-in that was killed while it bound the volume
    kubelet.start()
    kubelet.unpublish("v3")  # which it does not know
    assert not gone.exists()
    assert len(node.models()) == 2
    node.hub.requests.clear()
    check(kubelet.publish("v4"))
    kubelet.unpublish("v4")
    check(first)
    assert kubelet.publish("v1") == first
    assert not node.hub.requests  # the model is the same
    assert len(kubelet.bound()) == 3
    refused("ALREADY_EXISTS", partial(kubelet.publish, "v1", exclude="deep"))
    run("umount", "-R", "-l", first)  # which it repairs
    wait_until(partial(os.path.isfile, first / "config.json"), 10, "the volume")
    kubelet.unpublish("v1")
    (name,) = node.models()
    assert name != shown
    shutil.rmtree(node.mount.device / "csi" / name)


def test_no_volume_without_its_model(node: Node, tmp_path: Path) -> None:
    """Where files of a model are missing, it is fetched again, also for pods that show it. There is no empty volume."""
    kubelet, folder = node.kubelet, node.mount.device / "csi"
    first = kubelet.publish("v1")
    (name,) = node.models()
    run("rm", "-rf", folder / name, check=False)  # what is bound in it stays
    second = kubelet.publish("v2")
    check(second)
    wait_until(partial(os.path.isfile, first / "config.json"), 10, "the model in the other pod")
    check(first)
    (folder / name / "weights.safetensors").write_bytes(b"half")
    assert kubelet.publish("v2") == second
    for volume in (first, second):
        whole = partial(lambda path: path.stat().st_size > 4, volume / "weights.safetensors")
        wait_until(whole, 10, "all of the model")
        check(volume)
    refused("NOT_FOUND", partial(kubelet.publish, "v3", include="*.gguf"))
    # Another plug-in on the mount leaves all of that alone, and has a copy of its own.
    environment = {"HF_ENDPOINT": node.hub.url, "HF_HOME": str(tmp_path)}
    with Kubelet(tmp_path, node.mount.path, environment) as other:
        check(other.publish("v1"))
        assert len([name for name in node.models() if not name.startswith(".")]) == 2
        other.unpublish("v1")
    check(first)
    kubelet.unpublish("v1")
    kubelet.unpublish("v2")
    # What was shown when it should have gone goes now, at the latest when the plug-in starts.
    kubelet.end()
    kubelet.start()


def test_another_users_directory_of_models(tmp_path: Path, node: Node) -> None:
    """It refuses volumes, also for what the mount's owner shows there. Nobody else enters the one that it makes."""
    precious = tmp_path / "precious"
    (precious / "below").mkdir(parents=True)
    forged = "mkdir -p csi/x/.gpufs; echo hf://org/model >csi/x/.gpufs/source; touch csi/x/.gpufs/keep"
    options = ["--allow-other", "--host-memory", "8M", "--backing", f"csi={precious}"]
    environment = {"HF_ENDPOINT": node.hub.url, "HF_HOME": str(tmp_path / "hub")}
    with mounted(tmp_path / "mnt", *options, memory="32M") as mount:
        (mount.path / "host0").joinpath("csi").symlink_to(precious)
        for before in (f"ln -s {precious} csi", forged):
            run("setpriv", "--reuid", str(NOBODY), "--clear-groups", "sh", "-c", before, cwd=mount.device)
            with Kubelet(Path(tempfile.mkdtemp(dir=tmp_path)), mount.path, environment) as kubelet:
                name = mount.device / "csi"
                assert str(name) in refused("UNAVAILABLE", partial(kubelet.publish, "v1"))
                assert name.lstat().st_uid == NOBODY
                run("rm", "-r", name)
                check(kubelet.publish("v1"))
                kubelet.unpublish("v1")
                assert (stat.filemode(name.lstat().st_mode), name.lstat().st_uid) == ("drwx------", 0)
                name.rmdir()
        assert os.listdir(precious) == ["below"]
        # One of an administrator, who has limited it, is used, and closed.
        (mount.device / "csi").mkdir(0o755)
        with Kubelet(tmp_path, mount.path, environment) as kubelet:
            check(kubelet.publish("v1"))
            assert stat.filemode((mount.device / "csi").stat().st_mode) == "drwx------"
            kubelet.unpublish("v1")
            # It ends also when nothing is left of what it works with.
            gpufs("umount", "--force", mount.path)
            shutil.rmtree(kubelet.directory)
            kubelet.end()
        gpufs("mount", mount.path, "--driver", "host", "--memory", "32M")


def test_some_files(node: Node) -> None:
    volume = node.kubelet.publish("v1", include="*.json, *.txt", exclude="deep")
    assert [path.name for path in volume.iterdir() if path.name != ".gpufs"] == ["config.json"]
    node.kubelet.unpublish("v1")


def test_what_csi_asks(node: Node) -> None:
    """The answers that csi-sanity checks."""
    call, publish, unpublish = node.kubelet.call, node.kubelet.publish, node.kubelet.unpublish
    info = fields(call("Identity", "GetPluginInfo", b""))
    assert (info[1], bool(info[2])) == (b"gpufs.dev", True)
    assert call("Identity", "GetPluginCapabilities", b"") == b""
    assert call("Identity", "Probe", b"") == field(1, b"\x08\x01")
    assert call("Node", "NodeGetCapabilities", b"") == b""
    assert fields(call("Node", "NodeGetInfo", b"")) == {1: b"node-1"}
    for name in ("NodeStageVolume", "NodeExpandVolume", "NodeGetVolumeStats"):
        refused("UNIMPLEMENTED", partial(call, "Node", name, b""))
    refused("INVALID_ARGUMENT", partial(publish, ""))
    refused("INVALID_ARGUMENT", partial(publish, "v1", target=""))
    refused("INVALID_ARGUMENT", partial(publish, "v1", capability=None))
    refused("INVALID_ARGUMENT", partial(publish, "v1", capability=BLOCK + WRITER))
    refused("INVALID_ARGUMENT", partial(publish, "v1", capability=MOUNT))
    refused("INVALID_ARGUMENT", partial(unpublish, ""))
    refused("INVALID_ARGUMENT", partial(unpublish, "v1", target=""))
    unpublish("v1")  # there is none
    volume = publish("v1")
    refused("ALREADY_EXISTS", partial(publish, "v1", exclude="deep"))
    refused("FAILED_PRECONDITION", partial(publish, "v1", target=node.kubelet.target("v2")))
    refused("FAILED_PRECONDITION", partial(publish, "v2", target=volume))
    unpublish("v2", target=volume)  # is not there
    check(volume)
    unpublish("v1")


def test_hostile_requests(node: Node, tmp_path: Path) -> None:
    """None of them reaches a file of the node, and each gets a reason."""
    kubelet, outside = node.kubelet, tmp_path / "outside/deeper"
    outside.mkdir(parents=True)
    publish, inside = kubelet.publish, kubelet.directory
    sources = ["", "/etc", "file:///etc", "./x", "--help", "http://127.0.0.1/x", "hf://", "hf://org", "hf://org/../x"]
    sources += ["s3://", "hf://org/model/../../x", "hf://-o/--delete\n", "hf://org/*"]
    for source in sources:
        refused("INVALID_ARGUMENT", partial(publish, "v1", source))
    for device in ("", "gpu", "gpu0/..", "../gpu0", "backing", ".gpufs", "gpu1", "gpu99999", "--help"):
        refused("INVALID_ARGUMENT", partial(publish, "v1", device=device))
    attributes: list[dict[str, Any]] = [{"mode": "rw"}, {"keep": "yes"}, {"sourse": "x"}, {"exclude": "x" * 5000}]
    for attribute in attributes:
        refused("INVALID_ARGUMENT", partial(publish, "v1", **attribute))
    for secrets in ({"LD_PRELOAD": "/x"}, {"AWS_CONFIG_FILE": "/x"}, {"HF_ENDPOINT": "http://x"}, {"HF_TOKEN": "\0"}):
        refused("INVALID_ARGUMENT", partial(publish, "v1", secrets=secrets))
    refused("INVALID_ARGUMENT", partial(publish, "v1", secrets={"AWS_ENDPOINT_URL": "http://x"}))
    refused("INVALID_ARGUMENT", partial(publish, "v1", capability=MOUNT[:1] + field(2, field(2, "dev"))[1:] + WRITER))
    refused("INVALID_ARGUMENT", partial(publish, "v" * 129))
    refused("INVALID_ARGUMENT", partial(publish, "v\n1"))
    refused("RESOURCE_EXHAUSTED", partial(publish, "v1", secrets={"HF_TOKEN": "x" * 4 * MIB}))
    targets = ["relative", "/", "/etc/x", inside, f"{inside}/pods", f"{inside}/../x/y", f"{inside}/pods/../../x"]
    targets += [f"{inside}/pods//x", f"{outside}/x", f"{inside}/pods/./x", f"{inside}/pods/x/", f"{inside}x/pods/x"]
    for target in targets:
        refused("INVALID_ARGUMENT", partial(publish, "v1", target=target))
        refused("INVALID_ARGUMENT", partial(kubelet.unpublish, "v1", target=target))
    refused("FAILED_PRECONDITION", partial(publish, "v1", target=f"{inside}/pods/none/mount"))
    link = inside / "pods/link"
    link.symlink_to(outside)
    for target in (link / "mount", link):
        with pytest.raises(Refused):
            publish("v1", target=target)
    kubelet.unpublish("v1", target=link / "mount")
    link.unlink()
    # What is there already is neither hidden nor removed.
    target = kubelet.target("v1")
    target.mkdir()
    (target / "file").touch()
    with pytest.raises(Refused):
        publish("v1")
    (target / "file").unlink()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(target)], check=True)
    try:
        refused("FAILED_PRECONDITION", partial(publish, "v1"))
        refused("FAILED_PRECONDITION", partial(kubelet.unpublish, "v1"))
    finally:
        subprocess.run(["umount", str(target)], check=True)
    assert not any(outside.iterdir())
    assert "include" in refused("INVALID_ARGUMENT", partial(publish, "v1", "hf://org/model/config.json"))
    # Files of the source with the names that the volume needs.
    node.hub.models["org/odd"] = Model({"config.json": b"{}", ".gpufs/socket": b"x", ".gpufs/run": b"x"})
    volume = publish("v1", "hf://org/odd")
    assert (volume / ".gpufs/socket").read_bytes().startswith(b"/run/gpufs/")
    kubelet.unpublish("v1")


def test_credentials(node: Node) -> None:
    """They are used for their own volume alone, and are in no file, argument, environment or log."""
    kubelet, hub = node.kubelet, node.hub
    hub.models["org/locked"] = Model({"weights.safetensors": WEIGHTS}, token="hf_right")
    publish = partial(kubelet.publish, source="hf://org/locked")
    assert "conditions" in refused("PERMISSION_DENIED", partial(publish, "v1"))
    refused("PERMISSION_DENIED", partial(publish, "v1", secrets={"token": "hf_wrong"}))
    assert node.is_clean()
    seen = []
    hub.held = 0
    hub.released.clear()
    with_token = partial(publish, "v1", secrets={"token": "hf_right"})

    def look() -> None:
        """Look at the process that fetches, while the Hub does not send anything."""
        wait_until(lambda: hub.requested("/blobs/org/locked/weights.safetensors"), 30, "the fetch")
        for process in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                with suppress(OSError), open(process / name, "rb") as file:  # it may have ended
                    seen.append(file.read())

    def look_and_release() -> None:
        try:
            look()
        finally:
            hub.held = None
            hub.released.set()

    volume, failure = at_once(with_token, look_and_release)
    assert failure is None, failure
    assert any(b"gpufs.csi.fetch" in words for words in seen)
    assert_same((volume / "weights.safetensors").read_bytes(), WEIGHTS)
    seen += [
        path.read_bytes() for path in kubelet.directory.rglob("*") if path.is_file() and volume not in path.parents
    ]
    assert not any(b"hf_right" in words for words in (*seen, kubelet.log.read_bytes()))
    # A pod without the token does not get what another one's has fetched.
    refused("PERMISSION_DENIED", partial(publish, "v2"))
    check_again = publish("v3", secrets={"token": "hf_right"})
    assert len(node.models()) == 1
    # A token that has changed since changes nothing of a volume that is there.
    assert publish("v3", secrets={"token": "hf_new"}) == check_again
    for name in ("v1", "v2", "v3"):
        kubelet.unpublish(name)


def test_a_full_device(node: Node) -> None:
    """It is refused with the figures, and nothing of it stays."""
    node.hub.models["org/large"] = Model({f"{number}.safetensors": noise(9 * MIB) for number in range(4)})
    assert "MiB" in refused("RESOURCE_EXHAUSTED", partial(node.kubelet.publish, "v1", "hf://org/large"))
    assert node.used() == 0
    node.kubelet.unpublish("v1")
    gpufs("quota", "set", node.mount.device / "csi", "2M")
    refused("RESOURCE_EXHAUSTED", partial(node.kubelet.publish, "v1"))
    gpufs("quota", "remove", node.mount.device / "csi")
    assert node.used() == 0
    node.kubelet.unpublish("v1")


def test_a_slow_source(node: Node) -> None:
    """The kubelet learns how far it is before its own time is over. The end of the pod ends the fetch."""
    kubelet, hub = node.kubelet, node.hub
    hub.held = 0
    hub.released.clear()
    try:
        assert "is being fetched" in refused("ABORTED", partial(kubelet.publish, "v1", seconds=4))
        assert any(name.startswith(".partial-") for name in node.models())
        kubelet.unpublish("v1")
        assert node.is_clean()
    finally:
        hub.held = None
        hub.released.set()


def test_a_mount_that_is_replaced(node: Node) -> None:
    """Pods get the new one, without a call. While there is none, calls are refused for now."""
    kubelet, path = node.kubelet, node.mount.path
    volume = kubelet.publish("v1")
    gone = kubelet.publish("v2")
    before = {entry.device for entry in listed() if entry.mountpoint == str(volume)}
    gpufs("umount", "--force", path)
    refused("UNAVAILABLE", partial(kubelet.publish, "v3"))
    kubelet.unpublish("v3")
    # The kubelet was stopped while a pod ended: it has removed its directory without a call.
    for place in kubelet.bound():
        if place.startswith(f"{gone}"):
            subprocess.run(["umount", "-l", place], check=False, capture_output=True)
    shutil.rmtree(kubelet.directory / "pods/uid-v2")
    words = ["--driver", "host", "--memory", "32M", "--devices", "1", "--allow-other"]
    gpufs("mount", path, *words, "--log-file", path.with_name("log"))

    def shows() -> bool:
        devices = {entry.device for entry in listed() if entry.mountpoint == str(volume)}
        return bool(devices) and devices != before and (volume / "config.json").is_file()

    wait_until(shows, 30, "the volume on the new mount")
    check(volume)
    kubelet.unpublish("v1")  # the model goes: the pod of the other volume is gone


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_kills(node: Node, kills: int) -> None:
    """Plug-in and daemon are killed at any moment, while pods come and go: no volume is lost, and none is left."""
    kubelet, hub, chooser = node.kubelet, node.hub, random.Random(kills)
    # Several pieces, so that kills come in the middle.
    for number in range(2):
        hub.models[f"org/m{number}"] = Model({f"{part}.bin": noise(400 * KIB) for part in range(6)})
    pods: dict[str, str] = {}
    for count in range(kills):
        name = f"v{count}"
        if len(pods) > 3 or (pods and chooser.random() < 0.4):
            name = chooser.choice(sorted(pods))
            action: partial[Any] = partial(kubelet.unpublish, name)
            del pods[name]
        else:
            pods[name] = f"org/m{chooser.randrange(2)}"
            action = partial(kubelet.publish, name, f"hf://{pods[name]}")
        delay, kill_daemon = chooser.choice([0.0, 0.05, chooser.random() * 1.5]), chooser.random() < 0.4

        def kill(delay: float = delay, kill_daemon: bool = kill_daemon) -> None:
            time.sleep(delay)
            if kill_daemon:
                node.mount.kill()
            else:
                kubelet.end(signal.SIGKILL)
                kubelet.start()

        failures = [one for one in at_once(partial(unless_it_dies, action), kill) if isinstance(one, Exception)]
        assert not failures, failures
        kubelet.until(action)
        for pod, model in pods.items():
            for file, data in hub.models[model].files.items():
                assert (kubelet.target(pod) / file).read_bytes() == data, (count, pod, file)
        assert len(kubelet.bound()) == 3 * len(pods)
    for pod in pods:
        kubelet.until(partial(kubelet.unpublish, pod))
    wait_until(node.is_clean, 70, "the end of all volumes")


def test_labels_of_the_node(node: Node, tmp_path: Path) -> None:
    """The node has a label for each model while it is there; those of others stay. By a stand-in for the API."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    (tmp_path / "account").mkdir()
    environment = {"HF_ENDPOINT": node.hub.url, "HF_HOME": str(tmp_path)}
    options = ("--label-node", "--account-dir", str(tmp_path / "account"))
    other = {"kubernetes.io/hostname": "node-1"}
    node.hub.models["org/" + "x" * 80] = Model({"a": b"a"})
    with (
        ApiServer(tmp_path / "account") as api,
        Kubelet(tmp_path, node.mount.path, environment | api.environment, *options) as kubelet,
    ):
        wait_until(lambda: api.labels == other, 20, "the end of a label that is not true")
        kubelet.publish("v1")
        kubelet.publish("v2", "hf://org/" + "x" * 80)
        wait_until(lambda: api.labels.get("models.gpufs.dev/org--model") == "gpu0", 20, "the label")
        wait_until(lambda: len(api.labels) == 3, 20, "the other label")
        assert all(len(name.partition("/")[2]) <= 63 for name in api.labels)
        kubelet.unpublish("v1")
        kubelet.unpublish("v2")
        wait_until(lambda: api.labels == other, 20, "the end of the labels")
        assert api.patches <= 5  # not in each round
        assert b"account-token" not in kubelet.log.read_bytes()


def test_the_command(tmp_path: Path, node: Node) -> None:
    """Wrong options have one line, and a node has one plug-in."""
    assert "unix://" in fails(2, "csi", "--endpoint", "tcp://:1", "--kubelet-dir", tmp_path)
    assert "absolute" in fails(2, "csi", "--endpoint", "unix:///tmp/x", "--mount", "x")
    assert "not a directory" in fails(1, "csi", "--endpoint", "unix:///tmp/x", "--kubelet-dir", tmp_path / "none")
    far = f"unix://{tmp_path}/none/csi.sock"
    assert "csi.sock" in gpufs("csi", "--endpoint", far, "--kubelet-dir", tmp_path, check=False).stderr
    state = tmp_path / "plugins/gpufs.dev/state"
    state.chmod(0o777)
    assert str(state) in fails(1, "csi", "--endpoint", f"unix://{tmp_path}/s", "--kubelet-dir", tmp_path)
    program = "import sys; sys.modules['grpc'] = None; from gpufs.cli import main; main()"
    words = [sys.executable, "-c", program, "csi", "--kubelet-dir", str(tmp_path)]
    assert "grpcio" in run(*words, check=False).stderr
