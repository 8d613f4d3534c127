"""What `gpufs doctor` looks at: each check asks an Environment, so that tests can show it any machine."""

import gzip
import json
import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpufs.cli._python import python_module

OK: Final = "ok"
NOTE: Final = "note"  # works, and could be better
PROBLEM: Final = "problem"  # a mount does not work

_PROBE_SECONDS: Final = 30.0
_LEAST_DESCRIPTORS: Final = 4096
_LEAST_MAPPINGS: Final = 65530
_LEAST_PIPE: Final = 1 << 20
_GOOD_PAGES: Final = 256
_MOVES_FILES: Final = 0x40  # in "capability" of a node of the kernel's driver for AMD

# What each reason for a refusal means, and what can be done about it. The names are the engine's.
REFUSALS: Final[Mapping[str, tuple[str, str]]] = {
    "disabled": ("a knob switched it off", "see --io-fastpath and --io-fallback"),
    "nothing_to_move": ("there is nothing to move", ""),
    "too_small": ("no whole alignment unit lies within the request", "copy more at once"),
    "offset_unaligned": ("the offset in the file is no multiple of the alignment", "begin at an aligned offset"),
    "size_unaligned": ("the size is no multiple of the alignment", "the rest at the end goes by fallback: no harm"),
    "memory_unaligned": ("the device memory lies otherwise than the file's offset", "use the same offset in both"),
    "offset_range": ("the end lies beyond the largest offset", ""),
    "no_direct_descriptor": ("the file cannot be opened with O_DIRECT", "use a file system that has O_DIRECT"),
    "file_system": (
        "the fastpath serves ext4, xfs and block devices",
        "keep the file on one of them, or allow its file system by --io-file-systems if the vendor's library serves it",
    ),
    "mount_options": (
        "the file system is mounted in a way that the fastpath cannot use",
        "ext4: mount with data=ordered",
    ),
    "no_vendor_call": ("the vendor's library is not there, or has no such call", "install libcufile (CUDA) or ROCm 7"),
    "no_gpudirect": ("the kernel's part of GPUDirect Storage is not there", "install and load the module nvidia_fs"),
    "not_accepted": ("the vendor's library refused this very file", "its own log says why"),
    "failed_before": ("it began and gave up", "the mount's log says why"),
    "memory_kind": (
        "the fastpath does not reach this kind of memory: it is not the device's own, or virtual memory of ROCm",
        "AMD GPUs: mount with --hip-memory plain; programs: give memory that was allocated on the device",
    ),
    "no_kernel_support": (
        "the kernel's amdgpu driver cannot be reached, or has no interface for files",
        "see that this user may use /dev/kfd (groups render and video), and use a kernel whose amdgpu has it",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``advice``: what to do about it, "" where there is nothing to do."""

    group: str
    name: str
    state: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Driver:
    """What a driver found. ``reason``: why there are no devices; ``refusals``: of its fastpath, for any file."""

    name: str
    devices: Sequence[str] = ()
    reason: str = ""
    refusals: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """A GPU as the kernel's driver for AMD describes it."""

    address: str  # on the PCI bus
    moves_files: bool  # the kernel has set up transfers between files and its memory
    virtual: bool  # an SR-IOV virtual function


def _probe(what: Sequence[str]) -> dict[str, Any]:
    """Asks the engine in a process of its own: a vendor's library may hang, end the process, or stay loaded."""
    command = [*python_module("gpufs.cli._doctor_probe"), *what]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, cwd="/", timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_PROBE_SECONDS:g} seconds"}
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        if isinstance(said, dict):
            return said
    except (ValueError, IndexError):
        pass
    if done.returncode < 0:
        return {"error": f"its library ended the process by signal {-done.returncode}"}
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return {"error": lines[-1] if lines else "the engine did not answer"}


def _raises_rights(program: str) -> bool:
    """Whether a program may do more than who runs it: set-user-id of root, or with capabilities of its own."""
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
    probe: Callable[[Sequence[str]], dict[str, Any]] = _probe

    def text(self, path: str) -> str | None:
        """A file's text, None where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """A file's number, None where there is none."""
        text = self.text(path)
        return int(text) if text is not None and text.isdigit() else None

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return (self.root / path).exists()

    def kernel_option(self, name: str) -> str | None:
        """ "y", "m" or "n" of the kernel's configuration, None where it is not to be found."""
        content: str | None = None
        try:
            content = gzip.decompress((self.root / "proc/config.gz").read_bytes()).decode(errors="replace")
        except (OSError, EOFError, gzip.BadGzipFile):
            content = self.text(f"boot/config-{self.release}")
        if content is None:
            return None
        for line in content.splitlines():
            if line.startswith(f"CONFIG_{name}="):
                return line.partition("=")[2]
        return "n"

    def kernel_symbol(self, name: str) -> bool | None:
        """Whether the kernel or one of its modules has a function of that name; None where that is not to be seen."""
        try:
            with open(self.root / "proc/kallsyms", encoding="utf-8", errors="replace") as symbols:
                seen = None
                for line in symbols:
                    fields = line.split()
                    if len(fields) > 2 and fields[2] == name:
                        return True
                    seen = False
                return seen
        except OSError:
            return None

    def driver(self, name: str) -> Driver:
        """What a driver finds here."""
        said = self.probe(["driver", name])
        refusals = said.get("refusals", [])
        gpus = self.amd_gpus() if name == "hip" else []
        # Without a GPU that the kernel moves files for, every call is refused, whatever memory it is given.
        if gpus and not any(gpu.moves_files for gpu in gpus) and "no_kernel_support" not in refusals:
            refusals = ["no_kernel_support", *(reason for reason in refusals if reason != "memory_kind")]
        return Driver(name, said.get("devices", []), said.get("error", ""), refusals)

    def amd_gpus(self) -> list[AmdGpu]:
        """The GPUs that the kernel's driver for AMD lists; none where it does not show them."""
        gpus = []
        nodes = (self.root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
        for properties in sorted(nodes, key=lambda path: path.parent.name.zfill(8)):
            text = self.text(str(properties.relative_to(self.root))) or ""
            pairs = (line.split() for line in text.splitlines())
            facts = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
            if facts.get("simd_count", 0) == 0:  # the CPU's node
                continue
            place = facts.get("location_id", 0)
            address = f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            virtual = os.path.lexists(self.root / "sys/bus/pci/devices" / address / "physfn")
            gpus.append(AmdGpu(address, bool(facts.get("capability", 0) & _MOVES_FILES), virtual))
        return gpus


def _size(count: int) -> str:
    return "unlimited" if count in (resource.RLIM_INFINITY, -1) else f"{count >> 20} MiB"


def kernel(environment: Environment) -> Iterator[Finding]:
    """FUSE itself, and who may mount."""
    group = "mounting"
    device = environment.root / "dev/fuse"
    try:
        mode = device.stat().st_mode
    except OSError:
        yield Finding(
            group, "/dev/fuse", PROBLEM, "is not there: this kernel or container offers no FUSE",
            "load the module fuse (modprobe fuse), or give the container the device /dev/fuse",
        )  # fmt: skip
    else:
        shown = f"mode {stat.S_IMODE(mode):04o}"
        # fusermount3, by which plain users mount, opens it with their rights.
        if environment.access(device, os.R_OK | os.W_OK):
            yield Finding(group, "/dev/fuse", OK, shown)
        else:
            yield Finding(group, "/dev/fuse", PROBLEM, f"{shown}: it cannot be opened", "chmod 0666 /dev/fuse")
    helper = environment.which("fusermount3")
    kept_down = "NoNewPrivs:\t1" in (environment.text("proc/self/status") or "")
    if helper is not None and not environment.raises_rights(helper):
        text, advice = f"{helper} has no rights of its own (set-user-id): only root can mount", f"chmod u+s {helper}"
        yield Finding(group, "fusermount3", NOTE if environment.uid == 0 else PROBLEM, text, advice)
    elif helper is not None and kept_down and environment.uid != 0:
        text = "processes here get no rights by it (no_new_privs), and only root can do without"
        advice = "start the container without no-new-privileges, or the unit without NoNewPrivileges"
        yield Finding(group, "fusermount3", PROBLEM, text, advice)
    elif helper is not None:
        yield Finding(group, "fusermount3", OK, helper)
    elif environment.uid == 0:
        yield Finding(group, "fusermount3", NOTE, "is not there: only root can mount", "install the package fuse3")
    else:
        yield Finding(group, "fusermount3", PROBLEM, "is not there, and only root can do without", "install fuse3")
    lines = (environment.text("etc/fuse.conf") or "").splitlines()
    if any(line.strip() == "user_allow_other" for line in lines):
        yield Finding(group, "user_allow_other", OK, "users may open their mounts to others")
    else:
        state, text = NOTE, "not set in /etc/fuse.conf: --allow-other is for root alone"
        yield Finding(group, "user_allow_other", state, text, "write user_allow_other into /etc/fuse.conf")


def transport(environment: Environment) -> Iterator[Finding]:
    """How requests come from the kernel."""
    group = "transport"
    yield Finding(group, "requests", OK, "by the device file /dev/fuse")
    pages = environment.number("proc/sys/fs/fuse/max_pages_limit")
    if pages is not None and pages < _GOOD_PAGES:
        text = f"{pages} pages a request"
        yield Finding(group, "max_pages", NOTE, text, f"as root: echo {_GOOD_PAGES} >/proc/sys/fs/fuse/max_pages_limit")
    else:
        shown = f"{pages} pages a request" if pages is not None else f"{_GOOD_PAGES} pages a request (fixed)"
        yield Finding(group, "max_pages", OK, shown)


def limits(environment: Environment) -> Iterator[Finding]:
    """What the system lets a process have."""
    group = "limits"
    _, locked = environment.limit(resource.RLIMIT_MEMLOCK)
    wanted = 192 << 20
    if locked in (resource.RLIM_INFINITY, -1) or locked >= wanted or environment.uid == 0:
        yield Finding(group, "locked memory", OK, "as much as root likes" if environment.uid == 0 else _size(locked))
    else:
        text = f"{_size(locked)}: some drivers pin no more host memory than that, and copies are slower"
        advice = f"raise memlock to {_size(wanted)} or more in /etc/security/limits.conf (LimitMEMLOCK of a unit)"
        yield Finding(group, "locked memory", NOTE, text, advice)
    _, descriptors = environment.limit(resource.RLIMIT_NOFILE)
    if descriptors in (resource.RLIM_INFINITY, -1) or descriptors >= _LEAST_DESCRIPTORS:
        shown = "unlimited" if descriptors in (resource.RLIM_INFINITY, -1) else f"{descriptors}"
        yield Finding(group, "descriptors", OK, shown)
    else:
        text = f"{descriptors}: a file may take some, and then no more can be made"
        yield Finding(group, "descriptors", NOTE, text, f"raise nofile to {_LEAST_DESCRIPTORS} or more")
    for name, path, least, advice in (
        ("memory mappings", "proc/sys/vm/max_map_count", _LEAST_MAPPINGS, "sysctl vm.max_map_count="),
        ("pipe size", "proc/sys/fs/pipe-max-size", _LEAST_PIPE, "sysctl fs.pipe-max-size="),
    ):
        found = environment.number(path)
        if found is None:
            yield Finding(group, name, NOTE, f"/{path} is not to be read")
        elif found < least:
            yield Finding(group, name, NOTE, f"{found} is little", f"as root: {advice}{least}")
        else:
            yield Finding(group, name, OK, str(found))


_VENDORS: Final = {"cuda": "NVIDIA GPUs", "hip": "AMD GPUs", "host": "host memory"}


def drivers(found: Sequence[Driver]) -> Iterator[Finding]:
    """Whose devices there are. At least host memory has to work."""
    for driver in found:
        what = _VENDORS[driver.name]
        if driver.devices:
            many = len(driver.devices)
            yield Finding(
                "drivers", driver.name, OK, f"{many} x {driver.devices[0]}" if many > 1 else driver.devices[0]
            )
        elif driver.name == "host":
            yield Finding("drivers", "host", PROBLEM, driver.reason, "this installation is damaged: install gpufs anew")
        else:
            advice = "install the driver of the GPU, and see that this user may use its devices"
            if " lacks " in driver.reason:  # a function that every version has which can be used
                advice = "install a newer version of it, if there is a GPU"
            yield Finding("drivers", driver.name, NOTE, f"no {what}: {driver.reason}", advice)


def fastpath(environment: Environment, found: Sequence[Driver]) -> Iterator[Finding]:
    """Whether the vendors can move bytes between storage and devices without the host, and what is missing."""
    for driver in found:
        name = f"{driver.name}"
        if driver.name == "host":
            yield Finding("fastpath", name, OK, "O_DIRECT into the device's memory")
            continue
        if not driver.devices:
            yield Finding("fastpath", name, NOTE, "there is no device of this driver")
            continue
        if not driver.refusals:
            yield Finding("fastpath", name, OK, "available: for a file's own reasons ask gpufs doctor PATH")
            continue
        for refusal in driver.refusals:
            text, advice = REFUSALS.get(refusal, ("", ""))
            yield Finding("fastpath", name, NOTE, f"{refusal}: {text}; copies go by pinned host memory", advice)
    modules = {line.split(" ", 1)[0] for line in (environment.text("proc/modules") or "").splitlines()}
    if any(driver.name == "cuda" and driver.devices for driver in found):
        version = environment.text("proc/driver/nvidia-fs/version")
        if version:
            yield Finding("fastpath", "module nvidia_fs", OK, version.splitlines()[0])
        else:
            loaded = "loaded, but it shows no version" if "nvidia_fs" in modules else "not loaded"
            yield Finding("fastpath", "module nvidia_fs", NOTE, loaded, "install nvidia-fs and: modprobe nvidia-fs")
    if any(driver.name == "hip" and driver.devices for driver in found):
        has = environment.kernel_symbol("kfd_ais_rw_file")
        if has:
            yield Finding("fastpath", "amdgpu", OK, "moves files")
        else:
            text = "has no interface for files" if has is False else "whether it moves files cannot be seen"
            advice = "use a kernel or an amdgpu package with AMD Infinity Storage" if has is False else ""
            yield Finding("fastpath", "amdgpu", NOTE, text, advice)
        for gpu in environment.amd_gpus():
            name = f"amdgpu {gpu.address}"
            if gpu.virtual:
                text, advice = "is an SR-IOV virtual function, which amdgpu moves no files for", "use the whole GPU"
                yield Finding("fastpath", name, NOTE, text, advice)
            elif gpu.moves_files:
                yield Finding("fastpath", name, OK, "is set up to move files")
            else:
                text = "is not set up to move files: a virtual function, or the bus does not show all of its memory"
                advice = "switch on large BARs (Resizable BAR, Above 4G Decoding) in the firmware, or use the whole GPU"
                yield Finding("fastpath", name, NOTE, text, advice)
    if any(driver.devices and driver.name != "host" for driver in found):
        option = environment.kernel_option("PCI_P2PDMA")
        if option is None:
            yield Finding("fastpath", "CONFIG_PCI_P2PDMA", NOTE, "the kernel's configuration is not to be found")
        elif option == "y":
            yield Finding("fastpath", "CONFIG_PCI_P2PDMA", OK, "in this kernel")
        else:
            text = "not in this kernel: AMD's fastpath and newer versions of NVIDIA's need it"
            yield Finding("fastpath", "CONFIG_PCI_P2PDMA", NOTE, text, "use a kernel with it")


def paths(environment: Environment, names: Sequence[str], found: Sequence[Driver]) -> Iterator[Finding]:
    """The backend that copies of each file get on each driver that has devices, and why."""
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
        for driver in found:
            if not driver.devices:
                continue
            reasons = [*said["refusals"], *(reason for reason in driver.refusals if reason not in said["refusals"])]
            where = f"{name} on {driver.name}"
            if not reasons:
                yield Finding("paths", where, OK, f"fastpath ({alignment})")
                continue
            texts = "; ".join(f"{reason}: {REFUSALS.get(reason, ('', ''))[0]}" for reason in reasons)
            advice = "; ".join(text for reason in reasons if (text := REFUSALS.get(reason, ("", ""))[1]))
            yield Finding("paths", where, NOTE, f"fallback ({alignment}): {texts}", advice)


def examine(environment: Environment, names: Sequence[str]) -> list[Finding]:
    """All checks."""
    found = [environment.driver(name) for name in ("cuda", "hip", "host")]
    return [
        *kernel(environment),
        *transport(environment),
        *limits(environment),
        *drivers(found),
        *fastpath(environment, found),
        *paths(environment, names, found),
    ]
