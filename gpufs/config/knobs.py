"""The knobs: every number and choice that a user can set, in one table.

The table makes the options of the command line, the environment variables, the keys of the configuration file and the
page docs/knobs.md.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from gpufs.config import kinds
from gpufs.drivers import DRIVERS

GRANULE: Final = 2 << 20  # the least memory that a device can have

_SHOWN: Final = 80  # characters of a wrong value in a message


class ConfigError(ValueError):
    """A value that is not allowed. The text is one line: which knob, where the value came from, what is allowed."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One line of the table."""

    name: str
    kind: kinds.Kind
    default: Any
    text: str
    default_text: str = ""  # if the default is more than a value
    hidden: bool = False  # from help and documentation: for tests
    everyday: bool = False  # `gpufs mount --help` shows it; --help-all shows all

    @property
    def option(self) -> str:
        """The option of the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "GPUFS_" + self.name.upper()

    def coerce(self, value: object, origin: str) -> Any:
        """Return the value for a text or what a program or a file gives instead.

        ConfigError names the knob, the origin and what is allowed.
        """
        try:
            return self.kind.coerce(value)
        except ValueError:
            with suppress(ValueError):  # a type that this knob does not have
                value = self.kind.text_of(value)
            shown = repr(value[: _SHOWN - 3] + "..." if isinstance(value, str) and len(value) > _SHOWN else value)
            raise ConfigError(f"{self.name}: {shown} ({origin}) is not allowed: {self.kind.allowed}") from None

    def describe_default(self) -> str:
        """Return the default, for people."""
        if self.default_text:
            return self.default_text
        if self.kind.metavar == "SIZE":
            return kinds.size_text(self.default)
        if self.kind.metavar == "TIME":
            return f"{self.default:g}s"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return str(self.default)


KNOBS: Final[tuple[Knob, ...]] = (
    Knob(
        "driver",
        kinds.choice("auto", *DRIVERS),
        "auto",
        "Driver to use. auto picks CUDA or HIP if the machine has a GPU, and fails if that GPU cannot be used. Only "
        "without a GPU it picks host memory, and says so.",
        everyday=True,
    ),
    Knob(
        "devices",
        kinds.DEVICES,
        0,
        "GPUs to use, in this order: gpu0 is the first of them. Numbers are those of the driver, which "
        "CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES change; UUIDs stay the same (nvidia-smi -L, rocminfo). "
        "With the host driver: how many devices to simulate.",
        default_text="all; 1 with the host driver",
        everyday=True,
    ),
    Knob(
        "memory",
        kinds.size(GRANULE, 1 << 46),
        None,
        "Memory of each device that the mount may use.",
        default_text="host: half of the available memory divided by the devices; GPUs: all memory",
        everyday=True,
    ),
    Knob(
        "host_memory",
        kinds.size(0, 1 << 46),
        0,
        "Pinned memory of the host for files of idle models: the directory host0, to which `gpufs sleep` moves what is "
        "on the devices. It is taken at once, in 0.4 s for each GiB, while the mount already serves.",
        default_text="0: none",
        everyday=True,
    ),
    Knob(
        "evict",
        kinds.BOOLEAN,
        False,
        "When a device is full, park files on it that no program has open or attached in host0, the one first that was "
        "used the longest time ago. `gpufs pin` exempts files. Needs --host-memory.",
        everyday=True,
    ),
    Knob(
        "user_memory",
        kinds.size(0, 1 << 46),
        0,
        "Memory of each device that the files of a user may hold. Beyond it: EDQUOT. Not for root and the user who "
        "mounts; `gpufs quota` sets other limits.",
        default_text="0: no limit",
    ),
    Knob(
        "user_limits",
        kinds.LIMITS,
        None,
        "Limits of single users, instead of user_memory, from the first moment on. `gpufs quota` changes them.",
        default_text="none",
    ),
    Knob(
        "metadata",
        kinds.size(1 << 20, 1 << 46),
        None,
        "Host memory for names, inodes, extended attributes and targets of symbolic links. Beyond it: ENOSPC. A user "
        "other than root and the one who mounts may take half of it. A file takes 2.2 KiB, and delays a daemon that "
        "takes over by about 3 us: 100,000 files by 0.3 s.",
        default_text="a sixteenth of this machine's or container's memory, 512 MiB at most",
    ),
    Knob(
        "slab_file_bytes",
        kinds.size(0, 1 << 20),
        64 << 10,
        "Files up to this size share slabs of device memory instead of using a granule each. 0: no file does.",
    ),
    Knob(
        "keep_freed",
        kinds.duration(0, 3600),
        1.0,
        "How long memory of removed files is kept for new ones before the GPU's driver gets it back. 0: not at all.",
    ),
    Knob(
        "hip_memory",
        kinds.choice("auto", "virtual", "plain"),
        "auto",
        "How memory of an AMD GPU is allocated. plain: one allocation for each file, which the fastpath can use; a "
        "file grows by a copy, and punching holes frees nothing. virtual: in pieces, which the fastpath cannot use. "
        "auto: plain if io_fastpath is require, or if it is auto and the kernel can move files to and from the GPU; "
        "otherwise virtual. If ROCm's virtual memory does not work (checked at start) memory is always plain.",
    ),
    Knob(
        "lock_policy",
        kinds.choice("auto", "off", "mandatory"),
        "auto",
        "Lock the memory for requests so that GPUs can access it: if possible, never, or fail to mount without it.",
    ),
    Knob(
        "allow_other",
        kinds.BOOLEAN,
        False,
        "Allow access by other users, subject to each file's mode and owner.",
        everyday=True,
    ),
    Knob(
        "trust_readers",
        kinds.BOOLEAN,
        False,
        "Share a GPU's memory also with programs that may only read a file, and trust them not to write to it: "
        "a GPU's driver cannot forbid that. Otherwise such a program gets a private copy in GPU memory.",
    ),
    Knob(
        "backing",
        kinds.BACKINGS,
        None,
        "Directory of the host to show as backing/NAME. May be given several times.",
        default_text="none",
        everyday=True,
    ),
    Knob("foreground", kinds.BOOLEAN, False, "Stay in the foreground and log to standard error.", everyday=True),
    Knob(
        "log_file",
        kinds.PATH,
        None,
        "File for the mount's log.",
        default_text="the journal under systemd; otherwise no log, or standard error with --foreground",
        everyday=True,
    ),
    Knob(
        "allow_non_empty",
        kinds.BOOLEAN,
        False,
        "Mount on a directory that has files, which the mount hides. By mount(8) and fstab that is always allowed.",
    ),
    Knob(
        "survive",
        kinds.BOOLEAN,
        True,
        "Start another daemon if the mount's daemon dies. Files, names and open files stay as they are.",
    ),
    Knob(
        "auto_unmount",
        kinds.BOOLEAN,
        True,
        "Unmount automatically if the daemon dies and the mount does not survive it.",
    ),
    Knob(
        "core_dumps",
        kinds.BOOLEAN,
        False,
        "Write a core file after a crash, if ulimit -c allows one. It contains no file data.",
    ),
    Knob("log_level", kinds.choice("debug", "info", "warning", "error"), "info", "Least severe level that is logged."),
    Knob(
        "read_ahead",
        kinds.size(0, 64 << 20, 4096),
        4 << 20,
        "How far the kernel reads ahead of a program that goes through a mapping. Unless it is 0, threads of the mount "
        "read on from there while the program goes from front to back. For root's mounts; others have the kernel's "
        "128 KiB.",
    ),
    Knob(
        "mount_timeout",
        kinds.duration(0.1, 3600),
        60.0,
        "How long `gpufs mount` waits for the mount to answer.",
    ),
    Knob(
        "io_chunk_bytes",
        kinds.size(64 << 10, 64 << 20, power_of_two=True),
        2 << 20,
        "Size of one step of a copy between a file and a device, and of a pinned buffer.",
    ),
    Knob(
        "io_pinned_bytes",
        kinds.size(1 << 20, 1 << 40),
        192 << 20,
        "Most host memory that all copies and the mount together may pin.",
    ),
    Knob(
        "io_workers",
        kinds.integer(0, 256),
        0,
        "Most threads for one client's copies on a NUMA node.",
        default_text="0: chosen by the number of CPUs",
    ),
    Knob(
        "io_fastpath",
        kinds.choice("auto", "off", "require"),
        "auto",
        "Copy directly between storage and device with the vendor's library: if possible, never, or only that way.",
    ),
    Knob(
        "io_file_systems",
        kinds.WORDS,
        "",
        "Types of file systems, separated by commas, that the fastpath may use in addition to ext4, xfs and block "
        "devices, as /proc/self/mountinfo names them: nfs4 (over RDMA), lustre, beegfs, ...; any: all. The vendor's "
        "library decides whether one works. Files that it refuses are copied through host memory and counted.",
        default_text="none",
    ),
    Knob("mask_flags", kinds.flags(64), 0, "INIT flags to treat as if the kernel did not offer them.", hidden=True),
)

BY_NAME: Final[Mapping[str, Knob]] = {knob.name: knob for knob in KNOBS}

# Options of the other commands, which are not read from files.
STATUS_TIMEOUT: Final = Knob(
    "status_timeout", kinds.duration(0.1, 3600), 2.0, "How long to wait for a mount to answer."
)
UMOUNT_TIMEOUT: Final = Knob(
    "umount_timeout", kinds.duration(0.1, 3600), 30.0, "How long to wait for the daemon to end."
)
SLEEP_TIMEOUT: Final = Knob(
    "sleep_timeout",
    kinds.duration(0, 3600),
    10.0,
    "How long programs that use a file may take to release it.",
)
