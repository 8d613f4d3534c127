"""scripts/install-helpers: what it installs works and can be removed again."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mounting import GpufsMount
from support.processes import run

from gpufs import config
from gpufs.cli._main import VISIBLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with everything that the script installs."""
    destination = tmp_path_factory.mktemp("installed")
    program = str(Path(sys.executable).with_name("gpufs"))
    environment = {**os.environ, "DESTDIR": str(destination), "PREFIX": "/usr/local", "GPUFS": program}
    run(ROOT / "scripts/install-helpers", env=environment)
    yield destination
    run(ROOT / "scripts/install-helpers", "--remove", env=environment)
    assert [path for path in destination.rglob("*") if not path.is_dir()] == []


def test_all_helper_files_are_installed(installed: Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if not path.is_dir()}
    assert files == {
        "usr/local/bin/gpufs",
        "sbin/mount.gpufs",
        "etc/systemd/system/gpufs@.service",
        "etc/logrotate.d/gpufs",
        "etc/udev/rules.d/60-gpufs.rules",
        "usr/local/share/man/man1/gpufs.1",
        "usr/local/share/man/man8/mount.gpufs.8",
        "usr/local/share/bash-completion/completions/gpufs",
        "usr/local/share/zsh/site-functions/_gpufs",
        "usr/local/share/fish/vendor_completions.d/gpufs.fish",
    }
    assert os.access(installed / "sbin/mount.gpufs", os.X_OK)
    for path in installed.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert "@GPUFS@" not in path.read_text()


@pytest.mark.parametrize("page", ["man1/gpufs.1", "man8/mount.gpufs.8"])
def test_manual_pages_have_all_sections(installed: Path, page: str) -> None:
    text = (installed / "usr/local/share/man" / page).read_text()
    sections = re.findall(r"^\.SH (.*)$", text, re.M)
    assert {"SYNOPSIS", "DESCRIPTION", "EXAMPLES", "ENVIRONMENT", "EXIT STATUS", "FILES", "SEE ALSO"} <= set(sections)
    assert not re.search(r"[^\n\t -~]", text)
    lines = [line.strip() for line in text.splitlines()]
    assert (
        "gpufs mount /mnt/gpufs" if "gpufs.1" in page else "umount /mnt/gpufs"
    ) in lines  # each command has its line
    if shutil.which("groff"):
        done = run("groff", "-man", "-Tutf8", "-ww", installed / "usr/local/share/man" / page)
        assert done.stderr == ""


def test_a_python_that_other_users_cannot_run_is_refused(tmp_path: Path) -> None:
    """Below a directory of root's own, as /root/.pyenv is."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "python3"
    shutil.copy(Path(sys.executable).resolve(), python)
    environment = {**os.environ, "DESTDIR": str(tmp_path / "to"), "PYTHON": str(python)}
    done = run(ROOT / "scripts/install-helpers", env=environment, check=False)
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    assert str(python) in line
    assert "PYTHON=/usr/bin/python3" in line


# ---- completions ----


def bash_offers(installed: Path, line: str, tmp_path: Path) -> list[str]:
    """What bash itself would offer at the end of a line."""
    words = line.split(" ")
    script = f"""
        source {installed}/usr/local/share/bash-completion/completions/gpufs
        compopt() {{ echo "option $*"; }}
        COMP_WORDS=({" ".join(repr(word) for word in words)})
        COMP_CWORD={len(words) - 1}
        function=$(complete -p gpufs | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        $function gpufs {words[-1]!r} {words[-2]!r}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {**os.environ, "PATH": f"{installed}/usr/local/bin:{os.environ['PATH']}"}
    done = run("bash", "-c", script, env=environment, cwd=tmp_path)
    assert done.stderr == ""
    return [word for word in done.stdout.splitlines() if word]


def test_bash_completes_commands_options_and_mountpoints(
    installed: Path, tmp_path: Path, shared_mount: GpufsMount
) -> None:
    assert bash_offers(installed, "gpufs ", tmp_path) == list(VISIBLE)
    assert bash_offers(installed, "gpufs um", tmp_path) == ["umount"]
    assert bash_offers(installed, "gpufs mount --driver ", tmp_path) == list(config.BY_NAME["driver"].kind.choices)
    assert bash_offers(installed, "gpufs mount --driver c", tmp_path) == ["cuda"]
    assert "--allow-other" in bash_offers(installed, "gpufs mount --a", tmp_path)
    assert "--mask-flags" not in bash_offers(installed, "gpufs mount --m", tmp_path)
    for command in ("umount", "status", "df", "stats"):
        assert str(shared_mount.path) in bash_offers(installed, f"gpufs {command} /tmp", tmp_path)
    for line in ("gpufs cp -t ", "gpufs mount "):
        assert "dirnames" in " ".join(bash_offers(installed, line, tmp_path))
    for line in ("gpufs cp ", "gpufs leases --revoke ", "gpufs trace /mnt -o ", "gpufs run python "):
        assert "default" in " ".join(bash_offers(installed, line, tmp_path))
    assert "bash" in bash_offers(installed, "gpufs run bas", tmp_path)


def test_fish_completes_with_whole_descriptions(installed: Path, tmp_path: Path) -> None:
    """A description with commas is not cut at the first one, and names with blanks and commas are offered."""
    script = installed / "usr/local/share/fish/vendor_completions.d/gpufs.fish"
    assert 'string split ","' not in script.read_text()
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    (tmp_path / "a, b").mkdir()
    environment = {**os.environ, "PATH": f"{installed}/usr/local/bin:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def offers(line: str) -> list[str]:
        command = f"source {script}; complete -C {line!r}"
        return run("fish", "-c", command, env=environment, cwd=tmp_path).stdout.splitlines()

    descriptions = dict(line.split("\t") for line in offers("gpufs "))
    assert list(descriptions) == sorted(VISIBLE)
    assert descriptions == VISIBLE
    assert offers("gpufs mount --driver c") == ["cuda"]
    assert [line.split("\t")[0] for line in offers("gpufs mount a")] == ["a, b/"]
