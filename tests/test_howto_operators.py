"""What the how-to pages for operators show works: the blocks behind a comment `tested`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from errno import EACCES
from pathlib import Path

import pytest
from support.processes import NOBODY, as_nobody, as_other, errno_of, run
from support.watchdog import mounted_at, rescue

HOWTO = Path(__file__).resolve().parents[1] / "docs/howto"
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def block(page: str, name: str) -> str:
    """The indented block of a page behind the comment <!-- NAME -->."""
    text = (HOWTO / page).read_text()
    found = re.search(rf"<!-- {name} -->\n\n((?:    .*\n|\n)+)", text)
    assert found is not None, name
    return re.sub("^    ", "", found[1], flags=re.M)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can enter."""
    path = Path(tempfile.mkdtemp(prefix="gpufs-tests-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_slurm_prolog_and_epilog(open_directory: Path) -> None:
    mountpoint = open_directory / "jobs/7"
    environment = {**ENVIRONMENT, "SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0", "SLURM_JOB_UID": str(NOBODY)}
    scripts = {}
    for name in ("prolog", "epilog"):
        text = block("slurm-prolog.md", f"tested: {name}").replace("/run/gpufs-jobs", str(open_directory / "jobs"))
        scripts[name] = open_directory / name
        scripts[name].write_text(text.replace("--driver cuda", "--driver host --memory 64M"))
        scripts[name].chmod(0o755)
    try:
        run(scripts["prolog"], env=environment)
        file = mountpoint / "gpu0/weights"
        as_nobody(lambda: file.write_bytes(b"x" * 4096))
        assert file.stat().st_uid == NOBODY
        assert as_other(lambda: errno_of(os.listdir, mountpoint / "gpu0")) == EACCES
        with open(file, "rb"):  # what a job leaves behind does not keep its memory
            run(scripts["epilog"], env=environment)
        assert not mountpoint.exists()
        run(scripts["epilog"], env=environment)  # of a job that had no mount
        run(scripts["prolog"], env={**environment, "SLURM_JOB_GPUS": ""})
        assert not mountpoint.exists()
    finally:
        if mounted_at(str(mountpoint)):
            rescue(str(mountpoint), None)


def test_troubleshooting(tmp_path: Path) -> None:
    run("bash", "-euc", block("troubleshooting.md", "tested"), env=ENVIRONMENT, cwd=tmp_path)
