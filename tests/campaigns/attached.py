"""Programs that share memory with a mount: a thousand are killed, and hostile ones attack the daemon for minutes."""

from __future__ import annotations

import os
import shutil

from support.attaching import fuzz, kill_programs, prepare_fuzz

from campaigns.harness import Missing, Place


def killed(place: Place) -> str:
    """Kills programs while they attach, write and grow files, and register memory."""
    cycles = 20 if place.quick else 1000
    kill_programs(place.root, cycles, seed=os.getpid())
    return f"{cycles} programs killed, seed {os.getpid()}"


def attacked(place: Place) -> str:
    """Users without permission send messages of all forms with descriptors of all kinds."""
    if os.geteuid() != 0:
        raise Missing("acts as several users, which takes root")
    mount = place.root.parents[1]
    seconds = 10 if place.quick else 300
    directory = prepare_fuzz(mount)
    fuzz(mount, seconds, os.getpid())
    shutil.rmtree(directory)
    return f"{seconds} s of attacks, seed {os.getpid()}"
