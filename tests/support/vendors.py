"""Mounts over fakes of the vendors' file libraries, and the calls that the fakes recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.mounting import REPOSITORY, GpufsMount

BUILT = REPOSITORY / "build/cmake/native/tests"
WHOLE = 1 << 62  # as much as is asked for


@dataclass(frozen=True)
class Call:
    """A line of the records that the vendors' fakes write: what was called, on which file, and what it moved."""

    name: str
    path: str
    bytes: int
    offset: int
    moved: int


@dataclass(frozen=True)
class VendorMount:
    """A mount over a vendor's fake, with a directory of the host below backing/there."""

    mount: GpufsMount
    there: Path
    records: Path

    @property
    def shown(self) -> Path:
        return self.mount.path / "backing" / "there"

    def calls(self) -> list[Call]:
        """The fake's records, in order."""
        lines = self.records.read_text().splitlines() if self.records.exists() else []
        fields = [line.split() for line in lines]
        return [Call(f[0], f[1], int(f[2]), int(f[3]), int(f[4])) for f in fields]


def preloaded(library: Path, folder: Path) -> str:
    """The value of LD_PRELOAD for a library: a link below `folder`, since ld.so cuts the value at spaces."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / library.name
    if not link.is_symlink():
        link.symlink_to(library)
    return str(link)


def kernel_shows(root: Path, *paths: str) -> dict[str, str]:
    """The environment in which programs see files of these absolute paths, whatever the kernel here has."""
    for path in paths:
        there = root / path.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.touch()
    return {
        "LD_PRELOAD": preloaded(BUILT / "fake_kernel" / "libgpufs_fake_kernel.so", root),
        "FAKE_KERNEL_ROOT": str(root),
    }


class Cufile:
    """NVIDIA's cuFile."""

    driver, read, write = "cuda", "cuFileRead", "cuFileWrite"
    partial = False  # whether a call that fails may have moved something

    def answer(self, error: int = 0, count: int = WHOLE) -> str:
        """How a call ends, well or with this errno, and how many bytes it moves at most."""
        return f"{-1 if error else 0}:{error}:{count}"

    def environment(
        self, at: Path, plans: Sequence[str] = (), kernel: bool = True, library: bool = True, **more: str
    ) -> dict[str, str]:
        """The environment of a program over the fakes, whose files lie below `at`: the first calls end as planned.

        kernel: as if the vendor's part of the kernel were there. library: whether its own library for files is found.
        more: variables for it.
        """
        libraries = at / "libraries"
        libraries.mkdir(exist_ok=True)
        (libraries / "libcuda.so.1").symlink_to(BUILT / "fake_cuda" / "libgpufs_fake_cuda.so")
        if library:
            (libraries / "libcufile.so.0").symlink_to(BUILT / "fake_cufile/gpufs_fake_cufile/libcufile.so.0")
        module = ("/proc/driver/nvidia-fs/version", "/dev/nvidia-fs0") if kernel else ()
        return {
            **kernel_shows(at / "kernel", *module),
            "LD_LIBRARY_PATH": str(libraries),
            "FAKE_CUFILE_RECORDS": str(at / "records"),
            "FAKE_CUFILE_PLANS": ",".join(plans),
            **more,
        }


def kernel_shows_amd_gpus(root: Path, count: int, moves_files: bool) -> None:
    """What the kernel's driver for AMD writes about the GPUs of fake HIP; whether it is set up to move files."""
    for gpu in range(count):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{gpu + 1}/properties"
        node.parent.mkdir(parents=True, exist_ok=True)
        capability = 0x40 if moves_files else 0
        place = (0xC0 + gpu) << 8
        node.write_text(f"simd_count 304\ncapability {capability}\nlocation_id {place}\ndomain {0xFFFF}\n")
    cpu = root / "sys/class/kfd/kfd/topology/nodes/0/properties"
    cpu.parent.mkdir(parents=True, exist_ok=True)
    cpu.write_text("cpu_cores_count 8\nsimd_count 0\ncapability 0\n")


class HipFile:
    """AMD's hipAmdFileRead and hipAmdFileWrite."""

    driver, read, write = "hip", "hipAmdFileRead", "hipAmdFileWrite"
    partial = True
    unknown = 999  # hipErrorUnknown

    def answer(self, error: int = 0, count: int = WHOLE) -> str:
        return f"{self.unknown if error else 0}:{-error}:0:{count}"

    def environment(
        self, at: Path, plans: Sequence[str] = (), kernel: bool = True, library: bool = True, **more: str
    ) -> dict[str, str]:
        """moves_files="": the kernel's driver is there, and not set up to move files. HIP itself has the calls."""
        if kernel:
            kernel_shows_amd_gpus(
                at / "kernel", int(more.get("FAKE_HIP_DEVICES", "1")), bool(more.get("moves_files", "1"))
            )
        return {
            **kernel_shows(at / "kernel", *(["/dev/kfd"] if kernel else [])),
            "LD_LIBRARY_PATH": str(BUILT / "fake_hip" / "rocm7"),
            "FAKE_HIP_DEVICES": "1",
            "FAKE_HIP_RECORDS": str(at / "records"),
            "FAKE_HIP_FILE_PLANS": ",".join(plans),
            **{name: value for name, value in more.items() if name != "moves_files"},
        }


Vendor = Cufile | HipFile
CUFILE, HIP_FILE = Cufile(), HipFile()
