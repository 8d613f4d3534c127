"""The drivers by name: what their devices are called, and how the kernel, users and DLPack name them."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Driver:
    """Facts about a driver that need not open it."""

    devices: str  # its devices, for people
    dlpack: int  # DLPack's kind of their memory
    # Further kinds of DLPack whose memory belongs to this driver: pinned and managed memory.
    dlpack_reachable: tuple[int, ...] = ()
    kernel_device: str = ""  # the file by which the kernel shows such a device; empty for host memory
    hiding: tuple[str, ...] = ()  # variables by which users hide devices from programs
    libraries: tuple[str, ...] = ()  # the names of the vendor's library, the newest first
    prefix: str = ""  # what the names of its functions begin with
    # Streams that a consumer of DLPack may not name, by the array API standard: 0 is ambiguous in CUDA, 1 and 2 exist
    # only there.
    reserved_streams: tuple[int, ...] = ()


HOST: Final = "host"
# What the names of devices' directories begin with, in the root of a mount.
DEVICE_DIRECTORIES: Final = ("gpu", "host")
# `--driver auto` tries them in this order.
DRIVERS: Final = {
    "cuda": Driver(
        "NVIDIA GPUs",
        dlpack=2,
        dlpack_reachable=(13,),
        kernel_device="/dev/nvidiactl",
        hiding=("CUDA_VISIBLE_DEVICES",),
        libraries=("libcuda.so.1",),
        prefix="cu",
        reserved_streams=(0,),
    ),
    "hip": Driver(
        "AMD GPUs",
        dlpack=10,
        kernel_device="/dev/kfd",
        hiding=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        libraries=(*(f"libamdhip64.so.{version}" for version in (8, 7, 6, 5)), "libamdhip64.so"),
        prefix="hip",
        reserved_streams=(1, 2),
    ),
    HOST: Driver("host memory", dlpack=1, dlpack_reachable=(3, 11)),
}
DRIVER_OF_DLPACK: Final = {
    kind: name for name, driver in DRIVERS.items() for kind in (driver.dlpack, *driver.dlpack_reachable)
}
