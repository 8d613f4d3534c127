"""fio writes and reads at random with several jobs and checks every block by its checksum, once for each engine."""

from __future__ import annotations

from collections.abc import Sequence

from support.processes import run

from campaigns.harness import Missing, Place, need


def verify(engine: str, options: Sequence[str], place: Place) -> str:
    need("fio")
    size, rounds = (24, 1) if place.quick else (128, 6)
    # Each round is a run of its own over the files of the one before: with --loops, fio 3.33 takes blocks of an earlier
    # loop for wrong ones of the next, on tmpfs and ext4 as well.
    for seed in range(rounds):
        _run(place, engine, f"--size={size}M", f"--randseed={11 + seed}", *options)
    return f"4 jobs, {size} MiB each, {rounds} rounds, every block verified"


def _run(place: Place, engine: str, *options: str) -> None:
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
