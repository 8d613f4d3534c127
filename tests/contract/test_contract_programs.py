"""Real programs on the mount, compared with the same done on tmpfs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data import MIB, assert_same, noise, read_all
from support.processes import run, shell

LARGE = 136 * MIB


@pytest.fixture
def tree(reference: Path) -> Path:
    """A small project: directories, links, modes, sparse and empty files, odd names."""
    base = reference / "tree"
    for directory in ("src/deep/er", "empty", "data"):
        (base / directory).mkdir(parents=True)
    for number in range(60):
        (base / "src" / f"file{number}.c").write_bytes(noise(number * 137, number))
    (base / "data" / "big").write_bytes(noise(3 * MIB + 17, 99))
    (base / "data" / "none").touch()
    with open(base / "data" / "sparse", "wb") as file:
        file.truncate(20 * MIB)
        file.seek(9 * MIB)
        file.write(b"island")
    (base / "src" / "deep" / "er" / "name with\nnewline").write_text("x")
    (base / "link").symlink_to("src/file1.c")
    (base / "broken").symlink_to("nowhere")
    os.link(base / "src" / "file5.c", base / "hard")
    (base / "src" / "file7.c").chmod(0o755)
    (base / "src" / "file8.c").chmod(0o400)
    os.utime(base / "src" / "file9.c", ns=(10**18, 10**18 + 123456789))
    return base


def assert_same_trees(one: Path, two: Path) -> None:
    run("diff", "-r", "--no-dereference", one, two)

    def listing(base: Path) -> list[str]:
        lines = []
        for kind, form in (("f", "%P %m %U %G %s %n %T@\\n"), ("l", "%P %l\\n"), ("d", "%P %m %U %G\\n")):
            lines += run("find", base, "-mindepth", "1", "-type", kind, "-printf", form).stdout.splitlines()
        return sorted(lines)

    assert listing(one) == listing(two)


@pytest.fixture(scope="module")
def large() -> Iterator[Path]:
    """A file on tmpfs that outgrows its range of addresses twice, no two pieces of which are the same."""
    directory = Path("/dev/shm") / f"gpufs-tests-large-{os.getpid()}"
    directory.mkdir()
    try:
        block = noise(8 * MIB)
        with open(directory / "large", "wb") as file:
            for number in range(LARGE // len(block)):
                file.write(number.to_bytes(8, "big") + block)
        yield directory / "large"
    finally:
        shutil.rmtree(directory)


@pytest.mark.driver
@pytest.mark.timeout(400)
def test_a_large_file_in_and_out(large: Path, root: Path, reference: Path) -> None:
    run("cp", large, root / "copy")
    run("cmp", large, root / "copy")
    run("cp", root / "copy", reference / "back")
    run("cmp", large, reference / "back")
    run("cp", root / "copy", root / "inside")  # by copy_file_range, where the file system has it
    run("cmp", large, root / "inside")


DD = [
    "bs=12345 skip=2 seek=7 count=5 conv=notrunc",
    "bs=64k oflag=append conv=notrunc count=3",
    "ibs=512 obs=1M count=5000",
    "bs=100k conv=sparse",
    "bs=1M oflag=direct count=3",
    "bs=33333 conv=fsync",
    "bs=4k count=0 seek=1000",
]


@pytest.mark.driver
@pytest.mark.parametrize("words", DD)
def test_dd_works_as_on_tmpfs(root: Path, reference: Path, words: str) -> None:
    for base in (root, reference):
        (base / "in").write_bytes(noise(5 * MIB + 1234, 1))
        (base / "out").write_bytes(noise(3 * MIB + 77, 2))
    for source, target, place in ((root, root, "inside"), (reference, root, "in"), (root, reference, "out")):
        work = target / f"out-{place}"
        shutil.copyfile(target / "out", work)
        run("dd", f"if={source}/in", f"of={work}", "status=none", *words.split())
    shutil.copyfile(reference / "out", reference / "expected")
    run("dd", f"if={reference}/in", f"of={reference}/expected", "status=none", *words.split())
    wanted = read_all(reference / "expected")
    for found in (root / "out-inside", root / "out-in", reference / "out-out"):
        assert_same(read_all(found), wanted, f"{found.name}: dd {words}")


def test_text_and_file_tools_work_as_on_tmpfs(root: Path, reference: Path) -> None:
    for base in (root, reference):
        (base / "file").write_bytes(noise(MIB + 345, 3))
        (base / "text").write_text("".join(f"line {n} of the text\n" for n in range(20_000)))
    for command in (
        "xxd file",
        "xxd -s 1000000 -l 100 file",
        "xxd -s -50 file",
        "tail -c 1000 file",
        "tail -c +1048000 file",
        "tail -n 7 text",
        "head -c 70000 file",
        "head -n 3 text",
        "od -A d -t x8 -j 65531 -N 100 file",
        "wc text file",
        "sort -r text",
        "tac text",
        "grep -n 'line 199' text",
        "split -b 100000 file part- && cat part-* | sha256sum",
        "sed -i 's/text/TEXT/' text && md5sum text",
        "awk '{s += $2} END {print s}' text",
        "gzip -k file && gunzip -c file.gz | cmp - file && echo same",
        "truncate -s 5000 file && truncate -s +10 file && truncate -s %4096 file && wc -c file && md5sum file",
        "cat file file > twice && wc -c twice && cat file >> twice && md5sum twice",
        "install -m 600 text installed && stat -c %a installed",
        "mkdir -p a/b/c && touch a/b/c/d && mv a z && find z | sort && rm -r z && ls",
        "ln text hard && ln -s text soft && readlink soft && stat -c %h text && cat soft | md5sum && rm hard soft",
        "tee copy < text | md5sum && md5sum copy",
        "shred -u copy; ls",
        "mktemp -p . -d > /dev/null; mktemp -p . > /dev/null; ls | wc -l",
    ):
        found = [shell(command, cwd=base).stdout for base in (root, reference)]
        assert found[0] == found[1], command


@pytest.mark.parametrize("mode", ["always", "auto", "never"])
def test_cp_keeps_holes(root: Path, reference: Path, mode: str) -> None:
    with open(root / "sparse", "wb") as file:
        file.truncate(64 * MIB)
        for at in (0, 10 * MIB + 5, 40 * MIB):
            file.seek(at)
            file.write(noise(100_000, at))
    for target in (root, reference):
        run("cp", f"--sparse={mode}", root / "sparse", target / "copy")
        run("cmp", root / "sparse", target / "copy")
        blocks = (target / "copy").stat().st_blocks * 512
        assert blocks >= 64 * MIB if mode == "never" else blocks <= 16 * MIB
    run("cp", f"--sparse={mode}", reference / "copy", root / "back")
    run("cmp", root / "sparse", root / "back")


def test_rsync_copies_trees_both_ways(root: Path, reference: Path, tree: Path) -> None:
    run("rsync", "-aHS", f"{tree}/", root / "copy")
    assert_same_trees(tree, root / "copy")
    run("rsync", "-aH", f"{root}/copy/", reference / "back")
    assert_same_trees(tree, reference / "back")
    assert run("rsync", "-aH", "--checksum", "--itemize-changes", f"{tree}/", root / "copy").stdout == ""
    with open(tree / "data" / "big", "r+b") as file:
        file.seek(MIB)
        file.write(b"changed in the middle")
    # rsync compares whole seconds: a change within the second of the file's creation is none to it.
    os.utime(tree / "data" / "big", ns=(10**18, 10**18))
    run("rsync", "-a", "--inplace", "--no-whole-file", f"{tree}/", root / "copy")
    (tree / "src" / "file3.c").unlink()
    run("rsync", "-aH", "--delete", f"{tree}/", root / "copy")
    assert_same_trees(tree, root / "copy")


@pytest.mark.timeout(400)
def test_git_works(root: Path) -> None:
    environment = dict(os.environ, GIT_CONFIG_GLOBAL="/dev/null", HOME=str(root))
    script = """
    git init -q repo && cd repo
    git config user.name Nobody && git config user.email nobody@example.org
    for n in $(seq 60); do mkdir -p d$((n % 7)); seq $n 3000 > d$((n % 7))/f$n; done
    git add . && git commit -qm one
    for n in $(seq 1 3 60); do echo more >> d$((n % 7))/f$n; done
    git commit -qam two && git gc -q && git fsck --full --strict
    cd .. && git clone -q --no-hardlinks repo clone && git -C clone fsck --full && git -C clone log --oneline
    git -C clone checkout -q HEAD~1 && git -C clone status --porcelain && rm -rf repo clone
    """
    assert "two" in shell(script, cwd=root, env=environment, timeout=200).stdout


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_sqlite_works_with_two_writers(root: Path, journal: str) -> None:
    """Two writers and a reader at once, with two of its journals (wal maps a file into all of them)."""
    script = f"""
    db={root}/db.sqlite
    sqlite3 $db "PRAGMA journal_mode={journal}; CREATE TABLE t (who INT, n INT, text TEXT);" > /dev/null
    for who in 1 2; do
      (for n in $(seq 25); do
        echo ".timeout 30000"
        echo "BEGIN IMMEDIATE; INSERT INTO t VALUES ($who, $n, hex(randomblob(3000))); COMMIT;"
      done | sqlite3 -bail $db > /dev/null; ) &
      pids="${{pids:-}} $!"
    done
    for pid in $pids; do wait $pid; done
    sqlite3 $db "PRAGMA integrity_check; SELECT who, count(*) FROM t GROUP BY who; VACUUM; PRAGMA integrity_check;"
    """
    assert shell(script).stdout.split() == ["ok", "1|25", "2|25", "ok"]
