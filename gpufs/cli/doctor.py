"""gpufs doctor: whether a mount would work on this machine, how fast, and how to fix what is missing."""

from dataclasses import asdict
from typing import Final

import click

from gpufs._version import __version__
from gpufs.cli import _doctor_checks
from gpufs.cli._doctor_checks import NOTE, OK, PROBLEM, Environment, Finding
from gpufs.cli._errors import printable
from gpufs.cli._main import complete_files
from gpufs.cli._output import json_text

_SIGNS: Final = {OK: "ok", NOTE: "note", PROBLEM: "PROBLEM"}


@click.command(name="doctor", short_help="Say what this machine lacks.")
@click.argument("paths", metavar="[PATH...]", nargs=-1, shell_complete=complete_files)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the findings, and whether a mount would work.")
def command(paths: tuple[str, ...], as_json: bool) -> int:
    """Examine this machine.

    Reports the devices found, whether copies can bypass host memory (fastpath), the system's limits, and how to fix
    each problem. For PATHs, which are files of the host: which way copies of them would take, and why. Exit code 0 if
    a mount would work, 1 if there is a problem.
    """
    findings = _doctor_checks.examine(Environment(), paths)
    problems = any(finding.state == PROBLEM for finding in findings)
    if as_json:
        print(json_text({"version": __version__, "ok": not problems, "findings": [asdict(one) for one in findings]}))
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
