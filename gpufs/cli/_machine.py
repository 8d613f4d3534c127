"""This machine as `gpufs doctor` sees it: its kernel, its limits, and what the drivers find."""

import functools
import gzip
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpufs import config, safe_path
from gpufs.cli import _answers, _mounts, _queries
from gpufs.mounting import MountEntry
from gpufs.syscalls import closed_after
from gpufs.units import bytes_text

_PROBE_SECONDS: Final = 30.0
_HOST_BYTES: Final = 64 << 20  # of an engine that only answers questions
_MOVES_FILES: Final = 0x40  # in "capability" of a GPU, as the amdgpu driver shows it
# Block devices through which the kernel may refuse to move bytes straight to a GPU, by their names.
_STACKED: Final[Mapping[str, str]] = {"dm-": "device mapper", "md": "software RAID", "loop": "loop device"}

# What each reason for a refusal means, and how to avoid it. The names are the engine's.
REFUSALS: Final[Mapping[str, tuple[str, str]]] = {
    "disabled": ("a knob switched it off", "see --io-fastpath"),
    "nothing_to_move": ("there is nothing to move", ""),
    "too_small": ("it has no whole alignment unit", "copy more at once"),
    "offset_unaligned": ("the offset in the file is not a multiple of the alignment", "begin at an aligned offset"),
    "size_unaligned": ("the size is not a multiple of the alignment", "the rest at the end goes by fallback: no harm"),
    "memory_unaligned": (
        "the device address and the file's offset are aligned differently",
        "use the same offset in both",
    ),
    "offset_range": ("the range ends beyond the largest offset", ""),
    "no_direct_descriptor": ("the file cannot be opened with O_DIRECT", "use a file system that has O_DIRECT"),
    "file_system": (
        "the fastpath serves ext4, xfs and block devices",
        "keep the file on one of them, or allow its file system by --io-file-systems if the vendor's library serves it",
    ),
    "mount_options": (
        "the fastpath cannot use this file system's mount options",
        "ext4: mount with data=ordered",
    ),
    "no_vendor_call": ("the vendor's library is missing or too old", "install libcufile (CUDA) or ROCm 7"),
    "no_gpudirect": ("the kernel lacks GPUDirect Storage", "install and load the module nvidia_fs"),
    "not_accepted": ("the vendor's library refused this file", "its own log says why"),
    "failed_before": ("it failed in the middle of a transfer", "the mount's log says why"),
    "memory_kind": (
        "the fastpath cannot reach this kind of memory: host memory, or ROCm's virtual memory",
        "AMD GPUs: mount with --hip-memory plain; programs: allocate the memory on the device",
    ),
    "no_kernel_support": (
        "the amdgpu driver cannot be opened, or is not set up to move files",
        (
            "allow this user to open /dev/kfd (groups render and video), use a kernel whose amdgpu moves files, "
            "enable large BARs (Resizable BAR) in the firmware; virtual functions (SR-IOV) never have it"
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ProbedDriver:
    """An opened driver. ``reason``: why it has no device; ``refusals``: why its fastpath refuses any file.

    ``causes``: for a refusal, what this machine lacks in particular, and the remedy.
    """

    name: str
    devices: Sequence[str] = ()
    reason: str = ""
    refusals: Sequence[str] = ()
    causes: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def explain(self, refusal: str) -> tuple[str, str]:
        """Return what a refusal means here, and how to avoid it."""
        return self.causes.get(refusal) or REFUSALS.get(refusal, ("", ""))


def _probe(what: Sequence[str]) -> dict[str, Any]:
    """Ask the engine about a "driver" by its name, or a file by its "path".

    In a process of its own: a vendor's library may hang, end the process, or stay loaded.
    """
    kind, name = what
    question = {"driver": _driver, "path": _path}[kind]
    (answer,) = _answers.ask([functools.partial(question, name)], str, _PROBE_SECONDS)
    return {"error": answer.strerror} if isinstance(answer, OSError) else dict(answer)


def _raises_rights(program: str) -> bool:
    """Return whether a program runs with more rights than its caller: set-user-id root, or file capabilities."""
    try:
        status = os.stat(program)
        if status.st_mode & stat.S_ISUID and status.st_uid == 0:
            return not os.statvfs(program).f_flag & os.ST_NOSUID
        return bool(os.getxattr(program, "security.capability"))
    except OSError:
        return False


@dataclass(slots=True)
class Environment:
    """A machine, as the checks see it. ``root`` is where /proc, /sys, /dev, /etc and /boot are found."""

    root: Path = Path("/")
    uid: int = field(default_factory=os.geteuid)
    release: str = field(default_factory=lambda: os.uname().release)
    which: Callable[[str], str | None] = shutil.which
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    access: Callable[[Path, int], bool] = os.access
    raises_rights: Callable[[str], bool] = _raises_rights
    mounts: Callable[[], Sequence[MountEntry]] = _mounts.chosen
    statuses: Callable[[Sequence[MountEntry]], list[dict[str, Any]]] = lambda entries: _queries.statuses(
        entries, str, config.STATUS_TIMEOUT.default
    )
    probe: Callable[[Sequence[str]], dict[str, Any]] = _probe

    def text(self, path: str) -> str | None:
        """Return the text of a file, None if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Return the number in a file, None if it cannot be read."""
        return config.numbers(self.root / path).get("")

    def driver(self, name: str) -> ProbedDriver:
        """Return the devices of a driver, and why its fastpath refuses any file."""
        probe = self.probe(["driver", name])
        refusals = probe.get("refusals", [])
        # If the kernel moves files for none of its GPUs, every call is refused, whatever memory it is given.
        if name == "hip" and self._moves_files() is False and "no_kernel_support" not in refusals:
            refusals = ["no_kernel_support", *(reason for reason in refusals if reason != "memory_kind")]
        cause = self._why_no_files_move() if name == "hip" else None
        causes = {"no_kernel_support": cause} if cause else {}
        return ProbedDriver(name, probe.get("devices", []), probe.get("error", ""), refusals, causes)

    def _amd_gpus(self) -> Iterator[tuple[str, bool]]:
        """Yield the PCI address of each GPU that amdgpu shows, and whether it is set up to move files for it."""
        for properties in self.root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
            facts = config.numbers(properties)
            if facts.get("simd_count", 0):  # 0 for a CPU
                place = facts.get("location_id", 0)
                address = f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
                yield address, bool(facts.get("capability", 0) & _MOVES_FILES)

    def _moves_files(self) -> bool | None:
        """Return whether amdgpu is set up to move files for one of its GPUs; None if it shows no GPU."""
        moving = [moves for _, moves in self._amd_gpus()]
        return any(moving) if moving else None

    def _why_no_files_move(self) -> tuple[str, str] | None:
        """Return why amdgpu moves files for none of its GPUs, and the remedy, as far as the kernel shows it."""
        addresses = [address for address, moves in self._amd_gpus() if not moves]
        if not addresses or self._moves_files():
            return None
        virtual = [name for name in addresses if (self.root / f"sys/bus/pci/devices/{name}/physfn").exists()]
        if virtual:
            text = f"{', '.join(virtual)}: a virtual function (SR-IOV), for which amdgpu never moves files"
            return text, "use the whole GPU instead of a virtual function of it"
        built = self.kernel_option("CONFIG_PCI_P2PDMA")
        if built is False:
            text = f"Linux {self.release} was built without CONFIG_PCI_P2PDMA, so no device can read a GPU's memory"
            return text, "use a kernel with CONFIG_PCI_P2PDMA=y"
        if built:
            text = "the kernel has CONFIG_PCI_P2PDMA, but its amdgpu driver is not set up to move files"
            advice = "use a newer amdgpu driver, and enable large BARs (Resizable BAR) in the firmware"
            return text, f"{advice}; a virtual machine may also show a virtual function (SR-IOV), which never has it"
        return None

    def kernel_option(self, name: str) -> bool | None:
        """Return whether the kernel was built with an option; None if its configuration cannot be read."""
        text = self.text(f"boot/config-{self.release}")
        if text is None:
            try:
                text = gzip.decompress((self.root / "proc/config.gz").read_bytes()).decode()
            except (OSError, EOFError, ValueError):
                return None
        return f"{name}=y" in text.splitlines()

    def block_devices(self, number: str) -> Iterator[tuple[str, str]]:
        """Yield the block device of a number such as "8:1" and all below it: names, and kinds unless plain drives."""
        place = (self.root / f"sys/dev/block/{number}").resolve()
        if (place / "partition").exists():
            place = place.parent
        if not place.is_dir():
            return
        kind = ""
        for prefix, text in _STACKED.items():
            if place.name.startswith(prefix) and place.name.removeprefix(prefix).isdigit():
                kind = text
        yield place.name, kind
        for below in sorted((place / "slaves").glob("*")):
            lower = self.text(f"{below.relative_to(self.root)}/dev")
            if lower is not None:
                yield from self.block_devices(lower)

    def journals_data(self, number: str) -> bool:
        """Return whether ext4 on this block device journals data. mountinfo omits what is the default."""
        name = (self.root / f"sys/dev/block/{number}").resolve().name
        return "data=journal" in (self.text(f"proc/fs/ext4/{name}/options") or "").splitlines()


# ---- questions to the engine, in a process of their own ----


def _driver(name: str) -> dict[str, Any]:
    """Return {"devices": [names], "refusals": [names]}."""
    from gpufs import engine

    host = name == "host"
    with engine.Engine(name, devices=1 if host else 0, memory_bytes=_HOST_BYTES if host else 0) as opened:
        devices = [
            info.name
            + (f" ({bytes_text(info.total_bytes)}, {info.pci_address}, {info.uuid})" if info.pci_address else "")
            for info in (device.info for device in opened.devices)
        ]
        refusals = engine.fastpath_probe(name)
        if not refusals and devices and not any(device.info.fastpath_memory for device in opened.devices):
            refusals.append("memory_kind")
        return {"devices": devices, "refusals": refusals}


def _path(path: str) -> dict[str, Any]:
    """Return {"file_system", "device" (such as "8:1"), "offset_align", "memory_align", "refusals"}."""
    from gpufs import engine

    with closed_after(safe_path.open_path(path, os.O_RDONLY | os.O_NONBLOCK)) as fd:
        with engine.Engine("host", devices=1, memory_bytes=_HOST_BYTES) as opened:
            with engine.BackingFile(opened, fd) as backing:
                info = backing.info
                status = os.fstat(fd)
                device = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
                return {
                    "file_system": "block device" if info.block_device else info.file_system,
                    "device": f"{os.major(device)}:{os.minor(device)}",
                    "offset_align": info.offset_align,
                    "memory_align": info.memory_align,
                    "refusals": list(info.fastpath_refusals),
                }
