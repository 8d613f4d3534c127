"""Access control lists, and what programs make of them; attributes in security.* and trusted.*."""

from __future__ import annotations

import os
import shutil
import stat
import struct
from collections.abc import Callable
from errno import EACCES, EINVAL, ENODATA, EPERM
from pathlib import Path

import pytest
from support import linux
from support.processes import NOBODY, OTHER, as_nobody, as_other, errno_of, in_child, run, shell

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="acts as several users"),
    pytest.mark.skipif(shutil.which("setfacl") is None, reason="needs the package acl"),
]

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
OWNER, USER, GROUP, NAMED_GROUP, MASK, REST = 1, 2, 4, 8, 16, 32
ANY = 0xFFFF_FFFF


def acl(*entries: tuple[int, int] | tuple[int, int, int]) -> bytes:
    """The attribute's value: (tag, permissions) or (tag, permissions, id) each."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry, *(ANY,) * (3 - len(entry))) for entry in entries)


def lists(path: Path) -> list[str]:
    """All lists below a directory, as getfacl prints them."""
    return sorted(run("getfacl", "-R", "-p", ".", cwd=path).stdout.split("\n\n"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def file(root: Path) -> Path:
    path = root / "file"
    path.write_bytes(b"content")
    path.chmod(0o640)
    return path


# ---- access control lists ----


def test_an_access_list_decides_who_may_use_a_file(file: Path) -> None:
    assert as_nobody(lambda: errno_of(file.read_bytes)) == EACCES
    run("setfacl", "-m", f"u:{NOBODY}:rw", str(file))
    assert mode(file) == 0o660  # the mask
    assert as_nobody(lambda: errno_of(file.write_bytes, b"x")) == 0
    assert as_other(lambda: errno_of(file.read_bytes)) == EACCES
    file.chmod(0o640)
    assert as_nobody(lambda: errno_of(file.read_bytes)) == 0
    assert as_nobody(lambda: errno_of(file.write_bytes, b"x")) == EACCES  # beyond the mask
    assert "#effective:r--" in run("getfacl", "-p", str(file)).stdout
    run("setfacl", "-m", f"u:{NOBODY}:-,g:{NOBODY}:r", str(file))
    assert as_nobody(lambda: errno_of(file.read_bytes)) == EACCES  # the user's own entry comes first
    assert in_child(lambda: errno_of(file.read_bytes), uid=OTHER, gid=OTHER, groups=[NOBODY]) == 0
    run("setfacl", "-b", str(file))
    assert as_nobody(lambda: errno_of(file.read_bytes)) == EACCES
    assert errno_of(os.getxattr, file, ACCESS) == ENODATA


def test_an_access_list_and_the_mode_stay_consistent(file: Path) -> None:
    full = acl((OWNER, 7), (USER, 7, NOBODY), (GROUP, 5), (MASK, 4), (REST, 1))
    os.setxattr(file, ACCESS, full)
    assert mode(file) == 0o741
    assert os.getxattr(file, ACCESS) == full
    assert os.listxattr(file) == [ACCESS]
    file.chmod(0o627)
    changed = acl((OWNER, 6), (USER, 7, NOBODY), (GROUP, 5), (MASK, 2), (REST, 7))
    assert os.getxattr(file, ACCESS) == changed
    os.setxattr(file, ACCESS, acl((OWNER, 6), (GROUP, 4), (REST, 0)))  # no more than the mode says
    assert (mode(file), os.listxattr(file)) == (0o640, [])
    os.setxattr(file, ACCESS, full)
    os.removexattr(file, ACCESS)
    assert mode(file) == 0o741
    os.removexattr(file, ACCESS)  # what is not there can be removed


def test_new_files_inherit_the_default_access_list(root: Path) -> None:
    top = root / "top"
    top.mkdir(0o755)
    run("setfacl", "-d", "-m", f"u:{NOBODY}:rwx,g::rx,o::-", str(top))

    def make() -> None:
        os.umask(0o077)
        (top / "file").touch()
        (top / "dir").mkdir()
        os.mkfifo(top / "fifo")
        (top / "link").symlink_to("file")
        os.close(os.open(top / "program", os.O_CREAT | os.O_WRONLY, 0o711))
        fd = os.open(top, os.O_TMPFILE | os.O_RDWR, 0o666)
        linux.link_descriptor(fd, top / "unnamed")
        os.close(fd)

    in_child(make)
    assert mode(top / "file") == mode(top / "unnamed") == mode(top / "fifo") == 0o660  # no umask
    assert mode(top / "dir") == 0o770
    assert mode(top / "program") == 0o710
    assert stat.S_IMODE(os.lstat(top / "link").st_mode) == 0o777
    inherited = acl((OWNER, 6), (USER, 7, NOBODY), (GROUP, 5), (MASK, 6), (REST, 0))
    assert os.getxattr(top / "file", ACCESS) == os.getxattr(top / "unnamed", ACCESS) == inherited
    assert os.getxattr(top / "dir", DEFAULT) == os.getxattr(top, DEFAULT)
    assert os.listxattr(top / "file") == [ACCESS]
    assert os.listxattr(top / "dir") == [ACCESS, DEFAULT]
    assert os.listxattr(top / "link", follow_symlinks=False) == []
    assert as_nobody(lambda: errno_of((top / "dir/deeper").mkdir)) == 0
    assert os.getxattr(top / "dir/deeper", DEFAULT) == os.getxattr(top, DEFAULT)
    run("setfacl", "-k", str(top))

    def make_another() -> None:
        os.umask(0o027)
        (top / "after").touch()

    in_child(make_another)
    assert mode(top / "after") == 0o640


def test_copy_programs_preserve_access_lists(root: Path, reference: Path) -> None:
    source = reference / "source"
    shell(
        f"""mkdir -p {source}/dir/deep; cd {source}; echo one > file; echo two > dir/plain; echo three > dir/deep/other
        setfacl -m u:{NOBODY}:rw,g:{OTHER}:r file; setfacl -d -m u:{NOBODY}:rwx dir; setfacl -m g:{OTHER}:rx dir/deep
        setfattr -n user.note -v said file; setfattr -n trusted.note -v secret dir; setfattr -n security.note -v x file
        chmod 640 dir/plain; ln -s file link; chown {NOBODY} dir/plain"""
    )
    said = lists(source)

    def attributes(path: Path) -> dict[str, bytes]:
        return {name: os.getxattr(path, name) for name in sorted(os.listxattr(path))}

    def check(copy: Path) -> None:
        assert lists(copy) == said
        for name in ("file", "dir", "dir/deep", "dir/plain"):
            assert attributes(copy / name) == attributes(source / name), name

    for number, (first, second) in enumerate(((root, reference), (root, root))):
        near, far = first / f"near{number}", second / f"far{number}"
        shell(f"cp -a {source} {near}; cp -a {near} {far}")
        check(near)
        check(far)
        shell(f"rm -r {near} {far}; rsync -aAX {source}/ {near}; rsync -aAX {near}/ {far}")
        check(near)
        check(far)
        assert not run("rsync", "-naAXi", f"{source}/", str(far)).stdout
        options = "--acls --xattrs --xattrs-include=*"
        shell(
            f"""rm -r {near} {far}; mkdir {near} {far}
            tar -C {source} {options} -cf - . | tar -C {near} {options} -xpf -
            tar -C {near} {options} -cf - . | tar -C {far} {options} -xpf -"""
        )
        check(near)
        check(far)
        saved = run("getfacl", "-R", ".", cwd=near).stdout
        shell(f"cd {near}; setfacl -R -b .; setfacl --restore=-", input=saved, stdin=None)
        check(near)


# ---- security.* and trusted.* ----


def test_a_capability_is_removed_by_changes_of_the_file(file: Path) -> None:
    if shutil.which("setcap") is None:
        pytest.skip("needs the package libcap2-bin")
    fd = os.open(file, os.O_RDWR)

    def said() -> str:
        return run("getcap", str(file)).stdout.strip()

    actions: dict[str, Callable[[], object]] = {
        "write": lambda: os.pwrite(fd, b"x", 0),
        "truncate": lambda: os.truncate(file, 3),
        "O_TRUNC": lambda: os.close(os.open(file, os.O_WRONLY | os.O_TRUNC)),
        "chown": lambda: os.chown(file, NOBODY, -1),
        "chown to the same": lambda: os.chown(file, -1, -1),
    }
    for name, action in actions.items():
        run("setcap", "cap_net_raw+ep", str(file))
        assert said() == f"{file} cap_net_raw=ep"
        action()
        assert said() == "", name
    run("setcap", "cap_net_raw+ep", str(file))
    file.chmod(0o755)
    os.utime(file)
    os.pread(fd, 1, 0)
    os.rename(file, file.with_name("moved"))
    os.rename(file.with_name("moved"), file)
    assert said() != ""
    assert as_nobody(lambda: errno_of(os.removexattr, file, "security.capability")) == EPERM
    run("setcap", "-r", str(file))
    assert said() == ""
    assert errno_of(os.setxattr, file, "security.capability", b"nonsense") == EINVAL
    os.close(fd)


# ---- birth ----


def test_files_have_a_birth_time(root: Path, file: Path) -> None:
    (root / "dir").mkdir()
    (root / "link").symlink_to("file")
    os.mkfifo(root / "fifo")
    for name in ("file", "dir", "link", "fifo"):
        path = root / name
        born = linux.birth_time(path)
        assert abs(born - os.lstat(path).st_mtime_ns) < 10**9
        os.utime(path, ns=(5, 6), follow_symlinks=False)
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        os.rename(path, root / "moved")
        assert linux.birth_time(root / "moved") == born
        os.rename(root / "moved", path)
        assert int(run("stat", "-c", "%W", str(path)).stdout) == born // 10**9
