"""gpufs doctor: whether a mount would work on this machine, how fast, and how to fix what is missing."""

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import click

from gpufs._version import __version__
from gpufs.cli._machine import Environment, ProbedDriver
from gpufs.cli._main import complete_files
from gpufs.cli._output import bytes_text, json_text, printable
from gpufs.cli._queries import deaths_text
from gpufs.drivers import DRIVERS

OK: Final = "ok"
NOTE: Final = "note"  # works, and could be better
PROBLEM: Final = "problem"  # a mount does not work
_SIGNS: Final = {OK: "ok", NOTE: "note", PROBLEM: "PROBLEM"}
_LEAST_DESCRIPTORS: Final = 4096
_LEAST_LOCKED: Final = 192 << 20
_LEAST_MAPPINGS: Final = 65530
_LEAST_READ_AHEAD: Final = 1024  # KiB; gpufs mounts of root set 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``advice``: how to fix it, or ""."""

    group: str
    name: str
    state: str
    text: str
    advice: str = ""


@click.command(name="doctor")
@click.argument("paths", metavar="[PATH...]", nargs=-1, shell_complete=complete_files)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the findings, and whether a mount would work.")
def command(paths: tuple[str, ...], as_json: bool) -> int:
    """Examine this machine.

    Reports the devices found, whether copies can bypass host memory (fastpath), the system's limits, and how to fix
    each problem. For PATHs, which are files of the host: which way copies of them would take, and why. Exit code 0 if
    a mount would work, 1 if there is a problem. Mounts that do not answer, or whose daemons died, are notes.
    """
    findings = examine(Environment(), paths)
    problems = any(finding.state == PROBLEM for finding in findings)
    if as_json:
        print(json_text({"version": __version__, "ok": not problems, "findings": list(map(asdict, findings))}))
    else:
        _print(findings)
    return 1 if problems else 0


def _print(findings: list[Finding]) -> None:
    group = ""
    for finding in findings:
        if finding.group != group:
            group = finding.group
            print(group)
        print(f"  {_SIGNS[finding.state]:<7} {printable(finding.name)}: {printable(finding.text)}")
        if finding.advice and finding.state != OK:
            print(f"          -> {printable(finding.advice)}")
    problems = sum(finding.state == PROBLEM for finding in findings)
    print()
    print(f"{problems} problem{'s' if problems > 1 else ''}" if problems else "a mount works here")


def examine(environment: Environment, names: Sequence[str]) -> list[Finding]:
    probed = [environment.driver(name) for name in DRIVERS]
    return [
        *mounting(environment),
        *limits(environment),
        *mounts(environment),
        *speed(environment),
        *drivers(probed),
        *fastpath(probed),
        *paths(environment, names, probed),
    ]


def mounting(environment: Environment) -> Iterator[Finding]:
    """Check FUSE itself, and whether this user may mount."""
    group = "mounting"
    device = environment.root / "dev/fuse"
    if not device.exists():
        advice = "load the module fuse (modprobe fuse), or give the container the device /dev/fuse"
        yield Finding(group, "/dev/fuse", PROBLEM, "does not exist: this kernel or container has no FUSE", advice)
    elif environment.access(device, os.R_OK | os.W_OK):
        yield Finding(group, "/dev/fuse", OK, "can be opened")
    else:
        yield Finding(group, "/dev/fuse", PROBLEM, "cannot be opened by this user", "chmod 0666 /dev/fuse")
    yield _mount_program(environment)
    lines = (environment.text("etc/fuse.conf") or "").splitlines()
    if any(line.strip() == "user_allow_other" for line in lines):
        yield Finding(group, "user_allow_other", OK, "users may open their mounts to others")
    else:
        text = "not set in /etc/fuse.conf: only root may use --allow-other"
        yield Finding(group, "user_allow_other", NOTE, text, "add user_allow_other to /etc/fuse.conf")


def _mount_program(environment: Environment) -> Finding:
    """Check whether fusermount3 lets plain users mount. Root mounts without it."""
    helper = environment.which("fusermount3")
    if helper is None:
        text, advice = "is not installed: only root can mount", "install the package fuse3"
    elif not environment.raises_rights(helper):
        text, advice = f"{helper} is not set-user-id root: only root can mount", f"chmod u+s {helper}"
    elif environment.uid != 0 and "NoNewPrivs:\t1" in (environment.text("proc/self/status") or ""):
        text = "cannot gain privileges here (no_new_privs): only root can mount"
        advice = "start the container without no-new-privileges, or the unit without NoNewPrivileges"
    else:
        return Finding("mounting", "fusermount3", OK, helper)
    return Finding("mounting", "fusermount3", NOTE if environment.uid == 0 else PROBLEM, text, advice)


def limits(environment: Environment) -> Iterator[Finding]:
    """Check the limits of the system and of this process."""
    unlimited = resource.RLIM_INFINITY
    _, locked = environment.limit(resource.RLIMIT_MEMLOCK)
    _, descriptors = environment.limit(resource.RLIMIT_NOFILE)
    if environment.uid == 0:
        locked = unlimited
    file = "in /etc/security/limits.conf"
    locked_advice = f"memlock {file} to {_LEAST_LOCKED >> 10}, which are KiB,"
    mappings = environment.number("proc/sys/vm/max_map_count")
    checks = (
        ("locked memory", locked, _LEAST_LOCKED, "copies to GPUs are slower", locked_advice),
        (
            "descriptors",
            descriptors,
            _LEAST_DESCRIPTORS,
            "each file takes some",
            f"nofile {file} to {_LEAST_DESCRIPTORS}",
        ),
        ("memory mappings", mappings, _LEAST_MAPPINGS, "", f"vm.max_map_count to {_LEAST_MAPPINGS}"),
    )
    for name, value, least, effect, knob in checks:
        text_of = bytes_text if name == "locked memory" else str
        shown = "unlimited" if value in (unlimited, -1) else "unknown" if value is None else text_of(value)
        if value is None or value in (unlimited, -1) or value >= least:
            yield Finding("limits", name, OK, shown)
        else:
            text = f"{shown} is little" + (f": {effect}" if effect else "")
            yield Finding("limits", name, NOTE, text, f"raise {knob} or more")


def mounts(environment: Environment) -> Iterator[Finding]:
    """Report the mounts that do not answer, or whose daemons have died."""
    for status in environment.statuses(environment.mounts()):
        name, deaths = status["mountpoint"], deaths_text(status)
        state = NOTE if deaths or status["state"] not in ("ok", "private") else OK
        text = status["error"] or f"works{deaths and f'; deaths: {deaths}'}"
        yield Finding("mounts", name, state, text, f"gpufs status {name} and its log say more")


def speed(environment: Environment) -> Iterator[Finding]:
    """Check the settings of the kernel without which a mount is slower."""
    for entry in environment.mounts():
        knob = f"sys/class/bdi/{entry.device}/read_ahead_kb"
        ahead = environment.number(knob)
        if ahead is not None and ahead < _LEAST_READ_AHEAD:
            text = f"the kernel reads {ahead} KiB ahead of a program that goes through a mapping: scans are slower"
            yield Finding("speed", entry.mountpoint, NOTE, text, f"as root: echo {_LEAST_READ_AHEAD} > /{knob}")
        elif ahead is not None:
            yield Finding("speed", entry.mountpoint, OK, f"the kernel reads {ahead} KiB ahead")


def drivers(probed: Sequence[ProbedDriver]) -> Iterator[Finding]:
    """Check the devices of each driver. Host memory must always work."""
    for driver in probed:
        what = DRIVERS[driver.name].devices
        if driver.devices:
            text = ", ".join(f"{number} = {device}" for number, device in enumerate(driver.devices))
            yield Finding("drivers", driver.name, OK, text if len(driver.devices) > 1 else driver.devices[0])
        elif driver.name == "host":
            yield Finding(
                "drivers", "host", PROBLEM, driver.reason, "this installation is damaged: install gpufs again"
            )
        else:
            advice = "if there is a GPU, install its driver and allow this user to open its devices"
            if " lacks " in driver.reason:  # a function of the runtime
                advice = "if there is a GPU, install a newer version of it"
            yield Finding("drivers", driver.name, NOTE, f"no {what}: {driver.reason}", advice)


def fastpath(probed: Sequence[ProbedDriver]) -> Iterator[Finding]:
    """Check whether copies between storage and devices can bypass host memory, and what is missing."""
    for driver in probed:
        name = driver.name
        if driver.name == "host":
            yield Finding("fastpath", name, OK, "O_DIRECT into the device's memory")
            continue
        if not driver.devices:
            yield Finding("fastpath", name, NOTE, "this driver has no device")
            continue
        if not driver.refusals:
            yield Finding("fastpath", name, OK, "available; gpufs doctor PATH checks a file")
            continue
        for refusal in driver.refusals:
            text, advice = driver.explain(refusal)
            yield Finding("fastpath", name, NOTE, f"{refusal}: {text}; copies use pinned host memory", advice)


def paths(environment: Environment, names: Sequence[str], probed: Sequence[ProbedDriver]) -> Iterator[Finding]:
    """Check which way copies of each file take on each driver with devices, and why."""
    mountpoints = [entry.mountpoint for entry in environment.mounts()]
    for name in names:
        if name and os.path.abspath(name) in mountpoints:
            continue  # it is among the mounts
        try:
            probe = environment.probe(["path", os.path.abspath(name)]) if name else {"error": "an empty name"}
        except FileNotFoundError:
            probe = {"error": "the current directory has been removed"}
        if "error" in probe:
            advice = "give a regular file or a block device of the host, which is on no mount"
            yield Finding("paths", name, PROBLEM, probe["error"], advice)
            continue
        alignment = f"{probe['file_system'] or 'unknown file system'}, alignment {probe['offset_align']} in the file, "
        alignment += f"{probe['memory_align']} in memory"
        device = probe.get("device", "")
        refusals = list(probe["refusals"])
        if probe["file_system"] == "ext4" and "mount_options" not in refusals and environment.journals_data(device):
            refusals.append("mount_options")
        stack = list(environment.block_devices(device))
        for driver in probed:
            if not driver.devices:
                continue
            reasons = [*refusals, *(reason for reason in driver.refusals if reason not in refusals)]
            where = f"{name} on {driver.name}"
            if reasons:
                texts = "; ".join(f"{reason}: {driver.explain(reason)[0]}" for reason in reasons)
                advice = "; ".join(text for reason in reasons if (text := driver.explain(reason)[1]))
                yield Finding("paths", where, NOTE, f"fallback ({alignment}): {texts}", advice)
            elif driver.name != "host" and any(kind for _, kind in stack):
                below = " over ".join(f"{disk} ({kind})" if kind else disk for disk, kind in stack)
                text = f"fastpath ({alignment}), unless the kernel refuses it: the file is on {below}"
                yield Finding("paths", where, NOTE, text, "keep the file on a drive or a partition itself")
            else:
                yield Finding("paths", where, OK, f"fastpath ({alignment})")
