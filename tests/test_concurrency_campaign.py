"""Load from programs made for it: stress-ng, fio, rsync of many files, git. Short here; long with --slow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data import MIB, noise
from support.mounting import GpufsMount
from support.processes import Snapshot, run, shell, wait_until

STRESSORS = (
    "access chmod chown copy-file dentry dir dirdeep dirmany dnotify fallocate fcntl fiemap file-ioctl filename flock "
    "fstat getdent hdd inotify io iomix lease link locka lockf lockofd metamix mknod mmap-file open punch readahead "
    "rename seek sendfile symlink sync-file touch unlink utime verity xattr"
)


def available(names: str) -> list[str]:
    """Those stressors that the installed stress-ng has."""
    known = run("stress-ng", "--stressors").stdout.split()
    return [name for name in names.split() if name in known]


@pytest.fixture
def steady(request: pytest.FixtureRequest, on_gpufs: bool, root: Path) -> Iterator[None]:
    """Afterwards the daemon holds what it held before: descriptors, memory files, threads, and about as much memory."""
    if not on_gpufs:
        yield
        return
    mount: GpufsMount = request.getfixturevalue("shared_mount")
    (root / "warm").write_bytes(noise(4 * MIB))
    os.unlink(root / "warm")
    before = Snapshot.of(mount.pid)
    yield
    for name in os.listdir(root):
        run("rm", "-rf", root / name)

    def back() -> bool:
        now = Snapshot.of(mount.pid)
        return now.descriptors <= before.descriptors + 2 and now.memfds <= before.memfds + 1

    wait_until(back, 30, f"the daemon's descriptors to come back to {before}: {Snapshot.of(mount.pid)}")
    now = Snapshot.of(mount.pid)
    assert now.threads <= before.threads + 10, (before, now)
    assert now.resident_bytes <= before.resident_bytes + 150 * MIB, (before, now)


def stress(root: Path, names: list[str], seconds: int, workers: int) -> None:
    """Each stressor in its turn; stress-ng says what failed, and --verify makes it look at its data."""
    sizes = {
        "hdd": "32m",
        "fallocate": "64m",
        "iomix": "32m",
        "copy-file": "128m",
        "sync-file": "32m",
        "readahead": "32m",
    }
    complaints = []
    for name in names:
        words = ["--temp-path", str(root), "--timeout", f"{max(1, seconds // len(names))}s", f"--{name}", str(workers)]
        if name in sizes:
            words += [f"--{name}-bytes", sizes[name]]
        done = run("stress-ng", "--verify", *words, check=False, timeout=seconds + 200, cwd=root)
        text = done.stdout + done.stderr
        bad = any(word in text for word in (" fail:", "unsuccessful", " error:"))
        if bad or done.returncode not in (0, 4):  # 4: not supported here
            complaints.append(f"{name}: exit {done.returncode}\n{text[-2000:]}")
    assert not complaints, "\n".join(complaints)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("steady")
def test_stressors_for_a_moment(root: Path) -> None:
    names = available("copy-file dentry dir fallocate flock hdd iomix link lockf punch rename seek symlink xattr utime")
    stress(root, names, len(names), 2)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("steady")
def test_stressors_for_ten_minutes(root: Path) -> None:
    stress(root, available(STRESSORS), 600, 4)


@pytest.mark.slow
@pytest.mark.driver
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("engine", ["psync", "libaio", "mmap", "io_uring"])
@pytest.mark.parametrize("pattern", ["randrw", "rw", "randwrite"])
def test_fio_verifies_for_long(root: Path, reference: Path, engine: str, pattern: str) -> None:
    done = run(
        "fio",
        "--name=long",
        f"--directory={root}",
        f"--ioengine={engine}",
        f"--rw={pattern}",
        "--size=96M",
        "--io_size=768M",
        "--bsrange=4k-1m",
        "--blockalign=4k",
        "--numjobs=4",
        "--thread",
        "--iodepth=8",
        "--serialize_overlap=1",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_backlog=512",
        "--group_reporting",
        *(["--direct=1"] if engine != "mmap" else []),
        check=False,
        timeout=1500,
        cwd=reference,
    )
    if engine == "io_uring" and "not permitted" in done.stdout + done.stderr:
        pytest.skip("io_uring is switched off on this machine")
    assert done.returncode == 0, done.stdout + done.stderr


def many_files(base: Path, count: int) -> None:
    for number in range(count):
        folder = base / f"{number % 97:02d}" / f"{number % 13:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file{number}").write_bytes(noise(number % 3001, number))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("steady")
def test_two_thousand_files(root: Path, reference: Path) -> None:
    sync_many_files(root, reference, 2_000)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("steady")
def test_fifty_thousand_files(root: Path, reference: Path) -> None:
    sync_many_files(root, reference, 50_000)


def sync_many_files(root: Path, reference: Path, count: int) -> None:
    many_files(reference / "tree", count)
    run("rsync", "-a", "--checksum", f"{reference}/tree/", root / "tree", timeout=1500)
    run("rsync", "-a", "--checksum", f"{root}/tree/", reference / "back", timeout=1500)
    run("diff", "-r", reference / "tree", reference / "back", timeout=1500)
    changed = run("rsync", "-ai", "--checksum", f"{reference}/tree/", root / "tree", timeout=1500).stdout
    assert changed == ""
    shell(f"mkdir {root}/untarred && tar -C {root}/tree -cf - . | tar -C {root}/untarred -xf -", timeout=1500)
    run("diff", "-r", root / "tree", root / "untarred", timeout=1500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("steady")
def test_git_with_a_long_history(root: Path) -> None:
    script = """
    git init -q repo && cd repo && git config user.name Nobody && git config user.email nobody@example.org
    for c in $(seq 40); do
      for n in $(seq 150); do mkdir -p d$((n % 9)); seq $((n * c)) $((n * c + 400)) > d$((n % 9))/f$n; done
      git add . && git commit -qm "commit $c"
    done
    git gc -q --aggressive && git fsck --full --strict && cd ..
    git clone -q --no-hardlinks repo clone && git -C clone fsck --full
    git -C clone log --oneline | wc -l
    """
    environment = dict(os.environ, GIT_CONFIG_GLOBAL="/dev/null", HOME=str(root))
    assert shell(script, cwd=root, env=environment, timeout=1500).stdout.split()[-1] == "40"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_sqlite_with_eight_writers(root: Path, journal: str) -> None:
    script = f"""
    db={root}/db.sqlite
    sqlite3 $db "PRAGMA journal_mode={journal}; CREATE TABLE t (who INT, n INT, text TEXT); CREATE INDEX i ON t (text);"
    for who in $(seq 8); do
      (for n in $(seq 150); do
        echo ".timeout 60000"
        echo "BEGIN IMMEDIATE; INSERT INTO t VALUES ($who, $n, hex(randomblob(4000)));"
        echo "DELETE FROM t WHERE who = $who AND n = $n - 50; COMMIT;"
      done | sqlite3 -bail $db > /dev/null) & pids="${{pids:-}} $!"
    done
    for pid in $pids; do wait $pid; done
    sqlite3 $db "PRAGMA integrity_check; SELECT count(*) FROM t;"
    """
    assert shell(script, timeout=1500).stdout.split()[-2:] == ["ok", "400"]
