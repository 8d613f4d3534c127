"""deploy/: the manifests fit the program and each other. With Helm and the schemas of Kubernetes they are checked."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from support.processes import run

from gpufs.cli._main import program

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/gpufs"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
RENDER: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/render-chart"))
# Values that use all of the chart.
ALL = {
    "mount": {"options": ["--trust-readers"], "resources": {"limits": {"memory": "4Gi"}}},
    "csi": {
        "labelNode": True,
        "env": [{"name": "HF_ENDPOINT", "value": "http://hub"}],
        "serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"},
    },
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "podLabels": {"team": "serving"},
    "podAnnotations": {"sidecar.istio.io/inject": "false"},
    "imagePullSecrets": [{"name": "registry"}],
    "metrics": {"podMonitor": True, "alerts": True, "dashboard": True, "labels": {"release": "prometheus"}},
}
# What platforms set.
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": ALL,
    "mounted by the host": {"mount": {"by": "host"}},
    "no volumes": {"csi": {"enabled": False}},
    "no volumes, but metrics": {"csi": {"enabled": False}, "metrics": {"podMonitor": True, "alerts": True}},
    "no metrics": {"metrics": {"enabled": False, "podMonitor": True}},
    "every node": {"affinity": None, "tolerations": [], "priorityClassName": ""},
    "a pool of nodes": {
        "affinity": None,
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "AMD": {"mount": {"driver": "hip", "runtimeClassName": "", "options": ["--memory", "40G"]}},
    "another kubelet": {"csi": {"kubeletDir": "/var/lib/k0s/kubelet", "driverName": "models.example"}},
}
BAD: list[dict[str, Any]] = [
    {"mount": {"by": "pod"}},
    {"mount": {"path": "/mnt"}},
    {"mount": {"path": "relative/path"}},
    {"mount": {"driver": "rocm"}},
    {"csi": {"driverName": "-x"}},
    {"csi": {"labelnode": True}},
    {"metrics": {"port": 0}},
    {"podLabels": {"team": 1}},
    {"affinity": []},
    {"imagee": {}},
]


def manifests(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


def containers(found: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The containers of all pods, each with its pod."""
    for one in found:
        pod = one.get("spec", {}).get("template", {}).get("spec") or one.get("spec", {}).get("predictor")
        for container in pod["containers"] if pod else ():
            yield container, pod


def check_fits(found: list[dict[str, Any]]) -> None:
    """Each mount of a container has its volume, and each word for gpufs is a command or an option of it."""
    for container, pod in containers(found):
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        words = list(map(str, container.get("args", ())))
        if container["name"] == "mount":
            words = ["mount", *words]
        if container["name"] not in ("mount", "csi", "metrics"):
            continue
        command = program.get_command(click.Context(program), words[0])
        assert command is not None, words
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, words


def test_the_manifests_are_current() -> None:
    """scripts/render-chart has made them of this chart. They fit the program, and the plug-in's pod restarts alone."""
    text = (DEPLOY / "gpufs.yaml").read_text()
    assert text.splitlines()[1] == f"# {RENDER['digest']()}", "run scripts/render-chart"
    found = manifests(text)
    check_fits(found)
    sets = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "DaemonSet"}
    assert sets["gpufs-mount"]["updateStrategy"] == {"type": "OnDelete"}
    assert sets["gpufs-csi"]["updateStrategy"]["type"] == "RollingUpdate"
    (mount,) = sets["gpufs-mount"]["template"]["spec"]["containers"]
    assert "livenessProbe" not in mount  # it would take the models away


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples(path: Path) -> None:
    """Their volumes are of this driver, and have what docs/containers.md lists."""
    found = manifests(path.read_text())
    check_fits(found)
    (driver,) = [one for one in manifests((DEPLOY / "gpufs.yaml").read_text()) if one["kind"] == "CSIDriver"]
    known = [
        line.split("`")[1::2] for line in (ROOT / "docs/containers.md").read_text().splitlines() if line[:3] == "| `"
    ]
    names = {name for names in known for name in names}
    for _, pod in containers(found):
        (volume,) = pod["volumes"]
        assert volume["csi"]["driver"] == driver["metadata"]["name"]
        assert volume["csi"]["volumeAttributes"].keys() <= names
        assert all(isinstance(value, str) for value in volume["csi"]["volumeAttributes"].values())


# ---- with the packages of the extra `deploy` ----


def validate(found: list[dict[str, Any]]) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="scripts/check deploy installs it")
    for one in found:
        if one["apiVersion"].split("/")[0] not in ("monitoring.coreos.com", "serving.kserve.io"):  # not of Kubernetes
            schemas.validate(one, "1.37", strict=True)


@pytest.fixture(scope="module")
def chart() -> Any:
    return pytest.importorskip("helm_python", reason="scripts/check deploy installs it").Chart.load(str(CHART))


@pytest.mark.parametrize("name", VALUES)
def test_the_chart(chart: Any, name: str) -> None:
    """Helm renders it, and Kubernetes would take the result."""
    values = VALUES[name]
    chart.validate_schema(values)
    files = chart.render(values, name="one", namespace="here")
    found = manifests("\n---\n".join(text for path, text in files.items() if path.endswith(".yaml")))
    validate(found)
    check_fits(found)
    kinds = {one["kind"] for one in found}
    names = {one["metadata"]["name"] for one in found if one["kind"] == "DaemonSet"}
    assert ("one-mount" in names) == (values.get("mount", {}).get("by") != "host")
    assert ("one-csi" in names) == values.get("csi", {}).get("enabled", True)
    assert ("one-metrics" in names) == values.get("metrics", {}).get("enabled", True)
    for one in (one["spec"]["template"] for one in found if one["kind"] == "DaemonSet"):
        assert ("affinity" in one["spec"]) == ("affinity" not in values)
        assert one["metadata"]["labels"].items() >= values.get("podLabels", {}).items()
        assert all(
            container.get("resources") for container in one["spec"]["containers"] if container["name"] != "mount"
        )
    assert kinds.issuperset({"PodMonitor", "PrometheusRule", "ConfigMap", "ClusterRole"}) == (values == ALL)
    if values == ALL:
        (dashboard,) = [one["data"]["gpufs.json"] for one in found if one["kind"] == "ConfigMap"]
        assert yaml.safe_load(dashboard) == yaml.safe_load((ROOT / "docs/grafana-dashboard.json").read_text())


@pytest.mark.parametrize("values", BAD, ids=str)
def test_wrong_values(chart: Any, values: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="at '"):
        chart.validate_schema(values)


def test_the_manifests_by_helm(chart: Any) -> None:
    text = (DEPLOY / "gpufs.yaml").read_text()
    assert text == RENDER["rendered"]()
    validate(manifests(text))
    for path in EXAMPLES:
        validate(manifests(path.read_text()))


def test_the_dockerfile() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("scripts/check deploy installs hadolint")
    run(linter, DEPLOY / "Dockerfile")
