"""The GPU benchmark: files to device memory and back, by gpufs, by other libraries, and at the machine's own limits.

Run it by ``make bench-gpu`` (scripts/bench-gpu), or as ``.venv/bin/python bench/gpu/run.py``; --help shows the options.
All of it takes less than ten minutes (--budget): rows that do not fit are skipped with a message. Each row has a
time limit, too (--limit). The JSON is rewritten after each row, so a run that is killed keeps its measurements.

    scripts/bench-gpu --only 'gpufs cp,pinned'      rows in whose "group: name" one of these occurs
    scripts/bench-gpu --gib 4 --repeat 3            a quick look

Each row is the wall-clock time of a whole operation, including the start of a command. The first run is a warm-up and
reported separately; the rate is the median of the others, in GB/s (10^9 bytes). A ratio compares it with the reference
row, measured in the same run. Libraries that are not installed are skipped with a message.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import in_place
import loaders
import peaks
import peers
from libcuda import GIB, MIB, Cuda, CudaError

REPOSITORY = Path(__file__).resolve().parents[2]
GPUFS = [str(REPOSITORY / ".venv" / "bin" / "gpufs")]


@dataclass
class Row:
    """One measured operation."""

    group: str
    name: str
    bytes: int
    warm_up_s: float
    runs_s: list[float]
    yardstick: str = ""
    ratio: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return statistics.median(self.runs_s)

    @property
    def rate(self) -> float:
        return self.bytes / self.median_s / 1e9


class Overdue(OSError):
    """A row exceeded its time limit."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises Overdue in a block that takes longer."""

    def ring(number: int, frame: object) -> None:
        raise Overdue(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Bench:
    """Runs measurements one after another and keeps their rows."""

    def __init__(self, args: argparse.Namespace, save: Callable[[Bench], None]) -> None:
        self.repeat: int = args.repeat
        self.seconds: float = args.seconds
        self.limit: float = args.limit
        self.deadline = time.perf_counter() + args.budget
        self.only: list[str] = [word.strip().lower() for word in args.only.split(",") if word.strip()]
        self.save = save
        self.rows: list[Row] = []
        self.left_out: list[str] = []

    def wants(self, *rows: str) -> bool:
        """Whether any of these "group: name" is to be measured."""
        return not self.only or any(word in row.lower() for word in self.only for row in rows)

    def measure(
        self,
        group: str,
        name: str,
        size: int,
        work: Callable[[], object],
        *,
        prepare: Callable[[], object] | None = None,
        yardstick: str = "",
        repeat: int | None = None,
    ) -> Row | None:
        """Runs work() once to warm up and then `repeat` times; less often, at least twice, when it takes long.

        work may return the seconds it took, where they are not those of the whole call.
        """
        if not self.wants(f"{group}: {name}"):
            return None
        left = self.deadline - time.perf_counter()
        if left < 1:
            self.skip(f"{group}: {name}: no time is left (--budget)")
            return None
        times: list[float] = []
        began = time.perf_counter()
        wanted = self.repeat if repeat is None else repeat
        try:
            with limited(min(left, self.limit)):
                while len(times) < wanted + 1:
                    if len(times) > 2 and time.perf_counter() - began > self.seconds:
                        break
                    if prepare is not None:
                        prepare()
                    start = time.perf_counter()
                    result = work()
                    elapsed = time.perf_counter() - start
                    times.append(result if isinstance(result, float) else elapsed)
        except Overdue as error:
            if len(times) < 2:
                self.skip(f"{group}: {name}: {error}")
                return None
        except (OSError, subprocess.SubprocessError, CudaError, RuntimeError, MemoryError) as error:
            self.skip(f"{group}: {name}: failed: {describe(error)}")
            return None
        row = Row(group, name, size, times[0], times[1:], yardstick)
        self.rows.append(row)
        print(f"  {name:<44} {row.rate:8.2f} GB/s   {row.median_s * 1e3:10.1f} ms   n={len(row.runs_s)}", flush=True)
        self.save(self)
        return row

    def skip(self, line: str) -> None:
        self.left_out.append(line)
        print(f"  left out: {line}", flush=True)

    def section(self, title: str) -> None:
        print(f"\n{title}", flush=True)

    def rate(self, name: str) -> float | None:
        rates = [row.rate for row in self.rows if row.name == name]
        return max(rates) if rates else None

    def best(self, group: str, name: str, prefix: str) -> None:
        """Adds the best of the group's rows whose name starts with prefix, for comparison."""
        found = [row for row in self.rows if row.group == group and row.name.startswith(prefix)]
        if found:
            top = max(found, key=lambda row: row.rate)
            self.rows.append(Row(group, name, top.bytes, top.warm_up_s, top.runs_s, notes={"is": top.name}))

    def finish(self) -> None:
        for row in self.rows:
            against = self.rate(row.yardstick) if row.yardstick else None
            row.ratio = row.rate / against if against else None


def describe(error: BaseException) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        text = (error.stderr or error.stdout or b"").decode(errors="replace").strip().splitlines()
        return f"{' '.join(map(str, error.cmd))[:80]}: exit code {error.returncode}: {text[-1] if text else ''}"
    return f"{type(error).__name__}: {error}"


def command(*words: str | Path, timeout: float = 300, stdin: Any = subprocess.DEVNULL) -> str:
    done = subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=timeout, stdin=stdin)
    return done.stdout.decode(errors="replace")


def drop_caches(path: Path) -> None:
    """Drops the file's pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def warm_cache(path: Path) -> None:
    peaks.read_file(path, 8, False)


def make_file(path: Path, size: int) -> None:
    """A file of `size` bytes that is a valid safetensors file too: one header page, then tensors of at most 1 GiB."""
    data = size - 4096
    tensors = {}
    for index, offset in enumerate(range(0, data, GIB)):
        end = min(offset + GIB, data)
        tensors[f"t{index}"] = {"dtype": "U8", "shape": [end - offset], "data_offsets": [offset, end]}
    header = json.dumps(tensors).encode().ljust(4096 - 8)
    if len(header) != 4096 - 8:
        raise ValueError("too many tensors for one page of header")
    block = os.urandom(64 * MIB)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        while (left := size - file.tell()) > 0:
            file.write(block[:left] if left < len(block) else block)
        file.flush()
        os.fsync(file.fileno())


class Mounted:
    """A gpufs mount of this benchmark's own."""

    def __init__(self, path: Path, backing: dict[str, Path]) -> None:
        self.path = path
        self.device = path / "gpu0"
        words = [f"--backing={name}={folder}" for name, folder in backing.items()]
        path.mkdir(parents=True, exist_ok=True)
        command(*GPUFS, "mount", path, "--driver", "cuda", *words, timeout=120)

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.path / ".gpufs" / "status").read_text()))
        return {}

    def close(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            command(*GPUFS, "umount", self.path, timeout=60)
            self.path.rmdir()


@contextlib.contextmanager
def mounted(bench: Bench, path: Path, backing: dict[str, Path]) -> Iterator[Mounted | None]:
    try:
        mount = Mounted(path, backing)
    except (subprocess.SubprocessError, OSError) as error:
        bench.skip(f"everything through a mount: {describe(error)}")
        yield None
        return
    try:
        yield mount
    finally:
        mount.close()


def module(bench: Bench, name: str) -> Any | None:
    """A library to compare with, if it can be imported."""
    try:
        return __import__(name)
    except Exception as error:  # noqa: BLE001  an import may fail in any way
        bench.skip(f"{name}: {describe(error)}")
        return None


THREADS = (1, 4, 16)


def measure_peaks(bench: Bench, args: argparse.Namespace, cuda: Cuda, path: Path, tmpfs: Path) -> None:
    size = args.size
    bench.section("The machine itself")
    device = peaks.DevicePeaks(cuda)
    address = device.allocate(size)
    bench.measure("peak", "pinned copies, in", size, lambda: device.copy_in(address, size))
    bench.measure("peak", "pinned copies, out", size, lambda: device.copy_out(address, size))
    if args.within * 2 <= size:
        half = args.within
        bench.measure("peak", "one cuMemcpyDtoD", half, lambda: device.copy_within(address + half, address, half))
    device.free(address)
    device.close()
    warm_cache(path)
    for count in THREADS:
        name = f"page cache read, {count} threads"
        bench.measure("peak", name, size, functools.partial(peaks.read_file, path, count, False))
    bench.best("peak", "page cache read", "page cache read, ")
    if not args.no_cold:
        for count in (1, 4, 8, 16):
            bench.measure(
                "peak",
                f"O_DIRECT read, {count} threads",
                size,
                functools.partial(peaks.read_file, path, count, True),
                prepare=lambda: drop_caches(path),
                repeat=args.cold_repeat,
            )
        bench.best("peak", "O_DIRECT read", "O_DIRECT read, ")
    target, written = tmpfs / "peak", min(size, args.slow_size)
    for count in THREADS:
        bench.measure(
            "peak",
            f"tmpfs write, {count} threads",
            written,
            functools.partial(peaks.write_file, target, written, count),
            prepare=lambda: target.unlink(missing_ok=True),
        )
    target.unlink(missing_ok=True)
    bench.best("peak", "tmpfs write", "tmpfs write, ")


def measure_engine(bench: Bench, args: argparse.Namespace, path: Path, tmpfs: Path) -> None:
    """gpufs as a library, without a mount."""
    from gpufs import engine as gpufs
    from gpufs import statistics as counters

    size = args.size
    bench.section("gpufs.engine")
    target = tmpfs / "engine"
    with gpufs.Engine("cuda") as engine, gpufs.BackingFile.open(engine, path) as file:
        served: dict[str, Any] = {}

        def load(buffer: Any) -> None:
            with gpufs.Transfer("load", file, buffer, size=size) as transfer:
                if transfer.finish() != size:
                    raise OSError("the load came out short")
                served.update(asdict(transfer.progress()))

        def load_fresh() -> None:
            with gpufs.Buffer(engine) as fresh:
                load(fresh)

        with gpufs.Buffer(engine) as buffer:
            warm_cache(path)
            hot = bench.measure("load hot", "gpufs.engine", size, lambda: load(buffer), yardstick="pinned copies, in")
            if hot is not None:
                hot.notes["progress"] = dict(served)
            bench.measure("load hot", "gpufs.engine, fresh buffer", size, load_fresh, yardstick="pinned copies, in")
            if not args.no_cold:
                bench.measure(
                    "load cold",
                    "gpufs.engine, cold",
                    size,
                    lambda: load(buffer),
                    prepare=lambda: drop_caches(path),
                    yardstick="O_DIRECT read",
                    repeat=args.cold_repeat,
                )
                warm_cache(path)

            if buffer.info.size < size and bench.wants("store tmpfs: gpufs.engine, store"):
                load(buffer)

            def store() -> None:
                with gpufs.BackingFile.open(engine, target, "w") as out:
                    if out.write(buffer, size) != size:
                        raise OSError("the store came out short")

            stored = bench.measure(
                "store tmpfs",
                "gpufs.engine, store",
                size,
                store,
                prepare=lambda: target.unlink(missing_ok=True),
                yardstick="tmpfs write",
            )
            if stored is not None and target.exists():
                same = subprocess.run(["cmp", str(path), str(target)], check=False).returncode == 0
                print(f"  the stored file {'equals' if same else 'DIFFERS FROM'} the loaded one")
                if not same:
                    bench.skip("gpufs.engine: THE STORED FILE DIFFERS FROM THE LOADED ONE")
        target.unlink(missing_ok=True)
        (hot or Row("", "", 0, 0, [1])).notes["statistics"] = counters.parse(engine.statistics_read())
    measure_arrays(bench, args)


def measure_arrays(bench: Bench, args: argparse.Namespace) -> None:
    """A program's own memory: a numpy array of 1 GiB to a buffer and back, locked and not."""
    rows = [f"array {way}: numpy, {kind}" for way in ("in", "out") for kind in ("locked", "not locked")]
    if not bench.wants(*rows):
        return
    if (numpy := module(bench, "numpy")) is None:
        return
    from gpufs import engine as gpufs
    from gpufs import statistics as counters

    size = min(GIB, args.size)
    array = numpy.empty(size, dtype=numpy.uint8)
    array[:] = 1
    with gpufs.Engine("cuda", lock_policy="off") as engine, gpufs.Buffer(engine) as buffer:

        def detour() -> int:
            found = counters.parse(engine.statistics_read())
            pageable = found["devices"][0]["backends"]["pageable"]
            return int(pageable["in"]["bytes"] + pageable["out"]["bytes"] + found["gauges"]["bounce_pinned_bytes"])

        for kind in ("locked", "not locked"):
            with contextlib.ExitStack() as stack:
                if kind == "locked":
                    began = time.perf_counter()
                    stack.enter_context(gpufs.HostLock(engine, array))
                    locking = time.perf_counter() - began
                for way, move in (("in", buffer.write), ("out", buffer.read)):
                    row = bench.measure(
                        f"array {way}", f"numpy, {kind}", size, functools.partial(move, 0, array),
                        yardstick=f"pinned copies, {way}",
                    )  # fmt: skip
                    if row is not None and kind == "locked":
                        row.notes |= {"detour_bytes": detour(), "lock_seconds": locking}
                        if detour():
                            bench.skip(f"array {way}: {detour()} BYTES OF LOCKED MEMORY TOOK A DETOUR")


def measure_mount(bench: Bench, args: argparse.Namespace, mount: Mounted, path: Path, tmpfs: Path) -> None:
    size, device = args.size, mount.device
    pinned_in = "pinned copies, in"

    def remove(*paths: Path) -> Callable[[], None]:
        def work() -> None:
            for one in paths:
                one.unlink(missing_ok=True)

        return work

    work: Callable[[], object]
    words: list[str | Path]
    inside = mount.path / "backing/data" / path.name
    loads: list[tuple[str, Callable[[Path], object]]] = [
        ("cp from backing/", lambda to: command("cp", inside, to)),
        ("gpufs cp", lambda to: command(*GPUFS, "cp", path, to)),
    ]

    bench.section("Through the mount: loads")
    file = device / "loaded"
    warm_cache(path)
    for name, load in loads:
        work = functools.partial(load, file)
        bench.measure("load hot", name, size, work, prepare=remove(file), yardstick=pinned_in)
        bench.measure("load hot", f"{name}, existing file", size, work, yardstick=pinned_in)
    small = args.slow_size
    cut = [f"count={small}", "iflag=fullblock,count_bytes", "status=none"]
    for block in ("1M", "8M"):
        words = ["dd", f"if={path}", f"of={device / 'dd'}", f"bs={block}", *cut]
        work = functools.partial(command, *words)
        bench.measure("load hot", f"dd bs={block}", small, work, prepare=remove(device / "dd"), yardstick=pinned_in)
        words = [*words, "conv=notrunc"]
        work = functools.partial(command, *words)
        bench.measure("load hot", f"dd bs={block}, existing file", small, work, yardstick=pinned_in)
    remove(device / "dd")()
    tiny = path.parent / "tiny"
    tiny.write_bytes(bytes(1 << 20))
    work = functools.partial(command, *GPUFS, "cp", tiny, device / "tiny")
    bench.measure("start", "gpufs cp of 1 MiB", 1 << 20, work)
    bench.measure("start", "python", 1 << 20, functools.partial(command, sys.executable, "-c", ""))
    remove(device / "tiny")()
    if not args.no_cold:
        for name, load in loads:
            bench.measure(
                "load cold",
                f"{name}, cold",
                size,
                functools.partial(load, file),
                prepare=lambda: drop_caches(path),
                yardstick="O_DIRECT read",
                repeat=args.cold_repeat,
            )
        warm_cache(path)

    if not file.exists():
        command(*GPUFS, "cp", path, file)
    bench.section("Through the mount: stores to tmpfs")
    target = tmpfs / "stored"
    stores: list[tuple[str, Path, Callable[[Path], object]]] = [
        ("cp to backing/", mount.path / "backing/shm" / target.name, lambda to: command("cp", file, to)),
        ("gpufs cp, store", target, lambda to: command(*GPUFS, "cp", file, to)),
    ]
    for name, to, store in stores:
        work = functools.partial(store, to)
        row = bench.measure("store tmpfs", name, size, work, prepare=remove(to), yardstick="tmpfs write")
        if row is not None and subprocess.run(["cmp", str(path), str(target)], check=False).returncode != 0:
            bench.skip(f"{name}: THE STORED FILE DIFFERS FROM THE LOADED ONE")
    remove(target)()
    words = ["dd", f"if={file}", f"of={target}", "bs=1M", *cut]
    work = functools.partial(command, *words)
    bench.measure("store tmpfs", "dd bs=1M, store", small, work, prepare=remove(target), yardstick="tmpfs write")
    remove(target)()

    bench.section("Through the mount: reads and writes of many")
    for count in (1, 8):
        bench.measure("mount", f"{count} dd, read bs=1M", small, functools.partial(many_reads, file, count, small))
        work = functools.partial(many_writes, device, count, small)
        bench.measure("mount", f"{count} dd, write bs=1M", small, work)

    bench.section("Device to device")
    if not bench.wants("device: one copy_file_range", "device: cp in the mount"):
        remove(file)()
        return
    within = args.within
    with open(device / "source", "wb") as out:
        out.truncate(within)
    command("dd", f"if={file}", f"of={device / 'source'}", "bs=8M", "conv=notrunc", f"count={within}",
            "iflag=fullblock,count_bytes", "status=none")  # fmt: skip
    copy = device / "copy"
    command("cp", device / "source", copy)
    source = os.open(device / "source", os.O_RDONLY)
    destination = os.open(copy, os.O_WRONLY)

    def one_call() -> None:
        done = os.copy_file_range(source, destination, within, 0, 0)
        if done != within:
            raise OSError(f"copy_file_range moved {done} of {within} bytes")

    bench.measure("device", "one copy_file_range", within, one_call, yardstick="one cuMemcpyDtoD")
    bench.measure(
        "device",
        "one copy_file_range, fresh file",
        within,
        one_call,
        prepare=lambda: os.truncate(copy, 0),
        yardstick="one cuMemcpyDtoD",
    )
    os.close(source)
    os.close(destination)
    words = ["cp", device / "source", copy]
    bench.measure("device", "cp in the mount", within, functools.partial(command, *words), yardstick="one cuMemcpyDtoD")
    remove(device / "source", copy, file)()


def many_reads(file: Path, count: int, size: int) -> None:
    part = size // count
    wait_all([
        subprocess.Popen(["dd", f"if={file}", "of=/dev/null", "bs=1M", f"skip={index * part}", f"count={part}",
                          "iflag=skip_bytes,count_bytes,fullblock", "status=none"])
        for index in range(count)
    ])  # fmt: skip


def many_writes(device: Path, count: int, size: int) -> float:
    files = [device / f"many-{index}" for index in range(count)]
    start = time.perf_counter()
    wait_all([
        subprocess.Popen(["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={size // count // MIB}", "status=none"])
        for file in files
    ])  # fmt: skip
    elapsed = time.perf_counter() - start
    for file in files:
        file.unlink()
    return elapsed


def wait_all(processes: list[subprocess.Popen[bytes]]) -> None:
    codes = [process.wait(timeout=300) for process in processes]
    if any(codes):
        raise OSError(f"dd ended with {codes}")


def measure_loaders(bench: Bench, args: argparse.Namespace, tmpfs: Path) -> None:
    """Hot loads of one file in tmpfs by gpufs, by other libraries and at the host's limits, interleaved."""
    names = [name for name in loaders.NAMES if bench.wants(f"interleaved: {name}")]
    if not names:
        return
    bench.section("Hot loads from tmpfs, interleaved")
    size = min(args.size, 8 * GIB)
    path = tmpfs / "by-turns.safetensors"
    make_file(path, size)
    try:
        with limited(max(1.0, min(bench.deadline - time.perf_counter(), 4 * bench.limit))):
            first, later = loaders.measure(path, names, args.repeat, args.firsts, bench.skip)
    except Overdue as error:
        bench.skip(f"interleaved: {error}")
        return
    finally:
        path.unlink(missing_ok=True)
    for name, times in later.items():
        notes = {"version": loaders.version(name)}
        row = Row("interleaved", name, size, statistics.median(first[name]), times, loaders.PINNED, notes=notes)
        bench.rows.append(row)
    print(loaders.table(size, first, later), flush=True)
    bench.save(bench)


def measure_others(bench: Bench, args: argparse.Namespace, path: Path, tmpfs: Path) -> None:
    """Other ways to get a file into device memory, from Python."""
    size, pinned_in = args.size, "pinned copies, in"
    bench.section("Other libraries")
    warm_cache(path)
    kvikio = module(bench, "kvikio.defaults")
    cupy = module(bench, "cupy")
    if kvikio is not None and cupy is not None:
        array = cupy.empty(size, dtype=cupy.uint8)

        def set_threads(count: int) -> None:
            kvikio.defaults.set({"num_threads": count, "task_size": 4 * MIB})

        def kvikio_read() -> None:
            with kvikio.CuFile(str(path), "r") as file:
                if file.read(array) != size:
                    raise OSError("a short read")

        def kvikio_write() -> None:
            with kvikio.CuFile(str(tmpfs / "kvikio"), "w") as file:
                if file.write(array) != size:
                    raise OSError("a short write")

        clear = functools.partial((tmpfs / "kvikio").unlink, missing_ok=True)
        for count in (4, 16):
            set_threads(count)
            name = f"KvikIO store, {count} threads"
            bench.measure("store tmpfs", name, size, kvikio_write, prepare=clear, yardstick="tmpfs write")
        clear()
        if not args.no_cold:
            bench.measure(
                "load cold",
                "KvikIO, cold, 16 threads",
                size,
                kvikio_read,
                prepare=lambda: drop_caches(path),
                yardstick="O_DIRECT read",
                repeat=1,
            )
            warm_cache(path)
        del array
        cupy.get_default_memory_pool().free_all_blocks()

    torch = module(bench, "torch")
    if torch is not None:

        def torch_load() -> None:
            storage = torch.from_file(str(path), shared=True, size=args.slow_size, dtype=torch.uint8)
            storage.cuda()
            torch.cuda.synchronize()

        bench.measure("load hot", "torch, from an mmap", args.slow_size, torch_load, yardstick=pinned_in)
        torch.cuda.empty_cache()


def report(bench: Bench, environment: dict[str, Any]) -> str:
    lines = [f"{key}: {value}" for key, value in environment.items() if isinstance(value, str | int | float)]
    group = ""
    for row in sorted(bench.rows, key=lambda row: list(dict.fromkeys(r.group for r in bench.rows)).index(row.group)):
        if row.group != group:
            group = row.group
            lines += ["", f"{group:<44} {'GB/s':>8} {'median ms':>10} {'warm-up ms':>11} {'n':>3}  ratio"]
        ratio = f"{row.ratio:.2f} of {row.yardstick}" if row.ratio is not None else ""
        name = f"{row.name} (= {row.notes['is']})" if "is" in row.notes else row.name
        lines.append(
            f"  {name:<42} {row.rate:8.2f} {row.median_s * 1e3:10.1f} {row.warm_up_s * 1e3:11.1f}"
            f" {len(row.runs_s):3}  {ratio}"
        )
    if bench.left_out:
        lines += ["", "left out:", *[f"  {line}" for line in bench.left_out]]
    return "\n".join(lines)


def size_of(text: str) -> int:
    units = {"K": 1 << 10, "M": MIB, "G": GIB}
    text = text.upper().removesuffix("B").removesuffix("I")
    value = int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
    if value <= 0 or value % MIB:
        raise argparse.ArgumentTypeError("a size is a multiple of 1 MiB, like 16GiB")
    return value


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Files to device memory and back, by gpufs and by others.")
    parser.add_argument("--size", type=size_of, default=16 * GIB, help="of the file (16GiB)")
    parser.add_argument("--gib", type=int, metavar="N", help="the same as --size NGiB, and no other size larger")
    parser.add_argument("--only", default="", metavar="ROW,...", help='rows with one of these in their "group: name"')
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all rows together (540)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a row, before it is given up (60)")
    parser.add_argument("--slow-size", type=size_of, default=4 * GIB, help="for ways that are known to be slow (4GiB)")
    parser.add_argument("--within", type=size_of, default=8 * GIB, help="for copies on the device (8GiB)")
    parser.add_argument("--repeat", type=int, default=5, help="runs beside the warm-up (5)")
    parser.add_argument("--firsts", type=int, default=3, help="processes whose first load is timed (3)")
    parser.add_argument("--cold-repeat", type=int, default=3, help="the same for cold files (3)")
    parser.add_argument("--seconds", type=float, default=12.0, help="end a row early once it has taken so long (12)")
    parser.add_argument("--data", type=Path, default=Path("/var/tmp"), help="a folder on a disk (/var/tmp)")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs (/dev/shm)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results", help="where the JSON goes")
    parser.add_argument("--no-cold", action="store_true", help="leave cold files out")
    parser.add_argument("--no-others", action="store_true", help="leave other libraries out")
    args = parser.parse_args(arguments)
    if args.gib is not None:
        args.size = args.gib * GIB
        args.slow_size = min(args.slow_size, args.size)
        args.within = min(args.within, args.size)
    return args


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    try:
        cuda = Cuda()
    except (OSError, CudaError) as error:
        print(f"bench-gpu: no GPU can be used here: {error}", file=sys.stderr)
        return 1
    began = time.perf_counter()
    environment: dict[str, Any] = {
        "gpu": cuda.name(),
        "driver": cuda.version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB),
        "disk": command("stat", "-f", "-c", "%T", args.data).strip(),
        "file_bytes": args.size,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    result = args.output / f"gpu-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}.json"

    def save(bench: Bench) -> None:
        bench.finish()
        environment["seconds"] = round(time.perf_counter() - began)
        rows = [asdict(row) | {"rate_gbps": row.rate, "median_s": row.median_s} for row in bench.rows]
        content = {"environment": environment, "rows": rows, "left_out": bench.left_out}
        fresh = result.with_suffix(".new")
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        fresh.rename(result)
        result.with_suffix(".txt").write_text(report(bench, environment) + "\n")

    bench = Bench(args, save)
    folder = args.data / f"gpufs-bench-{os.getpid()}"
    tmpfs = args.tmpfs / f"gpufs-bench-{os.getpid()}"
    folder.mkdir()
    tmpfs.mkdir()
    path = folder / "data.safetensors"
    try:
        make_file(path, args.size)
        measure_peaks(bench, args, cuda, path, tmpfs)
        measure_engine(bench, args, path, tmpfs)
        with mounted(bench, folder / "mnt", {"data": folder, "shm": tmpfs}) as mount:
            if mount is not None:
                measure_mount(bench, args, mount, path, tmpfs)
                peers.measure_peers(bench, path, mount.path, args.size, command, GPUFS)
                in_place.measure_attach(bench, mount.device)
                if not args.no_others:
                    in_place.measure_tensors(
                        bench, path, mount.device, lambda model, file: command(*GPUFS, "cp", model, file)
                    )
                environment["status"] = mount.status()
        if not args.no_others:
            measure_loaders(bench, args, tmpfs)
            measure_others(bench, args, path, tmpfs)
    finally:
        shutil.rmtree(tmpfs, ignore_errors=True)
        if not os.path.ismount(folder / "mnt"):
            shutil.rmtree(folder, ignore_errors=True)
    save(bench)
    print("\n" + report(bench, environment))
    print(f"\n{result}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
