"""`gpufs cp` and gpufs.copy() from and to S3. Its stand-in is moto's server."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import gpufs_here, refused_here
from support.data import MIB, assert_same, left, noise
from support.mounting import GPUFS, REPOSITORY, GpufsMount, Session
from support.processes import shell
from support.stores import PART, S3, Model, busy_at_first, s3_server, web_server

import gpufs as package
from gpufs.stores.checksums import Verification, of_etag


@pytest.fixture(scope="module")
def server(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        running.client.create_bucket(Bucket="models")
        yield running


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The server with an empty bucket, "models"."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    for entry in server.client.list_objects_v2(Bucket="models").get("Contents", []):
        server.client.delete_object(Bucket="models", Key=entry["Key"])


def put(s3: S3, **contents: bytes) -> None:
    for key, data in contents.items():
        s3.client.put_object(Bucket="models", Key=key, Body=data)


def keys(s3: S3) -> list[str]:
    return [entry["Key"] for entry in s3.client.list_objects_v2(Bucket="models").get("Contents", [])]


def content(s3: S3, key: str) -> bytes:
    data: bytes = s3.client.get_object(Bucket="models", Key=key)["Body"].read()
    return data


@pytest.mark.parametrize("size", [0, 1, PART, 2 * PART + 12345])
def test_there_and_back(root: Path, s3: S3, size: int) -> None:
    """Objects of one part, and of several. The checksum of each has been compared with its ETag."""
    (root / "source").write_bytes(noise(size))
    digest = hashlib.sha256(noise(size)).hexdigest()
    for words in [(root / "source", "s3://models/a b/file#1"), ("s3://models/a b/file#1", root / "back")]:
        (copy,) = json.loads(gpufs_here("cp", "--verify", "--json", *words).stdout)["copies"]
        assert (copy["bytes"], copy["sha256"]) == (size, digest)
    assert_same((root / "back").read_bytes(), noise(size))
    assert keys(s3) == ["a b/file#1"]
    assert_same(content(s3, "a b/file#1"), noise(size))


def test_from_python(root: Path, s3: S3) -> None:
    (root / "file").write_bytes(noise(MIB))
    assert package.copy(root / "file", "s3://models/directory/").destination == "s3://models/directory/file"
    package.copy("s3://models/directory/file", root / "back", verify=True)
    assert_same((root / "back").read_bytes(), noise(MIB))
    with pytest.raises(package.CopyError) as failure:
        package.copy("s3://models/none", root)
    assert failure.value.errno == errno.ENOENT


def test_directories(root: Path, s3: S3) -> None:
    """As cp -r: into a directory that exists, and to one that does not."""
    put(s3, **{"m/config.json": b"{}", "m/parts/1": b"one", "m/parts/2": b"", "mm/other": b"not of m"})
    put(s3, **{"m/": b"", "m/parts/": b"", "m/empty/": b""})  # as some tools make directories
    gpufs_here("cp", "-r", "--dry-run", "s3://models/m", root / "new")
    assert left(root) == []
    gpufs_here("cp", "-r", "s3://models/m", root / "new")
    (root / "both").mkdir()
    gpufs_here("cp", "-r", "s3://models/m/", "-t", root, "-t", root / "both")
    for directory in ("new", "m", "both/m"):
        assert left(root / directory) == ["config.json", "parts"]
        assert (root / directory / "parts" / "1").read_bytes() == b"one"
        assert (root / directory / "parts" / "2").read_bytes() == b""
    assert "is a directory" in refused_here("s3://models/m", root)
    assert "directory" in refused_here("-T", root / "new/config.json", "s3://models/copy/")
    assert "directory" in refused_here("-T", "s3://models/m/config.json", root / "both")
    gpufs_here("cp", "-r", "--dry-run", root / "new", "s3://models/copy")
    assert not [key for key in keys(s3) if key.startswith("copy")]
    gpufs_here("cp", "-r", root / "new", "s3://models/copy")
    gpufs_here("cp", "-r", root / "new", "s3://models/into/")
    below = ["config.json", "parts/1", "parts/2"]
    assert keys(s3)[:6] == [f"{place}/{path}" for place in ("copy", "into/new") for path in below]
    assert content(s3, "into/new/parts/1") == b"one"


def test_patterns_and_several_names(root: Path, s3: S3) -> None:
    put(s3, **{"m/1.bin": b"1", "m/2.bin": b"2", "m/2.txt": b"t", "m/deep/3.bin": b"3", "n/1.bin": b"n"})
    gpufs_here("cp", "s3://models/m/*.bin", root)
    assert left(root) == ["1.bin", "2.bin"]
    assert "m/deep is a directory" in refused_here("-r", "s3://models/m/*", root)
    done = json.loads(gpufs_here("cp", "-n", "--json", "s3://models/m/[12].*", root).stdout)
    assert (done["files"], done["skipped"]) == (1, 2)
    assert "no file matches" in refused_here("s3://models/m/*.none", root)
    assert "another source of this command" in refused_here("s3://models/m/1.bin", "s3://models/n/1.bin", root)
    assert (root / "1.bin").read_bytes() == b"1"
    gpufs_here("cp", root / "1.bin", root / "2.bin", "s3://models/up")
    gpufs_here("cp", root / "1.bin", "-t", "s3://models/one")
    assert [key for key in keys(s3) if key.startswith(("up", "one"))] == ["one/1.bin", "up/1.bin", "up/2.bin"]
    (root / "1.bin").write_bytes(b"changed")
    done = json.loads(gpufs_here("cp", "-n", "--json", root / "1.bin", "s3://models/up/").stdout)
    assert (done["skipped"], content(s3, "up/1.bin")) == (1, b"1")


def test_keys_that_look_like_patterns(root: Path, s3: S3) -> None:
    put(s3, **{"d/a[1].bin": b"1", "d/a?.bin": b"2", "d/ab.bin": b"3"})
    gpufs_here("cp", "s3://models/d/a[1].bin", root)
    assert left(root) == ["a[1].bin"]
    gpufs_here("cp", "s3://models/d/a[?].bin", root)
    assert left(root) == ["a?.bin", "a[1].bin"]
    with pytest.raises(package.CopyError, match="names several files"):
        package.copy("s3://models/d/a?.bin", root)


def test_keys_that_no_file_can_have(root: Path, s3: S3) -> None:
    """They are named, and the others can be copied by their names."""
    put(s3, **{"m/a": b"1", "m//c": b"2", "n/b": b"3", "n/t\tx": b"4"})
    assert '"m//c"' in refused_here("-r", "s3://models/m", root)
    assert "n/t" in refused_here("-r", "s3://models/n", root)
    gpufs_here("cp", "s3://models/m/a", "s3://models/n/b", root)
    assert left(root) == ["a", "b"]


def test_an_object_that_is_a_directory_too(root: Path, s3: S3) -> None:
    put(s3, **{"m": b"1", "m/a": b"2", "mm": b"3"})
    assert "an object and a directory" in refused_here("-r", "s3://models/m", root)
    gpufs_here("cp", "s3://models/m", root / "object")
    gpufs_here("cp", "-r", "s3://models/m/", root / "directory")
    assert (left(root), left(root / "directory")) == (["directory", "object"], ["a"])
    gpufs_here("cp", "-r", "s3://models/mm", root)


def test_many_empty_objects(root: Path, s3: S3) -> None:
    """Keys that are directories are left out, and the others are files."""
    put(s3, **{f"d/{n}": b"" for n in range(40)}, **{"d/sub/": b"", "d/sub/x": b"x", "d/none/": b""})
    gpufs_here("cp", "-r", "s3://models/d", root)
    assert left(root / "d") == sorted([*map(str, range(40)), "sub"])


def test_a_server_that_is_busy_for_a_moment(root: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is made again, also the one that removes an object, and the one that asks for a directory."""
    put(s3, **{"m": b"model", "d/old": b"1"})
    (root / "source").mkdir()
    with busy_at_first(s3.environment["AWS_ENDPOINT_URL"]) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        gpufs_here("cp", "-r", "s3://models/m", root)
        gpufs_here("sync", "--delete", root / "source", "s3://models/d")
    assert (root / "m").read_bytes() == b"model"
    assert keys(s3) == ["m"]


def test_an_archived_object(root: Path, s3: S3) -> None:
    s3.client.put_object(Bucket="models", Key="cold", Body=b"x", StorageClass="GLACIER")
    assert "is archived" in refused_here("s3://models/cold", root)


def test_links_are_not_stored(root: Path, s3: S3) -> None:
    (root / "tree").mkdir()
    (root / "tree" / "file").write_bytes(b"content")
    (root / "tree" / "link").symlink_to("file")
    assert "is a symbolic link (-L copies its file)" in refused_here("-r", root / "tree", "s3://models/tree")
    assert keys(s3) == ["tree/file"]
    gpufs_here("cp", "-rL", root / "tree", "s3://models/tree")
    assert content(s3, "tree/link") == b"content"


def test_a_link_below_the_destination_is_not_followed(root: Path, host: Path, s3: S3) -> None:
    put(s3, **{"m/sub/file": b"content"})
    (root / "m").mkdir()
    (root / "m" / "sub").symlink_to(host)
    refused_here("-r", "s3://models/m", root)
    assert left(host) == []


def test_what_does_not_exist(root: Path, s3: S3) -> None:
    assert "the file or directory or its bucket does not exist" in refused_here("s3://models/none", root)
    assert "the bucket absent does not exist" in refused_here("s3://absent/none", root)
    (root / "file").write_bytes(b"content")
    assert "the bucket absent does not exist" in refused_here(root / "file", "s3://absent/none")
    assert "No such file" in refused_here(root / "none", "s3://models/x")
    assert keys(s3) == []


def test_a_file_of_the_host_is_not_stored(host: Path, s3: S3) -> None:
    (host / "file").write_bytes(b"content")
    assert "neither of them is on a gpufs mount" in refused_here(host / "file", "s3://models/file")


def store_in_parts(s3: S3, *sizes: int) -> str:
    """Store an object in such parts. Returns its ETag."""
    upload = s3.client.create_multipart_upload(Bucket="models", Key="file")["UploadId"]
    for number, size in enumerate(sizes, 1):
        body = noise(size, number)
        s3.client.upload_part(Bucket="models", Key="file", UploadId=upload, PartNumber=number, Body=body)
    listed = s3.client.list_parts(Bucket="models", Key="file", UploadId=upload)["Parts"]
    named: Any = {"Parts": [{"ETag": one["ETag"], "PartNumber": one["PartNumber"]} for one in listed]}
    s3.client.complete_multipart_upload(Bucket="models", Key="file", UploadId=upload, MultipartUpload=named)
    etag: str = s3.client.head_object(Bucket="models", Key="file")["ETag"]
    return etag


def test_a_copy_that_differs(root: Path, s3: S3) -> None:
    """The ETag of an object in parts of 5 MiB matches its content and no other."""
    expected = of_etag(store_in_parts(s3, 5 * MIB, 5 * MIB), 10 * MIB)
    assert expected is not None
    for data, same in [(noise(5 * MIB, 1) + noise(5 * MIB, 2), True), (noise(10 * MIB), False)]:
        verification = Verification(expected, len(data))
        verification.update(memoryview(data))
        assert verification.matches() == same
    assert gpufs_here("cp", "--verify", "s3://models/file", root).stderr == ""


def test_an_etag_that_is_not_a_checksum(root: Path, s3: S3) -> None:
    """The object is read again and compared."""
    store_in_parts(s3, 7 * MIB, 6 * MIB)
    done = gpufs_here("cp", "--verify", "s3://models/file", root)
    assert "s3://models/file: its ETag is not its checksum, so it was read again and compared" in done.stderr
    assert_same((root / "file").read_bytes(), noise(7 * MIB, 1) + noise(6 * MIB, 2))


def test_the_howto(shared_mount: GpufsMount, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the page run as they are shown, in their order."""
    text = (REPOSITORY / "docs" / "howto" / "load-from-s3-and-the-hub.md").read_text()
    commands = re.findall(r"^    (gpufs (?:cp|sync) .*?)(?: {3,}#.*|  #.*)?$", text, re.M)
    assert len(commands) >= 10
    put(s3, **{"Qwen3-8B/a.safetensors": b"weights", "model.safetensors": b"model"})
    with web_server() as web:
        web.files["/model.safetensors"] = b"model"
        web.models["Qwen/Qwen3-8B"] = Model({"config.json": b"{}", "a.safetensors": b"weights"})
        monkeypatch.setenv("HF_ENDPOINT", web.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        program = Path(GPUFS[0]).parent
        names = {
            "/mnt/gpufs": str(shared_mount.path),
            "https://HOST": web.url,
            "gpufs cp": f"{program}/gpufs cp",
            "gpufs sync": f"{program}/gpufs sync",
        }
        for command in commands:
            for name, here in names.items():
                command = command.replace(name, here)
            shell(command)
    assert {"Qwen3-8B", "a.safetensors", "config.json", "model.safetensors"} <= set(left(shared_mount.path / "gpu0"))
    assert "Qwen3-8B/config.json" in keys(s3)
    shutil.rmtree(shared_mount.path / "gpu0" / "Qwen3-8B")
    for device in ("gpu0", "gpu1"):
        for name in ("a.safetensors", "config.json", "model.safetensors"):
            (shared_mount.path / device / name).unlink(missing_ok=True)


def test_sync(root: Path, s3: S3) -> None:
    """With --checksum by the ETags. What is left out stays, and nothing is deleted without a source."""
    source, back = root / "source", root / "back"
    source.mkdir()
    for name in ("one", "three.log"):
        (source / name).write_bytes(noise(3000))
    put(s3, **{"m/deep/old": b"2", "m/x.log": b"3", "me/too": b"4"})

    def sync(*words: object) -> tuple[int, int, list[str]]:
        summary = json.loads(gpufs_here("sync", "--json", *words).stdout)
        return summary["files"], summary["skipped"], summary["deleted"]

    words = ("--delete", "--exclude", "*.log", source, "s3://models/m")
    assert sync(*words) == (1, 0, ["s3://models/m/deep/old"])
    os.utime(source / "one", (1 << 31, 1 << 31))
    assert sync("--checksum", *words) == (0, 1, [])
    assert keys(s3) == ["m/one", "m/x.log", "me/too"]
    assert sync("s3://models/m", back) == (2, 0, [])
    (back / "one").write_bytes(noise(3001)[1:])
    assert sync("--checksum", "s3://models/m", back) == (1, 1, [])
    assert (back / "one").read_bytes() == noise(3000)
    assert gpufs_here("sync", "--delete", "s3://models/none", back, check=False).returncode == 1
    assert left(back) == ["one", "x.log"]
