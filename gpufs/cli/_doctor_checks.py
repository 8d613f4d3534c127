"""The checks of `gpufs doctor`. Each asks an Environment, which tests replace by machines of their own."""

import gzip
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpufs import config
from gpufs.cli import _answers, _mounts
from gpufs.drivers import DRIVERS
from gpufs.mounting import MountEntry

OK: Final = "ok"
NOTE: Final = "note"  # works, and could be better
PROBLEM: Final = "problem"  # a mount does not work

_PROBE_SECONDS: Final = 30.0
_LEAST_DESCRIPTORS: Final = 4096
_LEAST_LOCKED: Final = 192 << 20
_LEAST_MAPPINGS: Final = 65530
_LEAST_READ_AHEAD: Final = 1024  # KiB; gpufs mounts of root set 4096
_MOVES_FILES: Final = 0x40  # in "capability" of a GPU, as the amdgpu driver shows it
# Block devices through which the kernel may refuse to move bytes straight to a GPU, by their names.
_STACKED: Final[Mapping[str, str]] = {"dm-": "device mapper", "md": "software RAID", "loop": "loop device"}

# What each reason for a refusal means, and how to avoid it. The names are the engine's.
REFUSALS: Final[Mapping[str, tuple[str, str]]] = {
    "disabled": ("a knob switched it off", "see --io-fastpath"),
    "nothing_to_move": ("there is nothing to move", ""),
    "too_small": ("less than --io-fastpath-min-bytes, or no whole alignment unit", "copy more at once"),
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
    "failed_before": ("it failed on an earlier request", "the mount's log says why"),
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
class Finding:
    """One line of the report. ``advice``: how to fix it, or ""."""

    group: str
    name: str
    state: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Driver:
    """What a driver found. ``reason``: why it has no device; ``refusals``: why its fastpath refuses any file.

    ``causes``: for a refusal, what this machine lacks in particular, and the remedy.
    """

    name: str
    devices: Sequence[str] = ()
    reason: str = ""
    refusals: Sequence[str] = ()
    causes: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def explain(self, refusal: str) -> tuple[str, str]:
        """What a refusal means here, and how to avoid it."""
        return self.causes.get(refusal) or REFUSALS.get(refusal, ("", ""))


def _probe(what: Sequence[str]) -> dict[str, Any]:
    """Asks the engine in a process of its own: a vendor's library may hang, end the process, or stay loaded."""

    def question() -> dict[str, Any]:
        from gpufs.cli import _doctor_probe

        return _doctor_probe.answer(*what)

    (said,) = _answers.ask([question], str, _PROBE_SECONDS)
    return {"error": said.strerror} if isinstance(said, OSError) else dict(said)


def _raises_rights(program: str) -> bool:
    """Whether a program runs with more rights than its caller: set-user-id root, or file capabilities."""
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
    probe: Callable[[Sequence[str]], dict[str, Any]] = _probe

    def text(self, path: str) -> str | None:
        """The text of a file, None if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The number in a file, None if it cannot be read."""
        return config.numbers(self.root / path).get("")

    def driver(self, name: str) -> Driver:
        """The devices of a driver, and why its fastpath refuses any file."""
        said = self.probe(["driver", name])
        refusals = said.get("refusals", [])
        # If the kernel moves files for none of its GPUs, every call is refused, whatever memory it is given.
        if name == "hip" and self._moves_files() is False and "no_kernel_support" not in refusals:
            refusals = ["no_kernel_support", *(reason for reason in refusals if reason != "memory_kind")]
        cause = self._why_no_files_move() if name == "hip" else None
        causes = {"no_kernel_support": cause} if cause else {}
        return Driver(name, said.get("devices", []), said.get("error", ""), refusals, causes)

    def _amd_gpus(self) -> Iterator[tuple[str, bool]]:
        """The PCI address of each GPU that amdgpu shows, and whether it is set up to move files for it."""
        for properties in self.root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
            facts = config.numbers(properties)
            if facts.get("simd_count", 0):  # 0 for a CPU
                place = facts.get("location_id", 0)
                address = f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
                yield address, bool(facts.get("capability", 0) & _MOVES_FILES)

    def _moves_files(self) -> bool | None:
        """Whether amdgpu is set up to move files for one of its GPUs; None if it shows no GPU."""
        found = [moves for _, moves in self._amd_gpus()]
        return any(found) if found else None

    def _why_no_files_move(self) -> tuple[str, str] | None:
        """Why amdgpu moves files for none of its GPUs, and the remedy, as far as the kernel shows it."""
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
        """Whether the kernel was built with an option; None if its configuration cannot be read."""
        text = self.text(f"boot/config-{self.release}")
        if text is None:
            try:
                text = gzip.decompress((self.root / "proc/config.gz").read_bytes()).decode()
            except (OSError, EOFError, ValueError):
                return None
        return f"{name}=y" in text.splitlines()

    def block_devices(self, number: str) -> Iterator[tuple[str, str]]:
        """The block device of a number such as "8:1" and all below it: names, and what they are if not plain drives."""
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
        """Whether ext4 on this block device writes data through its journal. mountinfo omits what is the default."""
        name = (self.root / f"sys/dev/block/{number}").resolve().name
        return "data=journal" in (self.text(f"proc/fs/ext4/{name}/options") or "").splitlines()


def mounting(environment: Environment) -> Iterator[Finding]:
    """FUSE itself, and whether this user may mount."""
    group = "mounting"
    device = environment.root / "dev/fuse"
    if not device.exists():
        advice = "load the module fuse (modprobe fuse), or give the container the device /dev/fuse"
        yield Finding(group, "/dev/fuse", PROBLEM, "does not exist: this kernel or container has no FUSE", advice)
    elif environment.access(device, os.R_OK | os.W_OK):
        yield Finding(group, "/dev/fuse", OK, "can be opened")
    else:
        yield Finding(group, "/dev/fuse", PROBLEM, "cannot be opened by this user", "chmod 0666 /dev/fuse")
    yield _mount_program(environment)
    lines = (environment.text("etc/fuse.conf") or "").splitlines()
    if any(line.strip() == "user_allow_other" for line in lines):
        yield Finding(group, "user_allow_other", OK, "users may open their mounts to others")
    else:
        text = "not set in /etc/fuse.conf: only root may use --allow-other"
        yield Finding(group, "user_allow_other", NOTE, text, "add user_allow_other to /etc/fuse.conf")


def _mount_program(environment: Environment) -> Finding:
    """Whether fusermount3 lets plain users mount. Root mounts without it."""
    helper = environment.which("fusermount3")
    if helper is None:
        text, advice = "is not installed: only root can mount", "install the package fuse3"
    elif not environment.raises_rights(helper):
        text, advice = f"{helper} is not set-user-id root: only root can mount", f"chmod u+s {helper}"
    elif environment.uid != 0 and "NoNewPrivs:\t1" in (environment.text("proc/self/status") or ""):
        text = "cannot gain privileges here (no_new_privs): only root can mount"
        advice = "start the container without no-new-privileges, or the unit without NoNewPrivileges"
    else:
        return Finding("mounting", "fusermount3", OK, helper)
    return Finding("mounting", "fusermount3", NOTE if environment.uid == 0 else PROBLEM, text, advice)


def limits(environment: Environment) -> Iterator[Finding]:
    """Limits of the system and of this process."""
    unlimited = resource.RLIM_INFINITY
    _, locked = environment.limit(resource.RLIMIT_MEMLOCK)
    _, descriptors = environment.limit(resource.RLIMIT_NOFILE)
    if environment.uid == 0:
        locked = unlimited
    checks = (
        ("locked memory", locked, _LEAST_LOCKED, "copies to GPUs are slower", "memlock in /etc/security/limits.conf"),
        ("descriptors", descriptors, _LEAST_DESCRIPTORS, "each file takes some", "nofile in /etc/security/limits.conf"),
        ("memory mappings", environment.number("proc/sys/vm/max_map_count"), _LEAST_MAPPINGS, "", "vm.max_map_count"),
    )
    for name, found, least, effect, knob in checks:
        shown = "unlimited" if found in (unlimited, -1) else "unknown" if found is None else str(found)
        if found is None or found in (unlimited, -1) or found >= least:
            yield Finding("limits", name, OK, shown)
        else:
            text = f"{shown} is little" + (f": {effect}" if effect else "")
            yield Finding("limits", name, NOTE, text, f"raise {knob} to {least} or more")


def speed(environment: Environment) -> Iterator[Finding]:
    """Settings of the kernel without which a mount is slower."""
    for entry in environment.mounts():
        knob = f"sys/class/bdi/{entry.device}/read_ahead_kb"
        ahead = environment.number(knob)
        if ahead is not None and ahead < _LEAST_READ_AHEAD:
            text = f"the kernel reads {ahead} KiB ahead of a program that goes through a mapping: scans are slower"
            yield Finding("speed", entry.mountpoint, NOTE, text, f"as root: echo {_LEAST_READ_AHEAD} > /{knob}")
        elif ahead is not None:
            yield Finding("speed", entry.mountpoint, OK, f"the kernel reads {ahead} KiB ahead")


def drivers(found: Sequence[Driver]) -> Iterator[Finding]:
    """The devices of each driver. Host memory must always work."""
    for driver in found:
        what = DRIVERS[driver.name].devices
        if driver.devices:
            text = ", ".join(f"{number} = {device}" for number, device in enumerate(driver.devices))
            yield Finding("drivers", driver.name, OK, text if len(driver.devices) > 1 else driver.devices[0])
        elif driver.name == "host":
            yield Finding(
                "drivers", "host", PROBLEM, driver.reason, "this installation is damaged: install gpufs again"
            )
        else:
            advice = "if there is a GPU, install its driver and allow this user to open its devices"
            if " lacks " in driver.reason:  # a function of the runtime
                advice = "if there is a GPU, install a newer version of it"
            yield Finding("drivers", driver.name, NOTE, f"no {what}: {driver.reason}", advice)


def fastpath(found: Sequence[Driver]) -> Iterator[Finding]:
    """Whether copies between storage and devices can bypass host memory, and what is missing."""
    for driver in found:
        name = driver.name
        if driver.name == "host":
            yield Finding("fastpath", name, OK, "O_DIRECT into the device's memory")
            continue
        if not driver.devices:
            yield Finding("fastpath", name, NOTE, "this driver has no device")
            continue
        if not driver.refusals:
            yield Finding("fastpath", name, OK, "available; gpufs doctor PATH checks a file")
            continue
        for refusal in driver.refusals:
            text, advice = driver.explain(refusal)
            yield Finding("fastpath", name, NOTE, f"{refusal}: {text}; copies use pinned host memory", advice)


def paths(environment: Environment, names: Sequence[str], found: Sequence[Driver]) -> Iterator[Finding]:
    """Which way copies of each file take on each driver with devices, and why."""
    for name in names:
        try:
            said = environment.probe(["path", os.path.abspath(name)]) if name else {"error": "an empty name"}
        except FileNotFoundError:
            said = {"error": "the current directory has been removed"}
        if "error" in said:
            yield Finding("paths", name, PROBLEM, said["error"], "give a regular file or a block device that exists")
            continue
        alignment = f"{said['file_system'] or 'unknown file system'}, alignment {said['offset_align']} in the file, "
        alignment += f"{said['memory_align']} in memory"
        device = said.get("device", "")
        refusals = list(said["refusals"])
        if said["file_system"] == "ext4" and "mount_options" not in refusals and environment.journals_data(device):
            refusals.append("mount_options")
        stack = list(environment.block_devices(device))
        for driver in found:
            if not driver.devices:
                continue
            reasons = [*refusals, *(reason for reason in driver.refusals if reason not in refusals)]
            where = f"{name} on {driver.name}"
            if reasons:
                texts = "; ".join(f"{reason}: {driver.explain(reason)[0]}" for reason in reasons)
                advice = "; ".join(text for reason in reasons if (text := driver.explain(reason)[1]))
                yield Finding("paths", where, NOTE, f"fallback ({alignment}): {texts}", advice)
            elif driver.name != "host" and any(kind for _, kind in stack):
                below = " over ".join(f"{disk} ({kind})" if kind else disk for disk, kind in stack)
                text = f"fastpath ({alignment}), unless the kernel refuses it: the file is on {below}"
                yield Finding("paths", where, NOTE, text, "keep the file on a drive or a partition itself")
            else:
                yield Finding("paths", where, OK, f"fastpath ({alignment})")


def examine(environment: Environment, names: Sequence[str]) -> list[Finding]:
    """All checks."""
    found = [environment.driver(name) for name in DRIVERS]
    return [
        *mounting(environment),
        *limits(environment),
        *speed(environment),
        *drivers(found),
        *fastpath(found),
        *paths(environment, names, found),
    ]
