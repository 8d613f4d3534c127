"""`gpufs cp` and gpufs.copy() from web servers: bytes, requests, faults, interruptions and failures."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.cli import fails_here, gpufs, gpufs_here, refused, refused_here
from support.data import GIB, KIB, MIB, assert_same, left, noise
from support.mounting import GPUFS, GpufsMount, Mounter
from support.processes import PATIENCE, run, wait_until
from support.stores import PART, WebServer, is_partition, repeated, web_server

import gpufs as package
from gpufs.client import Cancellation

FOUR_PARTS = noise(4 * PART)


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


@pytest.fixture
def as_s3(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The web server is where s3:// leads."""
    for name, value in credentials(web.url).items():
        monkeypatch.setenv(name, value)


def credentials(url: str) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_ENDPOINT_URL": url}


@pytest.fixture
def other(shared_mount: GpufsMount) -> Iterator[Path]:
    """An empty directory of the second device."""
    path = shared_mount.path / "gpu1" / f"t{os.getpid()}"
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.mark.parametrize("size", [0, 1, PART, 2 * PART + 12345])
def test_a_file_of_a_web_server(root: Path, web: WebServer, size: int) -> None:
    web.files["/models/a b%.bin"] = noise(size)
    done = gpufs_here("cp", "--json", f"{web.url}/models/a%20b%25.bin?signature=secret", root)
    assert_same((root / "a b%.bin").read_bytes(), noise(size))
    assert left(root) == ["a b%.bin"]
    assert (root / "a b%.bin").stat().st_mode & 0o777 == 0o644
    (copy,) = json.loads(done.stdout)["copies"]
    assert (copy["bytes"], copy["method"], copy["source"]) == (size, "remote", f"{web.url}/models/a%20b%25.bin")
    assert is_partition(web.requested("/models/a b%.bin"), size)


def test_a_directory_that_does_not_exist(root: Path, web: WebServer) -> None:
    web.files["/file"] = noise(5)
    for words in [(f"{web.url}/file",), ("-r", f"{web.url}/file")]:
        assert refused_here(*words, f"{root}/new/")
    assert left(root) == []


def test_each_byte_is_requested_once_for_two_destinations(root: Path, other: Path, web: WebServer) -> None:
    size = 4 * PART + 5
    web.files["/file"] = noise(size)
    gpufs_here("cp", f"{web.url}/file", "-t", root, "-t", other)
    for directory in (root, other):
        assert_same((directory / "file").read_bytes(), noise(size))
    assert is_partition(web.requested("/file"), size)


def test_from_python(root: Path, other: Path, web: WebServer) -> None:
    web.files |= {"/one": noise(PART + 9), "/two": noise(3)}
    seen: list[package.CopyProgress] = []
    result = package.copy(f"{web.url}/one", root, progress=seen.append)
    assert (result.destination, result.bytes, result.paths) == (f"{root}/one", PART + 9, {"remote": PART + 9})
    assert all(progress.total == PART + 9 and 0 <= progress.moved <= PART + 9 for progress in seen)
    both = package.copy_files(f"{web.url}/one", [root / "first", other / "second"], progress=seen.append)
    assert [result.bytes for result in both] == [PART + 9, PART + 9]
    assert (seen[-1].moved, seen[-1].total) == (2 * (PART + 9), 2 * (PART + 9))
    package.copy_files([f"{web.url}/one", f"{web.url}/two"], other)
    assert_same((other / "second").read_bytes(), noise(PART + 9))
    assert (other / "two").read_bytes() == noise(3)
    for source, number in [(f"{web.url}/none", errno.ENOENT), ("ftp://server/file", errno.EINVAL)]:
        with pytest.raises(package.CopyError) as failure:
            package.copy(source, root)
        assert failure.value.errno == number
    cancel = Cancellation()
    cancel.cancel()
    with pytest.raises(package.CopyError) as failure:
        package.copy(f"{web.url}/one", root / "new", cancel=cancel)
    assert failure.value.errno == errno.ECANCELED
    assert not (root / "new").exists()


@pytest.mark.parametrize("faults", [["503", "503"], ["short", "short"], ["reset", "503", "short"]], ids=" ".join)
def test_faults_of_the_server_are_retried(root: Path, web: WebServer, faults: list[str]) -> None:
    size = 2 * PART
    web.files["/file"] = noise(size)
    web.faults["/file"] = list(faults)
    gpufs_here("cp", f"{web.url}/file?X-Amz-Credential=signed", root)
    assert_same((root / "file").read_bytes(), noise(size))
    assert not web.faults["/file"]
    if faults == ["short", "short"]:  # the rest of each range is requested, and a chunk that was incomplete
        assert sum(end - start for start, end in web.requested("/file")) < size + PART + 2 * MIB


def test_faults_during_an_upload_are_retried(root: Path, web: WebServer, as_s3: None) -> None:
    """The server takes a multipart upload as S3 does."""
    (root / "file").write_bytes(FOUR_PARTS)
    web.faults["/bucket/key"] = ["503", "reset", "500"]
    gpufs_here("cp", root / "file", "s3://bucket/key")
    assert_same(web.files["/bucket/key"], FOUR_PARTS)
    assert not web.faults["/bucket/key"]


def test_verify_where_an_etag_is_not_a_checksum(root: Path, web: WebServer, as_s3: None) -> None:
    """The bytes are requested again and compared."""
    web.files["/bucket/key"] = noise(2 * PART + 5)
    web.faults["/bucket/key"] = ["reversed"]
    assert "the copy differs: the store's ETag is" in refused_here("--verify", "s3://bucket/key", root)
    assert left(root) == []
    web.requests.clear()
    done = gpufs_here("cp", "--verify", "s3://bucket/key", root)
    assert "its ETag is not its checksum" in done.stderr
    assert sum(end - start for start, end in web.requested("/bucket/key")) == 2 * (2 * PART + 5)
    assert_same((root / "key").read_bytes(), noise(2 * PART + 5))


def test_a_server_that_knows_no_ranges(root: Path, web: WebServer) -> None:
    web.files["/file"] = noise(2 * PART + 3)
    web.ranges = False
    gpufs_here("cp", f"{web.url}/file", root)
    assert_same((root / "file").read_bytes(), noise(2 * PART + 3))
    web.faults["/file"] = ["", "", "", "reset"]  # three requests find out
    gpufs_here("cp", f"{web.url}/file", root / "again")
    assert_same((root / "again").read_bytes(), noise(2 * PART + 3))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_url_as_people_write_it(root: Path, web: WebServer, ranges: bool) -> None:
    web.files["/a \u00fc%"] = noise(5)
    web.ranges = ranges
    gpufs_here("cp", f"{web.url}/a \u00fc%25", root)
    assert (root / "a \u00fc%").read_bytes() == noise(5)


@pytest.mark.parametrize("status", [403, 405])
def test_a_url_that_is_signed_for_get(root: Path, web: WebServer, status: int) -> None:
    web.files["/file"] = noise(MIB)
    web.head = status
    gpufs_here("cp", f"{web.url}/file", root)
    assert_same((root / "file").read_bytes(), noise(MIB))


@pytest.mark.parametrize("fault", ["gone", "more"])
def test_a_failure_keeps_the_old_file(root: Path, web: WebServer, fault: str) -> None:
    web.files["/file"] = noise(3 * PART)
    web.faults["/file"] = ["", fault]
    (root / "file").write_bytes(b"old")
    assert "/file" in refused_here(f"{web.url}/file", root)
    assert (root / "file").read_bytes() == b"old"
    assert left(root) == ["file"]


@pytest.mark.parametrize("size", [0, pytest.param(3, marks=pytest.mark.slow), 3 * PART + 5])
@pytest.mark.parametrize(
    "oddity",
    [
        {"head_length": 0},
        {"head_length": 7},
        {"length": False, "ranges": False},
        {"length": False, "ranges": False, "head": 501},
        {"mirrors": 2},
        {"mirrors": 3, "head": 405},
        {"authorization": "Basic dXNlcjpwQHNz"},
    ],
    ids=["no size", "another size", "no length", "no HEAD", "mirrors", "mirrors without HEAD", "password"],
)
def test_servers_whose_answers_do_not_fit_together(
    root: Path, web: WebServer, oddity: dict[str, Any], size: int
) -> None:
    """A plain request has the file."""
    web.files["/file"] = noise(size)
    vars(web).update(oddity)
    done = gpufs_here("cp", "--json", f"{web.url.replace('//', '//user:p%40ss@')}/file", root)
    assert_same((root / "file").read_bytes(), noise(size))
    (copy,) = json.loads(done.stdout)["copies"]
    assert (copy["bytes"], copy["source"]) == (size, f"{web.url}/file")
    assert left(root) == ["file"]


def test_one_request_for_a_whole_file_begins_again(root: Path, web: WebServer) -> None:
    """The answer after a failure may be of another file."""
    web.head_length, web.ranges = 0, False
    web.files["/file"] = noise(PART + 1)
    web.faults["/file"] = ["", "reset", "503", "short"]
    gpufs_here("cp", f"{web.url}/file", root)
    assert_same((root / "file").read_bytes(), noise(PART + 1)[: (PART + 1) // 2])  # which is all that its length says
    web.faults["/file"] = ["", "gone"]
    assert "does not exist" in refused_here(f"{web.url}/file", root / "other")
    assert left(root) == ["file"]


def test_a_certificate_of_ones_own(root: Path, tmp_path: Path) -> None:
    """The message names the variable with which the copy succeeds."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    (tmp_path / "extensions").write_text("subjectAltName=DNS:localhost\n")
    script = """
        openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 9 -subj /CN=CA \
          -addext basicConstraints=critical,CA:TRUE
        openssl req -newkey rsa:2048 -nodes -keyout key -out request -subj /CN=localhost
        openssl x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -days 9 -out cert -extfile extensions
    """
    run("sh", "-ec", script, cwd=tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with web_server(context) as web:
        web.files |= {"/file": noise(9), "/bucket/key": noise(5)}
        assert "SSL_CERT_FILE" in refused_here(f"{web.url}/file", root)
        trusted = {**os.environ, "SSL_CERT_FILE": str(tmp_path / "ca.pem")}
        gpufs("cp", f"{web.url}/file", root, env=trusted)
        web.head_length, web.ranges = 0, False
        gpufs("cp", f"{web.url}/file", root / "plain", env=trusted)
        web.head_length, web.ranges = None, True
        environment = {**os.environ, **credentials(web.url), "AWS_CA_BUNDLE": str(tmp_path / "ca.pem")}
        gpufs("cp", "s3://bucket/key", root, env=environment)
        environment["AWS_CA_BUNDLE"] = str(tmp_path / "missing.pem")
        assert "missing.pem" in refused("s3://bucket/key", root / "other", env=environment)
    assert left(root) == ["file", "key", "plain"]


def test_a_size_that_no_device_has(root: Path, web: WebServer) -> None:
    web.sizes["/file"] = (1 << 63) - 1
    assert "needs 8.0 EiB" in refused_here(f"{web.url}/file", root)
    assert left(root) == []


def test_what_others_may_read_has_no_secret(root: Path, web: WebServer) -> None:
    web.files["/file"] = FOUR_PARTS
    web.held = 2 * PART
    url = f"{web.url.replace('//', '//user:password@')}/file?X-Amz-Signature=signed"
    with subprocess.Popen([*GPUFS, "cp", "--partial", url, root]) as child:
        wait_until(lambda: part_of(root) == 0b11, PATIENCE, "the first parts")
        stored = os.getxattr(root / ".file.gpufs-part", "user.gpufs-parts")
        child.send_signal(signal.SIGINT)
    assert b"password" not in stored
    assert b"signed" not in stored
    web.released.set()
    web.requests.clear()
    gpufs_here("cp", "--partial", f"{web.url}/file?X-Amz-Signature=again", root)
    assert [start for start, _ in web.requested("/file")] == [2 * PART, 3 * PART]


def test_a_file_that_changes_during_the_copy(root: Path, web: WebServer) -> None:
    """One of both is copied, and never parts of both."""
    old, new = (noise(MIB + 1, seed) * (10 * PART // MIB) for seed in (0, 1))
    web.files["/file"] = old
    web.held = PART
    with subprocess.Popen([*GPUFS, "cp", f"{web.url}/file", root], stderr=subprocess.PIPE, text=True) as child:
        wait_until(lambda: len(web.requests) >= 8, PATIENCE, "the requests")
        web.files["/file"] = new
        web.released.set()
        child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert_same((root / "file").read_bytes(), new)
    assert left(root) == ["file"]


def test_one_destination_that_fails(mount: Mounter, web: WebServer) -> None:
    """The others are complete. Its directory has a limit, which only the copy itself meets."""
    small = mount(memory=96 * MIB, devices=2)
    web.files["/file"] = noise(2 * PART)
    (small.path / "gpu0" / "limited").mkdir()
    gpufs_here("quota", "set", small.path / "gpu0" / "limited", "8M")
    text = refused_here("--partial", f"{web.url}/file", "-t", small.path / "gpu0/limited", "-t", small.path / "gpu1")
    assert "gpu0/limited/file" in text
    assert left(small.path / "gpu0" / "limited") == []
    assert_same((small.path / "gpu1" / "file").read_bytes(), noise(2 * PART))


def test_too_little_space_is_found_out_before_a_request(mount: Mounter, web: WebServer) -> None:
    small = mount(memory=32 * MIB)
    web.files["/file"] = noise(48 * MIB)
    text = refused_here(f"{web.url}/file", small.device)
    assert "needs 48.0 MiB" in text
    assert web.requests == []
    assert left(small.device) == []


# ---- interruptions ----


def part_of(root: Path) -> int:
    """The parts that an incomplete file has, one bit for each."""
    return attribute_of(root / ".file.gpufs-part")


def attribute_of(path: Path) -> int:
    try:
        return int(json.loads(os.getxattr(path, "user.gpufs-parts"))["finished"], 16)
    except OSError:
        return 0


def start_held(web: WebServer, root: Path, *options: str) -> subprocess.Popen[str]:
    """Start a copy of four parts, of which the first two have arrived."""
    web.files["/file"] = FOUR_PARTS
    web.held = 2 * PART
    web.released.clear()
    web.requests.clear()
    command = [*GPUFS, "cp", *options, f"{web.url}/file", str(root)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: part_of(root) == 0b11, PATIENCE, "the first parts")
    return child


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_partial_goes_on_where_a_copy_ended(root: Path, web: WebServer, number: signal.Signals) -> None:
    with start_held(web, root, "--partial") as child:
        child.send_signal(number)
        assert child.wait(PATIENCE) == -number
    assert left(root) == [".file.gpufs-part"]
    web.released.set()
    web.requests.clear()
    done = gpufs_here("cp", "--partial", "--json", f"{web.url}/file", root)
    assert_same((root / "file").read_bytes(), FOUR_PARTS)
    assert left(root) == ["file"]
    assert os.listxattr(root / "file") == ["user.gpufs-source"]
    assert web.requested("/file") == [(part * PART, (part + 1) * PART) for part in (2, 3)]
    assert json.loads(done.stdout)["paths"] == {"remote": 2 * PART, "kept": 2 * PART}


@pytest.mark.parametrize("name", ["n" * 243, "n" * 244, "n" * 255, "\u00e9" * 127])
def test_names_that_leave_no_space_for_that_of_an_incomplete_file(root: Path, web: WebServer, name: str) -> None:
    """Each has an incomplete file of its own, with which another run goes on."""
    url = f"{web.url}/{quote(name)}"
    web.files[f"/{name}"] = FOUR_PARTS
    web.held = 2 * PART
    web.released.clear()
    with subprocess.Popen([*GPUFS, "cp", "--partial", url, str(root)]) as child:

        def has_two_parts() -> bool:
            assert child.poll() is None
            return any(attribute_of(root / part) == 0b11 for part in left(root))

        wait_until(has_two_parts, PATIENCE, "the first parts")
        child.kill()
    web.released.set()
    web.files[f"/{name[:-1]}m"] = noise(10)
    gpufs_here("cp", f"{web.url}/{quote(name[:-1])}m", root)  # does not take the incomplete file of the other one
    done = gpufs_here("cp", "--partial", "--json", url, root)
    assert json.loads(done.stdout)["paths"]["kept"] == 2 * PART
    assert_same((root / name).read_bytes(), FOUR_PARTS)
    assert left(root) == sorted([name, f"{name[:-1]}m"])


@pytest.mark.parametrize(
    "headers",
    [{}, {"ETag": 'W/"1"'}, {"Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}],
    ids=["nothing", "weak", "second"],
)
def test_content_that_may_change_under_one_version(root: Path, web: WebServer, headers: dict[str, str]) -> None:
    """No copy has bytes of two versions: neither one that goes on, nor one during which the file changes."""
    old, new = FOUR_PARTS, noise(4 * PART + 1)[1:]
    web.headers = headers
    web.files["/file"] = old
    web.faults["/file"] = ["", "", *["gone"] * 8]
    gpufs_here("cp", "--partial", f"{web.url}/file", root, check=False)
    web.files["/file"] = new
    web.faults.clear()
    gpufs_here("cp", "--partial", f"{web.url}/file", root)
    assert_same((root / "file").read_bytes(), new)
    web.held = 2 * PART
    web.requests.clear()
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(package.copy, f"{web.url}/file", root / "second")
        wait_until(lambda: copy.done() or len(web.requests) == 4, PATIENCE, "the copy")
        web.files["/file"] = old
        web.released.set()
        copy.result(PATIENCE)
    assert (root / "second").read_bytes() in (old, new)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_limit_of_threads(root: Path, web: WebServer, tmp_path: Path, threads: int) -> None:
    """One is enough for a copy. Without any it fails, and leaves nothing."""
    web.files["/file"] = FOUR_PARTS
    code = f"""#!{sys.executable}
import threading
from gpufs.cli import main
from gpufs.waiting import Workers
left, start = {threads}, threading.Thread.start
def limited(thread):
    global left
    if getattr(thread, "_target", None) and thread._target.__qualname__ == "Workers._work":
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = limited
main()
"""
    program = tmp_path / "gpufs"
    program.write_text(code)
    done = run(sys.executable, program, "cp", f"{web.url}/file", root, check=False)
    assert (done.returncode, "no thread can be started" in done.stderr) == ((0, False) if threads else (1, True))
    assert left(root) == (["file"] if threads else [])


@contextmanager
def silent_server(answers: int, body: bytes = b"") -> Iterator[tuple[str, Callable[[], None]]]:
    """A server that answers so many requests, and is silent then: its URL, and what waits for the silence."""
    length = len(body) or PART
    head = f'HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nAccept-Ranges: bytes\r\nETag: "1"\r\n\r\n'.encode()
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as opened:

        def serve() -> None:
            for number in range(answers + 1):
                connection, _ = server.accept()
                opened.enter_context(connection)
                connection.recv(1 << 16)
                if number < answers:
                    connection.sendall(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body)
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", lambda: thread.join(PATIENCE)


@pytest.mark.parametrize(
    ("how", "answers"),
    [
        ("cp", 0),
        ("copy", 1),
        ("copy_files", 0),
        ("cp up", 0),
        ("cp list", 1),
        *(
            pytest.param(how, answers, marks=pytest.mark.slow)
            for how, answers in [("cp", 1), ("copy", 0), ("copy_files", 1), ("copy up", 0)]
        ),
    ],
)
def test_a_signal_ends_a_copy_whose_server_is_silent(root: Path, how: str, answers: int) -> None:
    """Neither the copy nor the end of the program waits for the server, which answers at first, or never."""
    if "up" in how:
        (root / "up").write_bytes(noise(3))
    with silent_server(answers, page("d/empty", Size=0) * ("list" in how)) as (url, wait_for_silence):
        names: tuple[str, ...] = (f"{root}/up", "s3://bucket/key") if "up" in how else (f"{url}/file", str(root))
        names = ("-r", "s3://bucket/d/", str(root)) if "list" in how else names
        sources = repr([names[0]] if how == "copy_files" else names[0])
        program = f"import gpufs; gpufs.{how.split()[0]}({sources}, {names[1]!r})"
        command = [*GPUFS, "cp", *names] if how.startswith("cp") else [sys.executable, "-c", program]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **credentials(url)}) as child:
            wait_for_silence()
            began = time.monotonic()
            child.send_signal(signal.SIGINT)
            assert child.wait(PATIENCE) == -signal.SIGINT
            assert time.monotonic() - began < 3
    assert left(root) == (["up"] if "up" in how else [])


def test_a_program_that_cancels_a_silent_copy(root: Path) -> None:
    """Its memory is free at once, and its descriptor is closed when the server has ended."""
    cancel = Cancellation()

    def ours() -> list[str]:
        return [name for name in os.listdir("/proc/self/fd") if str(root) in link_of(name)]

    def link_of(name: str) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            return ""

    with silent_server(1) as (url, wait_for_silence):
        copy = ThreadPoolExecutor(1).submit(package.copy, f"{url}/file", root, cancel=cancel)
        wait_for_silence()
        cancel.cancel()
        with pytest.raises(package.CopyError) as caught:
            copy.result(PATIENCE)
        assert caught.value.errno == errno.ECANCELED
        assert left(root) == []
        assert all(os.fstat(int(name)).st_blocks == 0 for name in ours())
    wait_until(lambda: not ours(), PATIENCE, "the descriptor to be closed")


def test_what_a_kill_has_left_is_replaced(root: Path, web: WebServer) -> None:
    """Without --partial, and if the file has changed, the copy starts again."""
    for options, data in [((), FOUR_PARTS), (("--partial",), FOUR_PARTS[::-1])]:
        with start_held(web, root) as child:
            child.kill()
        web.released.set()
        web.files["/file"] = data
        web.requests.clear()
        gpufs_here("cp", *options, f"{web.url}/file", root)
        assert is_partition(web.requested("/file"), len(data))
        assert_same((root / "file").read_bytes(), data)
        assert left(root) == ["file"]


def test_a_file_that_is_replaced_passes_on_its_rights_and_its_pin(root: Path, web: WebServer) -> None:
    """An update of a private and pinned model was readable for all users, and a full device parked it."""
    path = root / "file"
    path.write_bytes(b"old")
    path.chmod(0o600)
    gpufs_here("pin", path)
    web.files["/file"] = b"new"
    gpufs_here("cp", f"{web.url}/file", root)
    assert path.read_bytes() == b"new"
    assert (path.stat().st_mode & 0o777, os.listxattr(path)) == (0o600, ["user.gpufs-pinned", "user.gpufs-source"])


def test_partial_after_a_copy_that_had_started_again(root: Path, web: WebServer) -> None:
    """A copy without --partial removes what was there, and is killed before anything has arrived."""
    with start_held(web, root) as child:
        child.kill()
    web.held = 0
    part = root / ".file.gpufs-part"
    with subprocess.Popen([*GPUFS, "cp", f"{web.url}/file", str(root)]) as child:
        wait_until(lambda: part.stat().st_blocks == 0 and part.stat().st_size, PATIENCE, "an empty file")
        child.kill()
    web.released.set()
    gpufs_here("cp", "--partial", f"{web.url}/file", root)
    assert_same((root / "file").read_bytes(), FOUR_PARTS)
    assert left(root) == ["file"]


def test_a_fifo_is_not_replaced(root: Path, web: WebServer) -> None:
    web.files["/file"] = noise(5)
    os.mkfifo(root / "file")
    assert "is a device, FIFO or socket" in refused_here(f"{web.url}/file", root)
    assert (root / "file").is_fifo()


def test_two_copies_to_one_name(root: Path, web: WebServer) -> None:
    with start_held(web, root) as child:
        assert "another copy to this name is in progress" in refused_here(f"{web.url}/file", root)
        web.released.set()
        assert child.wait(PATIENCE) == 0
    assert_same((root / "file").read_bytes(), FOUR_PARTS)


def test_an_incomplete_file_of_another_user_is_not_used(root: Path, web: WebServer) -> None:
    web.files["/file"] = noise(5)
    (root / ".file.gpufs-part").write_bytes(b"bad")
    os.chown(root / ".file.gpufs-part", 65534, 65534)
    assert "another user's file" in refused_here(f"{web.url}/file", root)
    (root / ".file.gpufs-part").unlink()
    (root / ".file.gpufs-part").symlink_to("/dev/null")
    refused_here(f"{web.url}/file", root)
    assert not (root / "file").exists()


@pytest.mark.slow
def test_random_interruptions(root: Path, other: Path, web: WebServer) -> None:
    """200 of them: a name is never seen with less than the whole content, old or new, and the last copy succeeds."""
    size = 12 * PART + 77
    chance = random.Random(4)
    old, ended, partial = b"", 0, 0
    web.files["/file"] = bytes(size)
    began = time.monotonic()
    gpufs_here("cp", f"{web.url}/file", root)
    took = time.monotonic() - began
    (root / "file").unlink()
    for seed in range(10):
        new = noise(size, seed)
        web.files["/file"] = new
        for _ in range(20):
            options = ["--partial"] if chance.random() < 0.5 else []
            ends = [str(root)] if chance.random() < 0.7 else ["-t", str(root), "-t", str(other)]
            with subprocess.Popen(
                [*GPUFS, "cp", *options, f"{web.url}/file", *ends], stderr=subprocess.DEVNULL
            ) as child:
                time.sleep(chance.uniform(0, took))
                child.send_signal(chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
                ended += child.wait(PATIENCE) != 0
            partial += (root / ".file.gpufs-part").exists()
            for directory in (root, other):
                if (directory / "file").exists():
                    assert (directory / "file").read_bytes() in (old, new)
        gpufs_here("cp", "--partial", f"{web.url}/file", "-t", root, "-t", other)
        for directory in (root, other):
            assert_same((directory / "file").read_bytes(), new)
        old = new
    print(f"{ended} of 200 were interrupted, {partial} times with an incomplete file beside")
    assert ended > 100


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_memory_is_bounded(mount: Mounter, web: WebServer) -> None:
    size = 8 * GIB
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    if int(available.split()[1]) * KIB < size + 2 * GIB:
        pytest.skip("needs 10 GiB of memory")
    big = mount(memory=size + 64 * MIB)
    web.sizes["/file"] = size
    peak = "import resource; print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    copy = f"import subprocess; subprocess.run(['{GPUFS[0]}', 'cp', '{web.url}/file', '{big.device}'], check=True)"
    used = int(run(sys.executable, "-c", f"{copy}\n{peak}", timeout=300).stdout) * KIB
    print(f"{used / MIB:.0f} MiB")
    assert used < 256 * MIB
    with open(big.device / "file", "rb") as file:
        for start in range(0, size, 64 * MIB):
            assert_same(file.read(64 * MIB), repeated(start, start + 64 * MIB), f"at {start}")


# ---- messages ----


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("ftp://server/file", "ROOT"), "ftp:// is not one of s3://"),
        (("http://", "ROOT"), "names no server"),
        (("http://server:x/file", "ROOT"), "is not a URL"),
        (("http://server/directory/", "ROOT"), "names no file"),
        (("http://server/a/%2e%2e", "ROOT"), "names no file"),
        (("s3://", "ROOT"), "names no bucket"),
        (("s3://bucket/a//b", "ROOT"), "has an empty part"),
        (("s3://bucket/../b", "ROOT"), "or one that is . or .."),
        (("hf://model", "ROOT"), "is not like hf://"),
        (("hf://org/model@/file", "ROOT"), "is not like hf://"),
        (("s3://bucket/a", "s3://bucket/b"), "a URL cannot be copied to another"),
        (("ROOT/file", "http://server/file"), "takes no uploads"),
        (("ROOT/file", "hf://org/model/file"), "takes no uploads"),
        (("-", "s3://bucket/key"), "standard input"),
        (("http://server/a", "ROOT/file", "ROOT"), "files and URLs cannot be copied by one command"),
        (("-a", "http://server/a", "ROOT"), "--preserve cannot be used with a URL"),
        (("-p", "http://server/a", "ROOT"), "--preserve cannot be used with a URL"),
        (("--fastpath", "require", "http://server/a", "ROOT"), "--fastpath require cannot be used with a URL"),
        (("ROOT/file", "-t", "s3://bucket/a", "-t", "ROOT"), "a URL is the only destination"),
        (("-T", "s3://bucket/*", "ROOT/new"), "-T takes one SOURCE"),
        (("-e", "", "host:file", "ROOT"), "-e, --remote-gpufs"),
    ],
    ids=str,
)
def test_wrong_names_and_options(root: Path, words: tuple[str, ...], text: str) -> None:
    (root / "file").write_bytes(b"there")
    assert text in fails_here(2, "cp", *(word.replace("ROOT", str(root)) for word in words))
    assert left(root) == ["file"]


@pytest.mark.parametrize(
    ("status", "body", "url", "text"),
    [
        (403, b"", "http://SERVER/file", "access is denied"),
        (401, b"", "http://SERVER/file", "credentials are missing or wrong"),
        (404, b"", "http://SERVER/file", "the file does not exist"),
        (301, b"", "s3://bucket/directory/", "another region: set AWS_REGION"),
        (400, b"", "s3://bucket/file", "AWS_REGION is not the bucket's, or the credentials have expired"),
        (403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>", "s3://bucket/file", "AWS_ACCESS_KEY_ID"),
        (
            400,
            b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-1</Region></Error>",
            "s3://bucket/a/",
            "to eu-1",
        ),
    ],
)
def test_refusals_of_stores(
    root: Path, web: WebServer, as_s3: None, status: int, body: bytes, url: str, text: str
) -> None:
    web.answer = (status, body)
    assert text in refused_here("-r", url.replace("http://SERVER", web.url), root)
    assert left(root) == []
    if url == "s3://bucket/file":
        (root / "file").write_bytes(b"content")
        assert text in refused_here(root / "file", url)


def page(*keys: str, token: str = "", **fields: object) -> bytes:
    """A page of a listing of S3. ``fields``: of each object."""
    what = {"LastModified": "2025-01-01T00:00:00.000Z", "ETag": '"1"', "Size": 5, **fields}
    each = "".join(f"<{name}>{value}</{name}>" for name, value in what.items())
    listed = "".join(f"<Contents><Key>{key}</Key>{each}</Contents>" for key in keys)
    goes_on = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    return f"<ListBucketResult>{goes_on if token else ''}{listed}</ListBucketResult>".encode()


@pytest.mark.parametrize(
    "answer",
    [
        page(*(f"d/{number}" for number in range(100)), token="again"),
        page("d/a", Size=1 << 63),
        page("d/a", Size=1 << 64),
        page("d/a", Size=-1),
        page("d/a", ETag="a&#10;b"),
        page("d/a", ETag="e" * 5000),
        page("d/a", LastModified="today"),
        page("d/" + "n" * 5000),
        page("d/a/../../../x"),
        page("d//etc/x"),
        page("d/a&#1;"),
        page("d/a")[:-30],
        b"\xff<",
        b"",
    ],
    ids=lambda answer: answer[-60:].decode(errors="replace"),
)
def test_a_store_that_lies(root: Path, web: WebServer, as_s3: None, answer: bytes) -> None:
    """It ends the copy, with one line, in which no type of Python is named."""
    web.answer = (200, answer)
    text = refused_here("-r", "s3://bucket/d/", root / "new")
    assert text.startswith("gpufs cp: s3://bucket/")
    assert "Error" not in text
    assert left(root) == []


def test_a_server_that_does_not_exist(root: Path) -> None:
    text = refused_here("http://127.0.0.1:1/file", root)
    assert "onnection refused" in text


def test_a_machine_without_certificates(root: Path) -> None:
    """As an image without ca-certificates."""
    places = dict.fromkeys(("SSL_CERT_FILE", "SSL_CERT_DIR"), "/nowhere")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | places
    environment |= {"AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}
    assert "ca-certificates" in refused("s3://bucket/file", root, env=environment)
    assert left(root) == []


def test_neither_side_on_a_mount(host: Path, web: WebServer) -> None:
    web.files["/file"] = b"content"
    assert "neither of them is on a gpufs mount" in refused_here(f"{web.url}/file", host)
    assert left(host) == []


@pytest.mark.parametrize(
    ("package", "url"),
    [
        ("obstore", "s3://bucket/key"),
        ("obstore", "http://localhost/key"),
        ("huggingface_hub", "hf://org/model/file"),
    ],
)
def test_a_package_that_is_missing_is_named(root: Path, package: str, url: str) -> None:
    script = f"import sys; sys.modules['{package}'] = None; from gpufs.cli import main; sys.exit(main())"
    done = run(sys.executable, "-c", script, "cp", url, root, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"gpufs cp: {url}: ")
    assert done.stderr.endswith(f" {sys.executable} -m pip install {package}\n")  # the line, as it may be copied


def test_names_that_look_like_urls(root: Path, host: Path) -> None:
    """A file of this name is written with its directory."""
    (host / "s3:").mkdir()
    (host / "s3:" / "file").write_bytes(b"content")
    gpufs("cp", "./s3://file", root, cwd=host)
    assert (root / "file").read_bytes() == b"content"
