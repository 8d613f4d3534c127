"""What a volume is: the attributes and secrets in the request for it, checked."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gpufs.csi.errors import CallError
from gpufs.stores import urls

_MOST_BYTES: Final = 128  # of an id, as CSI has it
_MOST_PATH_BYTES: Final = 4000
_MOST_ATTRIBUTE_BYTES: Final = 4096  # of all attributes
DEVICE: Final = re.compile(r"gpu[0-9]{1,4}", re.ASCII)
_KUBELETS: Final = "csi.storage.k8s.io/"  # the prefix of the attributes that the kubelet adds
_SCHEMES: Final = ("hf", "s3", "gs", "az")
_BOOLEANS: Final = {"true": True, "false": False}
_MODES: Final = range(1, 8)  # of access, as CSI numbers them
# The secrets that a fetch gets, as environment variables. None of them names a file, a command or a server to which the
# plug-in's own credentials could be sent.
SECRETS: Final = frozenset(
    (
        "HF_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_REGION AWS_ENDPOINT_URL "
        "AWS_SKIP_SIGNATURE AWS_VIRTUAL_HOSTED_STYLE_REQUEST GOOGLE_SERVICE_ACCOUNT_KEY GOOGLE_SKIP_SIGNATURE "
        "AZURE_STORAGE_ACCOUNT_NAME AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_SAS_TOKEN"
    ).split()
)


class Volume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A volume of a pod."""

    id: str  # the kubelet's name for it
    target: str  # the path at which the pod's containers find it
    # What is fetched, and the directory of the device that it is put on.
    source: str
    device: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keep: bool = False  # whether the model stays when no volume needs it
    credentials: str = ""  # identifies the secrets, "" without any. It does not show them.

    @property
    def model(self) -> Model:
        """The model that the volume shows."""
        return Model(self.source, self.device, self.include, self.exclude, self.credentials)


class Model(msgspec.Struct, frozen=True):
    """A model on a device. Volumes with the same source, files and credentials share it.

    Volumes with other credentials get another copy: the store decides which credentials may read a source.
    """

    source: str
    device: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    credentials: str = ""

    @property
    def name(self) -> str:
        """What its directory is called: readable, and different for all that differs."""
        digest = hashlib.sha256(msgspec.json.encode((self.source, self.include, self.exclude, self.credentials)))
        return f"{readable(self.source)[:80]}-{digest.hexdigest()[:16]}"


def readable(source: str) -> str:
    """Return a source as a part of a name: "hf://Qwen/Qwen3-8B" is "Qwen--Qwen3-8B"."""
    path = source.partition("://")[2].strip("/")
    return re.sub(r"[^A-Za-z0-9._-]", "_", path.replace("/", "--")).strip("._-") or "model"


def volume_of(request: Any, key: bytes) -> Volume:
    """Return the volume of a request to publish one. CallError INVALID_ARGUMENT for what is not possible.

    ``key``: of this node, by which secrets are identified.
    """
    check_names(request.volume_id, request.target_path)
    _check_capability(request)
    attributes = dict(request.volume_context)
    if sum(len(os.fsencode(word)) for item in attributes.items() for word in item) > _MOST_ATTRIBUTE_BYTES:
        raise _invalid(f"volumeAttributes: more than {_MOST_ATTRIBUTE_BYTES} bytes in all")
    chosen = {name: text for name, text in attributes.items() if not name.startswith(_KUBELETS)}
    unknown = chosen.keys() - {"source", "device", "mode", "keep", "include", "exclude"}
    if unknown:
        known = "source, device, mode, keep, include and exclude"
        raise _invalid(f"volumeAttributes: {min(unknown)!r} is not one of {known}")
    if (mode := chosen.get("mode", "r")) != "r":
        raise _invalid(f"volumeAttributes: mode is {mode!r}, and volumes are read-only: r")
    keep = chosen.get("keep", "false")
    if keep not in _BOOLEANS:
        raise _invalid(f'volumeAttributes: keep is {keep!r}, not "true" or "false"')
    device = chosen.get("device", "gpu0")
    if not DEVICE.fullmatch(device):
        raise _invalid(f"volumeAttributes: device is {device!r}, not the name of a device as gpu0")
    return Volume(
        request.volume_id,
        request.target_path,
        _source(chosen.get("source", "")),
        device,
        _patterns(chosen.get("include", "")),
        _patterns(chosen.get("exclude", "")),
        _BOOLEANS[keep],
        _identified(dict(request.secrets), key),
    )


def check_names(volume_id: str, target: str) -> None:
    """Raise CallError INVALID_ARGUMENT for the id of a volume or a path that cannot be one."""
    for what, text, most in (("volume_id", volume_id, _MOST_BYTES), ("target_path", target, _MOST_PATH_BYTES)):
        if not text:
            raise _invalid(f"{what} is missing")
        if len(text.encode()) > most:
            raise _invalid(f"{what} has more than {most} bytes")
        if any(ord(character) < 32 for character in text):
            raise _invalid(f"{what} has a control character")


def _check_capability(request: Any) -> None:
    if not request.HasField("volume_capability"):
        raise _invalid("volume_capability is missing")
    capability = request.volume_capability
    if capability.HasField("block"):
        raise _invalid("volume_capability: a volume is a directory, not a block device")
    if not capability.HasField("mount") or capability.access_mode.mode not in _MODES:
        raise _invalid("volume_capability: needs mount, and an access mode")
    if capability.mount.mount_flags:
        raise _invalid("mountOptions are not supported: volumes are read-only")


def _source(source: str) -> str:
    """Check the URL of a directory in a store. Nothing of the node may be named, nor any server."""
    if not source:
        raise _invalid("volumeAttributes: source is missing, for example hf://ORG/MODEL")
    try:
        url = urls.parse(source) if urls.is_url(source) else None
    except OSError as error:
        raise _invalid(f"volumeAttributes: source {source!r} {error.strerror}") from None
    if url is None or url.scheme not in _SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise _invalid(f"volumeAttributes: source is {source!r}, not a URL with one of {schemes}")
    if url.is_pattern:
        raise _invalid("volumeAttributes: source is a pattern: name a directory, and patterns in include")
    return source


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def _identified(secrets: Mapping[str, str], key: bytes) -> str:
    """Return what identifies secrets and does not show them, not even to a reader who guesses them."""
    # `token` is what other drivers call the Hub's.
    unknown = secrets.keys() - SECRETS - {"token"}
    if unknown:
        raise _invalid(f"the secret has {min(unknown)!r}, which is not one of {', '.join(sorted(SECRETS))}")
    if any("\0" in value for value in secrets.values()):
        raise _invalid("the secret has a zero byte")
    if "AWS_ENDPOINT_URL" in secrets and not {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & secrets.keys():
        raise _invalid("the secret has AWS_ENDPOINT_URL, which needs AWS_ACCESS_KEY_ID or AWS_SKIP_SIGNATURE beside it")
    if not secrets:
        return ""
    return hmac.new(key, json.dumps(environment_of(secrets), sort_keys=True).encode(), "sha256").hexdigest()


def environment_of(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return secrets as environment variables."""
    return {"HF_TOKEN" if name == "token" else name: value.strip() for name, value in secrets.items()}


def _invalid(text: str) -> CallError:
    return CallError("INVALID_ARGUMENT", text[:1000])
