"""The messages of the Container Storage Interface (CSI), version 1, that this plug-in exchanges with the kubelet.

A table says their fields, and protobuf makes classes of it when this module is imported: nothing has to be generated
by a compiler. An enumeration is a number here, as it is on the wire. Fields that are missing are ignored in requests.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

PACKAGE: Final = "csi.v1"
# Each message with its fields, by number, name and type; a type that is not a scalar is the name of a message.
_MESSAGES: Final[dict[str, tuple[tuple[int, str, str], ...]]] = {
    "GetPluginInfoRequest": (),
    "GetPluginInfoResponse": ((1, "name", "string"), (2, "vendor_version", "string")),
    "GetPluginCapabilitiesRequest": (),
    "GetPluginCapabilitiesResponse": (),  # none: there is no controller
    "ProbeRequest": (),
    "ProbeResponse": ((1, "ready", ".google.protobuf.BoolValue"),),
    "NodeGetInfoRequest": (),
    "NodeGetInfoResponse": ((1, "node_id", "string"),),
    "NodeGetCapabilitiesRequest": (),
    "NodeGetCapabilitiesResponse": (),  # none: nothing is staged, expanded or measured
    "BlockVolume": (),
    "MountVolume": ((2, "mount_flags", "strings"),),
    "AccessMode": ((1, "mode", "int32"),),
    "VolumeCapability": ((1, "block", "BlockVolume"), (2, "mount", "MountVolume"), (3, "access_mode", "AccessMode")),
    "NodePublishVolumeRequest": (
        (1, "volume_id", "string"),
        (4, "target_path", "string"),
        (5, "volume_capability", "VolumeCapability"),
        (7, "secrets", "map"),
        (8, "volume_context", "map"),
    ),
    "NodePublishVolumeResponse": (),
    "NodeUnpublishVolumeRequest": ((1, "volume_id", "string"), (2, "target_path", "string")),
    "NodeUnpublishVolumeResponse": (),
}
# Each service: its calls. The messages of a call are CALLRequest and CALLResponse.
SERVICES: Final = {
    "Identity": ("GetPluginInfo", "GetPluginCapabilities", "Probe"),
    "Node": ("NodePublishVolume", "NodeUnpublishVolume", "NodeGetCapabilities", "NodeGetInfo"),
}


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if kind in ("map", "strings") else field.LABEL_OPTIONAL
    if kind == "map":  # of strings
        entry = message.nested_type.add(name="".join(word.title() for word in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", "string")
        field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"
    elif kind in ("string", "strings", "int32"):
        field.type = field.TYPE_INT32 if kind == "int32" else field.TYPE_STRING
    else:
        field.type = field.TYPE_MESSAGE
        field.type_name = kind if kind.startswith(".") else f".{PACKAGE}.{kind}"


def _classes() -> dict[str, Any]:
    # A pool of its own: a program may have loaded the generated messages of the same names.
    pool = descriptor_pool.DescriptorPool()
    wrappers = descriptor_pb2.FileDescriptorProto()
    wrappers_pb2.DESCRIPTOR.CopyToProto(wrappers)
    pool.Add(wrappers)
    file = descriptor_pb2.FileDescriptorProto(name="csi.proto", package=PACKAGE, syntax="proto3")
    file.dependency.append(wrappers.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, *field)
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


CLASSES: Final = _classes()
