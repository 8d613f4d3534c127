"""gpufs trace: what it records, that the file is consistent, and its failures."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from errno import EBUSY
from pathlib import Path
from typing import Any

import pytest
from support import fake_gpu
from support.data import MIB
from support.mounting import GPUFS, REPOSITORY, GpufsMount, Mounter
from support.processes import PATIENCE, links_of, run, wait_until

from gpufs import engine

Event = dict[str, Any]


@contextlib.contextmanager
def recording(
    mount: GpufsMount, path: Path, how: signal.Signals = signal.SIGINT, *, by: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A recorder that is recording, started by a program. It is interrupted at the end unless it has ended."""
    command = [*by, *GPUFS, "trace", str(mount.path), "-o", str(path)]
    recorder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: records(recorder.pid) or recorder.poll() is not None, 30, "the recording to begin")
        yield recorder
        if recorder.poll() is None:
            recorder.send_signal(how)
        assert recorder.wait(PATIENCE) == 0
    finally:
        recorder.kill()
        recorder.communicate()


def records(process: int) -> bool:
    """Whether a process records, found without opening the file, which would begin a recording."""
    with contextlib.suppress(OSError):
        return any(link.endswith(".gpufs/trace") for link in links_of(process).values())
    return False


def busy(mount: GpufsMount) -> bool:
    """Whether a recording is in progress."""
    try:
        os.close(os.open(mount.path / ".gpufs/trace", os.O_RDONLY))
    except OSError as error:
        if error.errno != EBUSY:
            raise
        return True
    return False


def moved(mount: GpufsMount) -> dict[str, int]:
    """Bytes that the mount has counted, which it does after it has recorded their spans."""
    return {flow: mount.moved(flow)["mount"]["bytes"] for flow in ("in", "out")}


def checked(path: Path) -> list[Event]:
    """The spans of a trace, after a strict check of the whole file."""
    text = path.read_text()
    content = json.loads(text)
    assert set(content) == {"displayTimeUnit", "traceEvents", "otherData"}
    spans: list[Event] = []
    open_phases: dict[tuple[str, str], Event] = {}
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    for event in content["traceEvents"]:
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                processes.add(event["pid"])
            else:
                assert event["name"] == "thread_name"
                named.add((event["pid"], event["tid"]))
            assert event["args"]["name"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            spans.append(event)
        elif event["ph"] == "b":
            key = (event["cat"] + event["id"], event["name"])
            assert key not in open_phases
            open_phases[key] = event
        else:
            assert event["ph"] == "e"
            begun = open_phases.pop((event["cat"] + event["id"], event["name"]))
            assert event["ts"] >= begun["ts"]
            spans.append({**begun, "dur": event["ts"] - begun["ts"]})
    assert not open_phases
    assert {event["pid"] for event in spans} <= processes
    check_nesting(event for event in spans if event["ph"] == "X")
    return spans


def check_nesting(spans: Iterable[Event]) -> None:
    """On one track a span lies within another or beside it. Times have a thousandth of a microsecond."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for span in spans:
        tracks[span["pid"], span["tid"]].append(span)
    for track in tracks.values():
        ends: list[float] = []
        for span in sorted(track, key=lambda span: (span["ts"], -span["dur"])):
            while ends and ends[-1] <= span["ts"] + 0.0005:
                ends.pop()
            end = span["ts"] + span["dur"]
            assert not ends or end <= ends[-1] + 0.0015, f"{span} sticks out"
            ends.append(end)


def called(spans: Iterable[Event], name: str) -> list[Event]:
    return [span for span in spans if span["name"] == name]


def overlap(one: Event, other: Event) -> float:
    """Microseconds in which both were."""
    return float(min(one["ts"] + one["dur"], other["ts"] + other["dur"]) - max(one["ts"], other["ts"]))


# ---- what is recorded ----


def test_reads_and_writes_of_the_mount(mount: Mounter, tmp_path: Path) -> None:
    own = mount()
    path = tmp_path / "trace.json"
    with recording(own, path, signal.SIGTERM):
        (own.device / "file").write_bytes(bytes(3 * MIB))
        (own.device / "file").read_bytes()
        inode = (own.device / "file").stat().st_ino
        wait_until(lambda: moved(own) == {"in": 3 * MIB, "out": 3 * MIB}, 10, "all of it to be recorded")
    spans = checked(path)
    for name in ("READ", "WRITE"):
        found = called(spans, name)
        assert sum(span["args"]["size"] for span in found) >= 3 * MIB
        assert {(span["args"]["inode"], span["args"]["device"]) for span in found} == {(inode, "gpu0")}
    replies = called(spans, "reply")
    assert sum(span["args"]["size"] for span in replies) == 3 * MIB


def test_the_end_of_its_terminal_ends_it_unless_nohup_has_started_it(shared_mount: GpufsMount, tmp_path: Path) -> None:
    with recording(shared_mount, tmp_path / "trace.json", signal.SIGHUP):
        pass
    assert json.loads((tmp_path / "trace.json").read_text())
    with recording(shared_mount, tmp_path / "trace.json", by=("nohup",)) as recorder:
        recorder.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            recorder.wait(1)


def test_the_life_of_a_copy(mount: Mounter, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(9 * MIB))
    own = mount("--io-fastpath", "off")
    path = tmp_path / "trace.json"
    with recording(own, path):
        run(*GPUFS, "cp", source, own.device / "file")
        run(*GPUFS, "cp", own.device / "file", tmp_path / "back")
    spans = checked(path)
    transfers = called(spans, "transfer")
    assert [span["args"]["direction"] for span in transfers] == ["in", "out"]
    assert [span["args"]["size"] for span in transfers] == [9 * MIB] * 2
    assert [span["args"]["path"] for span in transfers] == [str(source), str(tmp_path / "back")]
    for transfer, kind in zip(transfers, ("file read", "file write"), strict=True):
        number = transfer["args"]["transfer"]
        own_spans = [span for span in spans if span["args"].get("transfer") == number]
        (queued,), (bind,) = called(own_spans, "queued"), called(own_spans, "bind")
        assert transfer["ts"] == queued["ts"]
        assert queued["ts"] + queued["dur"] == pytest.approx(bind["ts"], abs=0.01)
        moved = called(own_spans, kind)
        assert sum(span["args"]["size"] for span in moved) == 9 * MIB
        for span in moved:
            assert bind["ts"] + bind["dur"] <= span["ts"] + 0.002
            assert span["ts"] + span["dur"] <= transfer["ts"] + transfer["dur"] + 0.002


def test_file_reads_and_device_copies_overlap(mount: Mounter, tmp_path: Path) -> None:
    """On a device that the processor does not address: a vendor's runtime that was built for the tests."""
    source = tmp_path / "w"
    source.write_bytes(os.urandom(4 * MIB) * 32)
    own = mount("--io-fastpath", "off", driver="hip", environment=fake_gpu.hip(), memory=512 * MIB)
    path = tmp_path / "trace.json"
    with recording(own, path):
        run(*GPUFS, "cp", source, own.device / "w")
    spans = checked(path)
    reads, copies = called(spans, "file read"), [s for s in called(spans, "copy to device") if s["pid"] != 1]
    assert sum(span["args"]["size"] for span in reads) == 128 * MIB
    assert sum(span["args"]["size"] for span in copies) == 128 * MIB
    assert not {(s["pid"], s["tid"]) for s in reads} & {(s["pid"], s["tid"]) for s in copies}
    together = [(read, copy) for read in reads for copy in copies if overlap(read, copy) > 0]
    assert any(
        read["args"]["offset"] != copy["args"]["offset"] and read["tid"] == copy["tid"] // 256
        for read, copy in together
    ), "a thread reads its next piece while the device copies its last"
    assert (own.device / "w").read_bytes() == source.read_bytes()


# ---- the command ----


def test_a_recording_of_some_time(shared_mount: GpufsMount, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = run(*GPUFS, "trace", shared_mount.path, "-o", path, "--duration", "300ms")
    assert "spans" in done.stderr
    checked(path)
    assert not busy(shared_mount)
    content = json.loads(run(*GPUFS, "trace", shared_mount.path, "-o", "-", "--duration", "0.1").stdout)
    assert content["otherData"]["mountpoint"] == str(shared_mount.path)


def test_only_one_trace_is_recorded_at_a_time(shared_mount: GpufsMount, tmp_path: Path) -> None:
    with recording(shared_mount, tmp_path / "one.json"):
        done = run(*GPUFS, "trace", shared_mount.path, "-o", tmp_path / "two.json", "--duration", "1", check=False)
        assert done.returncode == 1
        assert "being recorded already" in done.stderr
    assert not (tmp_path / "two.json").exists()


def test_killing_the_recorder_ends_the_recording(shared_mount: GpufsMount, tmp_path: Path) -> None:
    recorder = subprocess.Popen([*GPUFS, "trace", str(shared_mount.path), "-o", str(tmp_path / "trace.json")])
    try:
        wait_until(lambda: records(recorder.pid), 30, "the recording to begin")
    finally:
        recorder.kill()
        recorder.wait(PATIENCE)
    wait_until(lambda: not busy(shared_mount), 10, "the recording to end")


def test_a_trace_is_written_when_the_mount_ends(mount: Mounter, tmp_path: Path) -> None:
    """What was recorded before is written."""
    own = mount()
    path = tmp_path / "trace.json"
    recorder = subprocess.Popen(
        [*GPUFS, "trace", str(own.path), "-o", str(path)], stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    wait_until(lambda: records(recorder.pid) or recorder.poll() is not None, 30, "the recording to begin")
    assert recorder.poll() is None, recorder.communicate()

    def taken() -> int:
        """Bytes of records that it has."""
        (fd,) = [fd for fd, link in links_of(recorder.pid).items() if link.endswith(".gpufs/trace")]
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{recorder.pid}/fdinfo/{fd}").read_text().splitlines())
        return int(fields["pos"])

    # The third look at the latest began when the first write was recorded.
    for number in range(1, 4):
        before = taken()
        (own.device / "file").write_bytes(bytes(MIB))
        wait_until(lambda: moved(own)["in"] == number * MIB, 10, "the write to be recorded")  # noqa: B023
        wait_until(lambda: taken() > before, 10, "the recorder to have looked")  # noqa: B023
    own.signal(signal.SIGKILL)
    _, said = recorder.communicate(timeout=PATIENCE)
    assert recorder.returncode == 1
    assert "the trace ends there" in said
    assert "Traceback" not in said
    assert called(checked(path), "WRITE")


def test_an_output_that_cannot_be_written(shared_mount: GpufsMount, tmp_path: Path) -> None:
    """The error names it."""
    (tmp_path / "folder").mkdir()
    words = {tmp_path / "missing/file": "No such file or directory", tmp_path / "folder": "Is a directory"}
    words[Path("/dev/full")] = "No space left on device"
    for output, why in words.items():
        done = run(*GPUFS, "trace", shared_mount.path, "-o", output, "--duration", "0.05", check=False)
        assert done.returncode == 1
        assert done.stderr == f"gpufs: {output}: {why}\n"
        wait_until(lambda: not busy(shared_mount), 20, "the end of the recording")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_full_standard_error_takes_nothing_from_the_trace(shared_mount: GpufsMount, tmp_path: Path) -> None:
    trace = [*GPUFS, "trace", str(shared_mount.path), "-o", str(tmp_path / "trace"), "--duration", "0.05"]
    assert run("sh", "-c", 'exec "$@" 2>/dev/full', "sh", *trace, check=False).returncode == 0
    checked(tmp_path / "trace")


# ---- the records ----


@pytest.mark.parametrize("content", [b"short", bytes(64), b"\xff" * 300])
def test_a_file_without_records_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    done = run(*GPUFS, "trace", tmp_path / "file", "-o", tmp_path / "trace", check=False)
    line = f"gpufs: {tmp_path}/file: is neither a mount nor a file of trace records\n"
    assert (done.returncode, done.stderr) == (1, line)
    assert not (tmp_path / "trace").exists()


def test_operations_on_streams(tmp_path: Path) -> None:
    """Each has its number and cookie, how long it waited for its stream, and its transfer."""
    (tmp_path / "file").write_bytes(bytes(MIB))
    hold = threading.Event()
    with (
        engine.Engine("host", devices=1, memory_bytes=64 * MIB) as opened,
        engine.BackingFile.open(opened, tmp_path / "file") as file,
        engine.Buffer(opened) as buffer,
        engine.Stream(opened) as stream,
        engine.Batch(opened) as batch,
        engine.Trace() as trace,
    ):
        stream.call(hold.wait)
        held = [engine.Operation("load", file, buffer, 65536, stream=stream, cookie=cookie) for cookie in (7, "text")]
        free = engine.Operation("load", file, buffer, 4096, cookie=1 << 63)
        batch.submit([*held, free])
        time.sleep(0.05)
        hold.set()
        results: list[engine.OperationResult] = []
        while len(results) < 3:
            results += batch.wait(fewest=1)
        assert all(result.error is None for result in results)
        ids = sorted(result.id for result in results)
        (tmp_path / "records").write_bytes(b"".join(iter(lambda: trace.read(1 << 20), b"")))
    output = tmp_path / "trace.json"
    run(*GPUFS, "trace", tmp_path / "records", "-o", output)
    spans = checked(output)
    operations = {span["args"]["operation"]: span for span in called(spans, "operation")}
    waits = {span["args"]["operation"]: span for span in called(spans, "wait for the stream")}
    moves = {span["args"]["operation"]: span for span in called(spans, "move")}
    assert [operations[number]["args"]["cookie"] for number in ids] == [7, 0, 1 << 63]
    assert set(waits) == set(ids[:2])
    assert set(operations) == set(moves) == set(ids)
    transfers = {span["args"]["transfer"] for span in called(spans, "transfer")}
    for number, operation in operations.items():
        assert operation["args"]["path"] == str(tmp_path / "file")
        assert moves[number]["args"]["transfer"] in transfers
        assert operation["ts"] <= moves[number]["ts"]
    for wait in waits.values():
        assert wait["dur"] >= 40_000
        assert wait["ts"] + wait["dur"] <= moves[wait["args"]["operation"]]["ts"] + 0.002


_COPY = """
import sys
from gpufs import engine

with (
    engine.Engine("host", devices=1, memory_bytes=64 << 20) as opened,
    engine.BackingFile.open(opened, sys.argv[1]) as file,
    engine.Buffer(opened) as buffer,
    engine.Transfer("load", file, buffer) as transfer,
):
    transfer.wait()
"""


def test_profilers_see_spans(tmp_path: Path) -> None:
    """A profiler that NVTX loads gets the spans as nested ranges of the domain gpufs."""
    profiler = REPOSITORY / "build/cmake/native/tests/fake_profiler/libgpufs_fake_profiler.so"
    if not profiler.exists():
        pytest.skip("the native tests are not built, or without NVTX's headers")
    file = tmp_path / "file"
    file.write_bytes(bytes(3 * MIB))
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(profiler)}
    done = run(sys.executable, "-c", _COPY, file, env=environment)
    lines = done.stderr.splitlines()
    assert "domain gpufs" in lines
    names = [line.split(", ")[0] for line in lines if line.startswith("range ")]
    assert "range piece of a transfer" in names
    assert lines.count("end of range") == len(names)
