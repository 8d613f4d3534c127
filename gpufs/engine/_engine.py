"""The engine and its devices, and traces of what its threads do."""

import json
import os
from dataclasses import dataclass
from typing import Any, Final, Literal

from gpufs.engine._arguments import choice, instance, seconds, signed, text, unsigned
from gpufs.engine._binding import HANDLE, NUMBER, SMALL_NUMBER, EngineError, Handle, check, result_of
from gpufs.engine._in_use import WorkInProgress
from gpufs.engine._native import ffi, lib
from gpufs.syscalls import Closing

LockPolicy = Literal["auto", "off", "mandatory"]
HipMemory = Literal["auto", "virtual", "plain"]
_LONGEST_KEPT: Final = 3600.0
# The names of the bits of a mask of refusals.
_REFUSALS: Final = [name for bit in range(32) if (name := ffi.string(lib.gpufs_refusal_name(bit)).decode())]
_LOCK_POLICIES: Final[dict[str, int]] = {
    "auto": lib.GPUFS_LOCK_AUTO,
    "off": lib.GPUFS_LOCK_OFF,
    "mandatory": lib.GPUFS_LOCK_MANDATORY,
}
Switch = Literal["auto", "on", "off", "require"]
SWITCHES: Final[dict[str, int]] = {
    "auto": lib.GPUFS_AUTO,
    "on": lib.GPUFS_ON,
    "off": lib.GPUFS_OFF,
    "require": lib.GPUFS_REQUIRE,
}
_HIP_MEMORY: Final[dict[str, int]] = {
    "auto": lib.GPUFS_HIP_MEMORY_AUTO,
    "virtual": lib.GPUFS_HIP_MEMORY_VIRTUAL,
    "plain": lib.GPUFS_HIP_MEMORY_PLAIN,
}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The constant properties of a device.

    Attributes
    ----------
    index, name
        Its number in the engine, and the driver's name for it.
    pci_address
        Empty if it has none.
    uuid
        "GPU-..." as the vendor's tools print it; empty if it has none.
    numa_node
        -1 if it is not known.
    total_bytes
        Bytes of memory.
    granule
        Bytes in which memory is allocated.
    slot_bytes
        The largest buffer that shares a granule with others, and takes a power of two of bytes; 0 if none does.
    cpu_addressable
        Whether the CPU can use its addresses.
    fastpath_memory
        Whether the fastpath can reach the memory of buffers.
    keeps_memory
        Whether the memory of a mount's files can outlive its process.
    host_tier
        Whether it is the host's memory, to which files of the others can be parked: ``host_memory_bytes`` of `Engine`.
    """

    index: int
    name: str
    pci_address: str
    uuid: str
    numa_node: int
    total_bytes: int
    granule: int
    slot_bytes: int
    cpu_addressable: bool
    fastpath_memory: bool
    keeps_memory: bool
    host_tier: bool

    @property
    def directory(self) -> str:
        """The name of its directory on a mount: gpu0, gpu1, ..., and host0."""
        return "host0" if self.host_tier else f"gpu{self.index}"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory at one moment.

    Attributes
    ----------
    total_bytes, free_bytes
        Bytes there are, and bytes that can be allocated.
    held_bytes
        Bytes that buffers of this engine take.
    health
        The failure that put the device out of service; None while it works.
    """

    total_bytes: int
    free_bytes: int
    held_bytes: int
    health: EngineError | None


class Device:
    """A device of an engine, which it keeps alive. :attr:`Engine.devices` has them.

    Attributes
    ----------
    engine
        The engine.
    index
        The device's number there.
    """

    __slots__ = ("engine", "index")

    def __init__(self, engine: "Engine", index: int) -> None:
        self.engine = engine
        self.index = index

    @property
    def info(self) -> DeviceInfo:
        """The device's constant properties. EngineError EBADF once the engine is closed."""
        info = result_of("gpufs_device_info *", lib.gpufs_engine_device_info, self.engine._handle, self.index)
        return DeviceInfo(
            index=info.index,
            name=ffi.string(info.name).decode(errors="replace"),
            pci_address=ffi.string(info.pci_address).decode(errors="replace"),
            uuid=ffi.string(info.uuid).decode(errors="replace"),
            numa_node=info.numa_node,
            total_bytes=info.total_bytes,
            granule=info.granule,
            slot_bytes=info.slot_bytes,
            cpu_addressable=bool(info.cpu_addressable),
            fastpath_memory=bool(info.fastpath_memory),
            keeps_memory=bool(info.keeps_memory),
            host_tier=bool(info.host_tier),
        )

    def check(self) -> None:
        """Raise EngineError if the device is out of service. Never waits for it."""
        check(lib.gpufs_engine_device_check(self.engine._handle, self.index))

    def memory(self) -> DeviceMemory:
        """Return how much memory is in use now. EngineError EBADF once the engine is closed."""
        memory = result_of("gpufs_device_memory *", lib.gpufs_engine_device_memory, self.engine._handle, self.index)
        health = None
        if memory.health_error:
            health = EngineError(memory.health_error, "the device is out of service", memory.health_device_code)
        return DeviceMemory(memory.total_bytes, memory.free_bytes, memory.held_bytes, health)


def _milliseconds(name: str, value: float) -> int:
    time = seconds(name, value)
    if value < 0 or time > _LONGEST_KEPT:
        raise ValueError(f"{name}: {value!r} is not a time from 0 to {_LONGEST_KEPT} seconds")
    return round(time * 1000)


class Engine(Handle):
    """The devices of one driver.

    Parameters
    ----------
    driver
        "host", "cuda" or "hip".
    devices
        How many devices to simulate (host) or to use (others; 0 for all). GPUs: also a list of those to use, in this
        order, by their numbers or UUIDs, of which a unique beginning is enough.
    memory_bytes
        Cap for each device; 0 for the driver's default. The host driver requires a number.
    slab_file_bytes
        Buffers up to this size share slabs of device memory, at most 1 MiB; 0 for none.
    statistics_path
        A file for the counters (docs/internals/statistics-file.md). It is replaced, and stays when the engine closes.
    keep_freed
        Seconds for which a GPU's memory is cached after a buffer has released it, for the next buffer: the driver
        clears what it gets back, which slows down copies at the same time. 0 for no cache.
    lock_policy
        "mandatory" locks the host memory of every copy while the copy takes, and the copy fails if that is impossible.
        With "auto" and "off" only a `HostLock` locks a program's memory.
    hip_memory
        How the HIP driver allocates a buffer's memory. "plain": by one hipMalloc, which the fastpath reaches and which
        grows by a copy. "virtual": in ranges of addresses, which the fastpath does not reach. "auto": plain if the
        kernel can move files to and from the device. Memory is always plain if the runtime's ranges do not work.
    host_memory_bytes
        Pinned memory of the host as one device more, the last one, to which files of the others can be parked; 0 for
        none. A thread pins it from the start on, 0.4 seconds for a GiB.

    Raises
    ------
    EngineError
        ENODEV if the driver cannot be used here, ENXIO if it has no such device, EINVAL for an unknown driver or
        invalid numbers, EOPNOTSUPP if the driver has no host memory to park files. When closing: ETIMEDOUT if a device
        did not finish what operations and transfers waited for (docs/operations.md). The engine is closed then, and
        their memory is kept until the process ends.

    Examples
    --------
    >>> with Engine("host", devices=2, memory_bytes=64 << 20) as engine:
    ...     [device.info.name for device in engine.devices]
    ['host memory', 'host memory']
    """

    __slots__ = ("_devices", "_users", "driver")

    def __init__(
        self,
        driver: str,
        *,
        devices: int | list[str] | tuple[str, ...] = 0,
        memory_bytes: int = 0,
        slab_file_bytes: int = 0,
        statistics_path: str = "",
        keep_freed: float = 0.0,
        lock_policy: LockPolicy = "auto",
        hip_memory: HipMemory = "auto",
        host_memory_bytes: int = 0,
    ) -> None:
        name = ffi.new("char[]", text("driver", driver))
        path = ffi.new("char[]", text("statistics_path", os.fsdecode(statistics_path)))
        count, chosen = (0, devices) if isinstance(devices, (list, tuple)) else (devices, ())
        chosen_devices = ffi.new("char[]", text("devices", ",".join(map(str, chosen))))
        options = ffi.new(
            "gpufs_engine_options *",
            {
                "driver": name,
                "devices": signed("devices", count),
                "chosen_devices": chosen_devices,
                "memory_bytes": unsigned("memory_bytes", memory_bytes),
                "slab_file_bytes": unsigned("slab_file_bytes", slab_file_bytes),
                "statistics_path": path,
                "keep_freed_ms": _milliseconds("keep_freed", keep_freed),
                "lock_policy": choice("lock_policy", _LOCK_POLICIES, lock_policy),
                "hip_memory": choice("hip_memory", _HIP_MEMORY, hip_memory),
                "host_memory_bytes": unsigned("host_memory_bytes", host_memory_bytes),
            },
        )
        handle = result_of(HANDLE, lib.gpufs_engine_open, options)
        self._users = WorkInProgress()
        self._own(handle, self._users.close)
        self.driver = driver
        self._devices = int(result_of(SMALL_NUMBER, lib.gpufs_engine_device_count, self._handle))
        self.statistics_describe({})

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, by index."""
        return tuple(Device(self, index) for index in range(self._devices))

    def statistics_describe(self, facts: dict[str, Any]) -> None:
        """Store a description beside the counters, with the driver and the names of the reasons of refusals.

        Parameters
        ----------
        facts
            More for it: a JSON object. The whole text has at most 3840 bytes.

        Raises
        ------
        TypeError, ValueError
            ``facts`` is not a JSON object.
        EngineError
            EFBIG if the text is too long.
        """
        instance("facts", dict, facts)
        description = json.dumps({"driver": self.driver, "refusals": _REFUSALS, **facts}, allow_nan=False)
        check(lib.gpufs_statistics_describe(self._handle, ffi.new("char[]", description.encode())))

    def statistics_publish(self) -> None:
        """Write the gauges (memory, pools) and the time beside the counters."""
        check(lib.gpufs_statistics_publish(self._handle))

    def statistics_read(self) -> bytes:
        """Return all counters in the form of docs/internals/statistics-file.md, for `gpufs.statistics.parse`."""
        data, size = ffi.new("char **"), ffi.new("uint64_t *")
        check(lib.gpufs_statistics_read(self._handle, data, size))
        copy: bytes = ffi.buffer(data[0], size[0])[:]
        return copy


def io_configure(
    engine: Engine,
    *,
    chunk_bytes: int = 0,
    pinned_bytes: int = 0,
    workers: int = 0,
    fastpath: Switch = "auto",
    file_systems: str = "",
) -> None:
    """Set the options of an engine's transfers, before its first transfer, mount or statistics.

    Parameters
    ----------
    chunk_bytes, pinned_bytes
        Sizes in bytes of a chunk and of all pinned memory; 0 is the default.
    workers
        Threads of a client; 0 is the default.
    fastpath
        Whether a copy may take it.
    file_systems
        Types of file systems that the fastpath may use in addition to ext4, xfs and block devices, as
        /proc/self/mountinfo names them, separated by commas; "any" allows all.

    Raises
    ------
    EngineError
        EBUSY once the engine has used its transfers, EINVAL for a value that is out of range.
    """
    instance("engine", Engine, engine)
    types = ffi.new("char[]", text("file_systems", file_systems))
    options = {
        "chunk_bytes": unsigned("chunk_bytes", chunk_bytes),
        "pinned_bytes": unsigned("pinned_bytes", pinned_bytes),
        "workers": signed("workers", workers),
        "fastpath": choice("fastpath", SWITCHES, fastpath),
        "file_systems": types,
    }
    check(lib.gpufs_io_configure(engine._handle, ffi.new("gpufs_io_options *", options)))


def fastpath_probe(driver: str) -> list[str]:
    """Return why a driver has no fastpath for any file. Loads the vendor's libraries if they are installed.

    Parameters
    ----------
    driver
        "host", "cuda" or "hip".

    Returns
    -------
    list of str
        Names as of :func:`refusal_names`; empty if it has a fastpath.
    """
    name = ffi.new("char[]", text("driver", driver))
    return refusal_names(int(result_of("uint32_t *", lib.gpufs_fastpath_probe, name)))


def refusal_names(mask: int) -> list[str]:
    """Return why the fastpath did not take a request.

    Parameters
    ----------
    mask
        The bits of the refusals.

    Returns
    -------
    list of str
        Their names.
    """
    mask = unsigned("mask", mask)
    bits = [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return [_REFUSALS[bit] if bit < len(_REFUSALS) else f"bit {bit}" for bit in bits]


class Trace(Closing):
    """Records the whole process from its creation to close(), or the end of ``with``.

    docs/internals/trace-records.md describes the records.

    Raises
    ------
    EngineError
        EBUSY if a trace is being recorded already.
    """

    __slots__ = ("_open", "_owner")

    def __init__(self) -> None:
        check(lib.gpufs_trace_start())
        self._open = True
        self._owner = os.getpid()

    def read(self, size: int) -> bytes:
        """Take records out, those of each thread in order.

        Parameters
        ----------
        size
            The most bytes to return.

        Returns
        -------
        bytes
            The next part of the stream, a multiple of 64 bytes. Empty if there are no records now.
        """
        if not self._open:
            return b""
        space = ffi.new("char[]", unsigned("size", size))
        data: bytes = ffi.buffer(space, result_of(NUMBER, lib.gpufs_trace_read, space, size))[:]
        return data

    def close(self) -> None:
        """End the recording and drop what has not been read. Does nothing if it has ended, and in a forked child."""
        if self._open and self._owner == os.getpid():
            self._open = False
            check(lib.gpufs_trace_stop())
