"""Campaigns of fio, which checks every block, of stress-ng, and of programs that share memory with the mount."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from typing import Any

from support.at_work import PROGRAMS, at_work
from support.attaching import kill_programs
from support.fuzzing import fuzz, prepare_fuzz
from support.killing import kill_at_random
from support.processes import run
from support.surviving import mounted

from campaigns.harness import Missing, Place, need


def fio(engine: str, options: Sequence[str], place: Place) -> str:
    """Writes and reads at random with several jobs and checks every block by its checksum."""
    need("fio")
    size, rounds = (24, 1) if place.quick else (128, 6)
    # Each round is a run of its own over the files of the one before: with --loops, fio 3.33 takes blocks of an earlier
    # loop for wrong ones of the next, on tmpfs and ext4 as well.
    for seed in range(rounds):
        _run_fio(place, engine, f"--size={size}M", f"--randseed={11 + seed}", *options)
    return f"4 jobs, {size} MiB each, {rounds} rounds, every block verified"


def _run_fio(place: Place, engine: str, *options: str) -> None:
    done = run(
        "fio",
        "--name=verify",
        f"--directory={place.root}",
        f"--ioengine={engine}",
        "--rw=randrw",
        "--rwmixread=40",
        "--bssplit=4k/40:64k/40:512k/20",
        "--numjobs=4",
        "--thread",
        "--serialize_overlap=1",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--group_reporting",
        *options,
        check=False,
        timeout=1800,
        cwd=place.host,
    )
    text = done.stdout + done.stderr
    if "not permitted" in text and engine == "io_uring":
        raise Missing("io_uring is switched off on this machine")
    if done.returncode:
        raise AssertionError(f"fio ended with {done.returncode}\n{text[-4000:]}")


NAMES = (
    "access acl aio aiol chdir chmod chown close copy-file dentry dir dirdeep dirmany dnotify dup eventfd fallocate "
    "fcntl fiemap file-ioctl filename flock fpunch fsize fstat getdent hdd inotify io io-uring iomix lease link locka "
    "lockf lockofd metamix mknod mmap-file mmap open poll readahead rename revio rlimit seek sendfile splice symlink "
    "sync-file touch unlink utime verity xattr"
)
QUICK = "copy-file dentry dir fallocate flock hdd iomix link metamix rename seek unlink xattr"
SECONDS, QUICK_SECONDS = 600, 13
LONGEST_WAIT = 5.0  # docs/lifecycle.md names it
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
    """The stressors of file systems, one after the other, each verifying what it does."""
    need("stress-ng")
    known = run("stress-ng", "--stressors").stdout.split()
    names = [name for name in (QUICK if place.quick else NAMES).split() if name in known]
    seconds = max(1, (QUICK_SECONDS if place.quick else SECONDS) // len(names))
    complaints, absent = [], []
    for name in names:
        # A relative path: the io-uring stressor opens its file below the directory that it is in.
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


def killed(place: Place) -> str:
    """Kills programs while they attach, write and grow files, and register memory."""
    cycles = 20 if place.quick else 1000
    kill_programs(place.root, cycles, seed=os.getpid())
    return f"{cycles} programs killed, seed {os.getpid()}"


def killed_daemons(place: Place, names: Sequence[str] = tuple(PROGRAMS), **options: Any) -> str:
    """Kills daemons and keepers under programs that work; options: of kill_at_random()."""
    if os.geteuid() != 0:
        raise Missing("one program has a mount namespace of its own")
    rounds, seed = (10 if place.quick else 2200), os.getpid()
    began = time.monotonic()
    waits = sorted(kill_at_random(place.host, rounds, seed, names, FILE_BYTES=str(1 << 30), **options))
    if waits[-1] > LONGEST_WAIT:
        raise AssertionError(f"after a death calls waited {waits[-1]:.2f} s; seed {seed}")
    return (
        f"{len(waits)} times daemons were killed, calls waited {waits[len(waits) // 2]:.2f} s (median), "
        f"{waits[len(waits) * 99 // 100]:.2f} s (99 of 100), {waits[-1]:.2f} s (the longest); "
        f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}, seed {seed}"
    )


EXERCISERS = ("exercise-1", "exercise-2", "exercise-3")
# What they use at a time fits, with removed files whose memory is free some seconds after a takeover. All files do not.
EXERCISED = "112M"


def exercised(place: Place) -> str:
    """Changes files at random, as fsx does, on a device from which they are evicted."""
    seconds = 10 if place.quick else 300
    with mounted(place.host / "mount", "--evict", "--host-memory", "256M", memory=EXERCISED) as mount:
        with at_work(mount.device, place.host, EXERCISERS) as running:
            end = time.monotonic() + seconds
            while time.monotonic() < end and all(program.poll() is None for program in running.values()):
                time.sleep(0.1)
        evicted = place.host.joinpath("log").read_text().count("was parked")
    return f"{seconds} s of {len(EXERCISERS)} programs, {evicted} files evicted"


def attacked(place: Place) -> str:
    """Users without permission send messages of all forms with descriptors of all kinds."""
    if os.geteuid() != 0:
        raise Missing("acts as several users, which takes root")
    mount = place.root.parents[1]
    seconds = 10 if place.quick else 300
    directory = prepare_fuzz(mount)
    longest = fuzz(mount, seconds, os.getpid())
    shutil.rmtree(directory)
    return f"{seconds} s of attacks, seed {os.getpid()}; others waited {longest:.2f} s at most"
