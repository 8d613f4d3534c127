"""stress-ng's stressors of file systems, one after the other, each verifying what it does."""

from __future__ import annotations

from support.processes import run

from campaigns.harness import Place, need

NAMES = (
    "access acl aio aiol chdir chmod chown close copy-file dentry dir dirdeep dirmany dnotify dup eventfd fallocate "
    "fcntl fiemap file-ioctl filename flock fpunch fsize fstat getdent hdd inotify io io-uring iomix lease link locka "
    "lockf lockofd metamix mknod mmap-file mmap open poll readahead rename revio rlimit seek sendfile splice symlink "
    "sync-file touch unlink utime verity xattr"
)
QUICK = "copy-file dentry dir fallocate flock hdd iomix link metamix rename seek unlink xattr"
SECONDS, QUICK_SECONDS = 600, 13
SIZES = {
    "copy-file": "128m",
    "fallocate": "128m",
    "hdd": "64m",
    "iomix": "64m",
    "mmap": "64m",
    "readahead": "64m",
    "revio": "64m",
    "sync-file": "64m",
}
NOT_HERE = 4  # stress-ng's exit code for what the machine or the file system does not offer


def stress_ng(place: Place) -> str:
    need("stress-ng")
    known = run("stress-ng", "--stressors").stdout.split()
    names = [name for name in (QUICK if place.quick else NAMES).split() if name in known]
    seconds = max(1, (QUICK_SECONDS if place.quick else SECONDS) // len(names))
    complaints, absent = [], []
    for name in names:
        # A relative path, as the io-uring stressor looks for its file below the directory that it is in.
        words = ["--temp-path", ".", "--timeout", f"{seconds}s", f"--{name}", "2"]
        if name in SIZES:
            words += [f"--{name}-bytes", SIZES[name]]
        done = run("stress-ng", "--verify", *words, check=False, timeout=seconds + 300, cwd=place.root)
        text = done.stdout + done.stderr
        if done.returncode == NOT_HERE:
            absent.append(name)
        elif done.returncode or any(word in text for word in (" fail:", "unsuccessful", " error:")):
            complaints.append(f"{name}: exit {done.returncode}\n{text[-1500:]}")
    if complaints:
        raise AssertionError("\n".join(complaints))
    return f"{len(names) - len(absent)} stressors of {seconds} s, 2 processes each; not offered: {absent or 'none'}"
