"""`gpufs cp` beside cp(1): the same command line makes the same tree, or fails where cp fails."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from support.cli import gpufs_here, user_gpufs
from support.data import SELECTED, SELECTION, make_model
from support.mounting import GPUFS
from support.processes import NOBODY, plain_user, run

from gpufs.cli import run_command_line as run_here


def make_target(folder: Path) -> None:
    """Files that exist in the destination."""
    (folder / "dir").mkdir(parents=True)
    (folder / "tree/sub").mkdir(parents=True)
    (folder / "tree/sub/f").write_text("x")
    (folder / "file").write_text("there before\n")
    (folder / "read-only").write_text("ro")
    (folder / "read-only").chmod(0o444)
    (folder / "link").symlink_to("file")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "to-dir").symlink_to("dir")
    (folder / "-file").write_text("dash")
    (folder / "t2").mkdir()
    os.mkfifo(folder / "t2/fifo")
    (folder / "t2/link").write_text("a file")


def make_source(folder: Path) -> None:
    (folder / "t/a/b").mkdir(parents=True)
    (folder / "t/a").chmod(0o700)
    (folder / "t/for-all").mkdir()
    (folder / "t/for-all").chmod(0o3777)
    (folder / "t/a/b/deep").write_text("2")
    (folder / "t/f").write_text("1" * 300_000)
    (folder / "t/f").chmod(0o4755)
    (folder / "t/link").symlink_to("f")
    (folder / "t/dangling").symlink_to("/nope")
    (folder / "t/to-dir").symlink_to("a")
    with open(folder / "t/hole", "wb") as file:
        file.truncate(10 << 20)
    os.mkfifo(folder / "t/fifo", 0o640)
    (folder / "f").write_text("f")
    (folder / "with blank").write_text("g")
    (folder / "with\nnewline").write_text("h")
    (folder / "empty").touch()
    (folder / "nothing").mkdir()
    (folder / "to-f").symlink_to("f")
    (folder / "to-t").symlink_to("t")
    (folder / "linked/inner").mkdir(parents=True)
    (folder / "linked/inner/file").symlink_to("../../f")
    (folder / "linked/tree").symlink_to("../t/a")
    (folder / "linked/lost").symlink_to("lost-target")


def listing(folder: Path) -> list[tuple[str, str, str]]:
    """Names, types and modes, and contents or the targets of links."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        else:
            content = path.read_text() if stat.S_ISREG(status.st_mode) else ""
        found.append((str(path.relative_to(folder)), stat.filemode(status.st_mode), content))
    return found


# @ is the directory that copies go to, # that of the sources.
SAME = [
    "#f @",
    "#f @/new",
    "#f @/file",
    "#f @/file/",
    "#f @/file/x",
    "#f @/none/x",
    "#f @/read-only",
    "#f @/link",
    "#f @/dangling",
    "#f @/to-dir",
    "#f/ @",
    "#f #empty @",
    "#f #empty @/file",
    "#f #f @/dir",
    "#none #f @",
    "#with?blank #with?newline @",
    "-- #f @/-X",
    "#t @",
    "-r #t @",
    "-r #t/. @",
    "-r #t @/new",
    "-r #t @/file",
    "-r #t @/none/x",
    "-r #t @/dangling",
    "-r #nothing #f @",
    "-a #t @",
    "-p #t/f @/file",
    "-n #f @/file",
    "-r @/tree @/new",
    "@/file @/link",
    "@/link @/file",
    "-r @/link @/new",
    "@/dangling @/new",
    "-r @/tree/sub/.. @/new",
    "-n #f @/link",
    "-n #f @/dir",
    "-rn #t/. @/t2",
    "-r #to-t @/new",
    "-r #t/. @/t2",
    "-rL #linked @",
    "-rL #linked/inner #to-f #to-t @",
    "-aL #to-t @/new",
    "-rL #t @/dir",
    "-rLn #linked/. @/t2",
    "-T #f @/new",
    "-T #f @/link",
    "-T #f @/dir",
    "-T #f @/to-dir",
    "-rT #t @/new",
    "-rT #t @/t2",
    "-rT #t @/file",
    "-aT #t/a @/none/x",
]


def copy_here(words: list[str]) -> int:
    """Runs `gpufs cp` in this process, which saves the interpreter's start."""
    return run_here(["cp", *words])


def copy_by_cp(words: list[str]) -> int:
    return run("cp", *words, check=False).returncode


@pytest.mark.parametrize("line", SAME)
def test_gpufs_cp_makes_the_same_tree_as_cp(
    root: Path, reference: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], line: str
) -> None:
    make_source(tmp_path)
    outcomes = []
    for copy, folder in ((copy_by_cp, reference), (copy_here, root)):
        make_target(folder)
        words = [
            word.replace("?blank", " blank")
            .replace("?newline", "\nnewline")
            .replace("@", str(folder))
            .replace("#", f"{tmp_path}/")
            for word in line.split()
        ]
        outcomes.append((copy(words), listing(folder)))
    said = capfd.readouterr().err
    assert "internal error" not in said
    assert "Traceback" not in said
    assert outcomes[1] == outcomes[0]


def test_loops_of_links_end(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t/a").mkdir(parents=True)
    (tmp_path / "t/f").write_text("f")
    (tmp_path / "t/a/up").symlink_to("..")
    (tmp_path / "t/self").symlink_to("self")
    assert copy_here(["-rL", str(tmp_path / "t"), str(root)]) == 1
    said = capfd.readouterr().err
    assert str(tmp_path / "t/a/up") in said
    assert str(tmp_path / "t/self") in said
    assert listing(root) == [entry for entry in listing(tmp_path) if "->" not in entry[2] and entry[1][0] != "l"]


def test_links_whose_files_stay_behind_are_reported(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in the cache of a hub, where a snapshot has links to files beside it."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1").write_text("weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model").symlink_to("../blobs/1")
    (tmp_path / "snapshot/same").symlink_to("model")
    (tmp_path / "snapshot/lost").symlink_to("nowhere")
    assert copy_here(["-r", str(tmp_path / "snapshot"), str(root / "links")]) == 0
    said = capfd.readouterr().err
    assert str(root / "links/model") in said
    assert "-L" in said
    (tmp_path / "snapshot/lost").unlink()
    assert copy_here(["-rL", str(tmp_path / "snapshot"), str(root / "files")]) == 0
    assert capfd.readouterr().err == ""
    assert (root / "files/model").read_text() == (root / "files/same").read_text() == "weights"
    assert not (root / "files/model").is_symlink()
    assert copy_here(["-r", str(tmp_path), str(root / "whole")]) == 0  # the links lead to copies
    assert capfd.readouterr().err == ""


def test_links_and_special_files_keep_their_owner(root: Path, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    os.mkfifo(tmp_path / "t/fifo")
    (tmp_path / "t/link").symlink_to("fifo")
    for name in ("fifo", "link"):
        os.lchown(tmp_path / "t" / name, 1234, 4321)
    run(*GPUFS, "cp", "-a", tmp_path / "t", root)
    for name in ("fifo", "link"):
        status = (root / "t" / name).lstat()
        assert (status.st_uid, status.st_gid) == (1234, 4321)


def test_unreadable_files_are_reported_and_the_others_copied(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "t"
    source.mkdir()
    for name in ("a", "b", "c"):
        (source / name).write_text(name)
    (source / "b").chmod(0)
    (source / "closed").mkdir(mode=0)
    with plain_user() as environment:
        command, environment = user_gpufs(environment)
        place = Path(environment["HOME"]) / "t"
        shutil.copytree(source, place, ignore=shutil.ignore_patterns("closed"))
        (place / "closed").mkdir()
        run("chown", "-R", str(NOBODY), place)
        (place / "b").chmod(0)
        (place / "closed").chmod(0)
        done = run(
            *command, "cp", "-r", place, root, check=False, user=NOBODY, group=NOBODY, extra_groups=[], env=environment
        )
        place.joinpath("closed").chmod(0o700)
    assert done.returncode == 1
    assert sorted(line.rpartition(": ")[0].rpartition("/")[2] for line in done.stderr.splitlines()) == ["b", "closed"]
    assert {path.name for path in (root / "t").iterdir() if path.is_file()} == {"a", "c"}


def counts(*words: object) -> tuple[int, int]:
    """Run a copy; how many files it has copied and skipped."""
    found = json.loads(gpufs_here("cp", "--json", *words).stdout)
    return found["files"], found["skipped"]


def test_what_is_named_is_copied_whatever_the_patterns(root: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    gpufs_here("cp", tmp_path / "model/notes.txt", root, *SELECTION)
    assert (root / "notes.txt").exists()


@pytest.mark.parametrize("words", [["-t", "@", "#f"], ["#f", "#empty", "@"]])
def test_a_name_that_is_the_copy_itself_has_one_source(root: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "source").mkdir()
    make_source(tmp_path / "source")
    given = [word.replace("#", f"{tmp_path}/source/").replace("@", str(root)) for word in words]
    assert copy_here(["-T", *given]) == 2
    assert os.listdir(root) == []


def test_a_dry_run_changes_nothing(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    make_model(source)
    done = gpufs_here("cp", "-r", "--dry-run", source, root, *SELECTION)
    wanted = [f"{source / name} -> {root / 'model' / name}: {len(name)} B" for name in SELECTED]
    assert sorted(done.stdout.splitlines()) == wanted
    assert os.listdir(root) == []
    gpufs_here("cp", "-ru", source, root)
    (source / "notes.txt").write_text("more notes")
    assert counts("-ru", "--dry-run", source, root) == (1, 7)
    assert counts("-rn", "--dry-run", source, root) == (0, 8)
    assert (root / "model/notes.txt").read_text() == "notes.txt"
