"""`gpufs cp` beside cp(1): the same command line makes the same tree, or fails where cp fails."""

import json
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from support.cli import fails
from support.mounting import GPUFS
from support.processes import run, wait_until


def make_target(folder: Path) -> None:
    """What is there already, where the copies go."""
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
    for name, moment in (("older", 1_000), ("same-time", 2_000_000_000), ("newer", 2_000_000_001)):
        (folder / name).write_text(name)
        os.utime(folder / name, (moment, moment))
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
    (folder / "timed").write_text("timed")
    os.utime(folder / "timed", (2_000_000_000, 2_000_000_000))
    (folder / "to-f").symlink_to("f")
    (folder / "to-t").symlink_to("t")
    (folder / "linked/inner").mkdir(parents=True)
    (folder / "linked/inner/file").symlink_to("../../f")
    (folder / "linked/tree").symlink_to("../t/a")
    (folder / "linked/lost").symlink_to("lost-target")
    (folder / "cyclic/sub").mkdir(parents=True)
    (folder / "cyclic/f").write_text("in a cycle")
    (folder / "cyclic/sub/up").symlink_to("..")


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
    "#f @/",
    "#f @/new",
    "#f @/new/",
    "#f @/file",
    "#f @/file/",
    "#f @/file/x",
    "#f @/dir/",
    "#f @/none/x",
    "#f @/read-only",
    "#f @/link",
    "#f @/dangling",
    "#f @/to-dir",
    "#f/ @",
    "#f #empty @",
    "#f #empty @/file",
    "#f #empty @/new",
    "#f #f @/dir",
    "#none #f @",
    "#with?blank #with?newline @",
    "-- #f @/-x",
    "#t @",
    "-r #t @",
    "-r #t/ @",
    "-r #t/. @",
    "-r #t @/new",
    "-r #t @/file",
    "-r #t @/dir/",
    "-r #t @/none/x",
    "-r #t @/to-dir",
    "-r #t @/dangling",
    "-rT #t @/to-dir",
    "-rT #t @/dir",
    "-T #f @/dir",
    "-r #nothing #f @",
    "-a #t @",
    "-rp #t @",
    "-p #t/f @/file",
    "-n #f @/file",
    "-r @/tree @/new",
    "-r @/tree @/",
    "@/file @/link",
    "@/link @/file",
    "@/link @/new",
    "-r @/link @/new",
    "@/dangling @/new",
    "-r @/dangling @/new",
    "-r @/tree/sub/.. @/new",
    "-n #f @/new",
    "-n #f @/link",
    "-n #f @/dangling",
    "-n @/file @/file",
    "-n #f @/dir",
    "-rn #t @/t2 -T",
    "-u #timed @/older",
    "-u #timed @/same-time",
    "-u #timed @/newer",
    "-u #timed @/new",
    "-u #timed @",
    "-ru #t @/t2 -T",
    "-u @/file @/file",
    "-un #timed @/older",
    "-f #f @/file",
    "-f #f @/dangling",
    "-f #f @/dir",
    "-f @/file @/file",
    "--remove-destination #f @/file",
    "--remove-destination #f @/link",
    "--remove-destination #f @/dangling",
    "--remove-destination #f @/to-dir",
    "--remove-destination #f @/new",
    "--remove-destination @/file @/file",
    "-n --remove-destination #f @/dangling",
    "-t @/dir #f #empty",
    "-t @/file #f",
    "-t @/none #f",
    "-t @/to-dir #f",
    "-rt @/dir #t #f",
    "--target-directory=@/dir #f",
    "-t @/dir -n #f",
    "-L #to-f @/new",
    "-P #to-f @/new",
    "-P #to-f @/file",
    "-P #to-f @/dangling",
    "-P @/link @/link",
    "-r #to-t @/new",
    "-rL #to-t @/new",
    "-rH #to-t @/new",
    "-rL #linked @/new",
    "-rH #linked @/new",
    "-rP #linked @/new",
    "-rLP #linked @/new",
    "-aL #linked @/new",
    "-rL #cyclic @/new",
    "-L #linked/lost @/new",
    "-r #t @/t2 -T",
    "-a #t @/t2 -T",
    "-rx #t @",
]


@pytest.mark.parametrize("line", SAME)
def test_like_cp(root: Path, reference: Path, tmp_path: Path, line: str) -> None:
    make_source(tmp_path)
    outcomes = []
    for program, folder in ((("cp",), reference), ((*GPUFS, "cp"), root)):
        make_target(folder)
        words = [
            word.replace("?blank", " blank")
            .replace("?newline", "\nnewline")
            .replace("@", str(folder))
            .replace("#", f"{tmp_path}/")
            for word in line.split()
        ]
        done = run(*program, *words, check=False)
        outcomes.append((done.returncode, listing(folder)))
        assert "internal error" not in done.stderr
        assert "Traceback" not in done.stderr
    assert outcomes[1] == outcomes[0]


# What is answered, and which files are there: "@/file" is, "@/new" is not.
QUESTIONS = [
    ("-i #f @/file", "y\n"),
    ("-i #f @/file", "Yes please\n"),
    ("-i #f @/file", "n\n"),
    ("-i #f @/file", "\n"),
    ("-i #f @/file", ""),
    ("-i #f @/file", " y"),
    ("-i #f @/new", "n\n"),
    ("-i #f @/link", "y\n"),
    ("-ni #f @/file", "y\n"),
    ("-in #f @/file", "y\n"),
    ("-ui #timed @/older", "y\n"),
    ("-ui #timed @/newer", "y\n"),
    ("-ri -T #t @/t2", "y\ny\n"),
    ("-ri -T #t @/t2", "n\nn\n"),
    ("-i --remove-destination #f @/link", "y\n"),
]


@pytest.mark.parametrize(("line", "answers"), QUESTIONS)
def test_asks_like_cp(root: Path, reference: Path, tmp_path: Path, line: str, answers: str) -> None:
    make_source(tmp_path)
    outcomes = []
    for program, folder in ((("cp",), reference), ((*GPUFS, "cp"), root)):
        make_target(folder)
        words = [word.replace("@", str(folder)).replace("#", f"{tmp_path}/") for word in line.split()]
        done = run(*program, *words, check=False, input=answers)
        outcomes.append((done.returncode, listing(folder), done.stderr.count("? ")))
    assert outcomes[1] == outcomes[0]


def test_a_question_is_no_hindrance_to_a_signal(root: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("new")
    (root / "f").write_text("old")
    command = [*map(str, GPUFS), "cp", "-i", str(tmp_path / "f"), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        asked = b""
        while not asked.endswith(b"? "):
            asked += process.stderr.read(1)
        assert asked.decode() == f"gpufs cp: overwrite {root}/f? "
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
    assert (root / "f").read_text() == "old"


def test_a_file_that_cannot_be_opened_is_replaced_if_forced(root: Path, tmp_path: Path) -> None:
    """As a running program, or what another user has made."""
    (tmp_path / "f").write_text("new")
    program = root / "program"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "100"]) as process:
        try:
            wait_until(lambda: os.readlink(f"/proc/{process.pid}/exe") == str(program), 20, "the program")
            text = f"gpufs cp: {program}: Text file busy\n"
            assert run(*GPUFS, "cp", tmp_path / "f", program, check=False).stderr == text
            assert program.stat().st_size > 3
            run(*GPUFS, "cp", "-f", tmp_path / "f", program)
            assert program.read_text() == "new"
            assert process.poll() is None
        finally:
            process.kill()


def test_who_has_it_open_keeps_the_old_one(root: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("new")
    (root / "f").write_text("old")
    with open(root / "f") as old:
        run(*GPUFS, "cp", "--remove-destination", tmp_path / "f", root)
        assert (old.read(), (root / "f").read_text()) == ("old", "new")


def test_other_file_systems_are_left_out(root: Path, tmp_path: Path) -> None:
    (tmp_path / "t/other").mkdir(parents=True)
    (tmp_path / "t/f").write_text("f")
    inside = tmp_path / "t/other"
    run("mount", "-t", "tmpfs", "none", inside)
    try:
        (inside / "g").write_text("g")
        run(*GPUFS, "cp", "-rx", tmp_path / "t", root / "without")
        run(*GPUFS, "cp", "-r", tmp_path / "t", root / "with")
    finally:
        run("umount", inside)
    assert sorted(map(str, (root / "without").rglob("*"))) == [f"{root}/without/f", f"{root}/without/other"]
    assert (root / "with/other/g").read_text() == "g"


def test_links_that_lead_into_what_is_being_made(root: Path, tmp_path: Path) -> None:
    (root / "t").mkdir()
    (root / "t/f").write_text("f")
    (root / "t/z-copies").symlink_to("../copies")
    (root / "copies").mkdir()
    done = run(*GPUFS, "cp", "-rL", root / "t", root / "copies", check=False)
    assert (done.returncode, "a directory cannot be copied into itself" in done.stderr) == (1, True)
    assert (root / "copies/t/f").read_text() == "f"


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


def test_what_is_left_alone_is_counted(root: Path, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    (root / "b").write_text("there")
    done = run(*GPUFS, "cp", "--json", "-n", "-t", root, *(tmp_path / name for name in "abc"))
    summary = json.loads(done.stdout)
    assert (summary["files"], summary["skipped"], summary["errors"]) == (2, 1, [])


def test_a_planted_link_does_not_lead_out_of_the_tree(root: Path, tmp_path: Path) -> None:
    (tmp_path / "t/sub").mkdir(parents=True)
    (tmp_path / "t/sub/f").write_text("secret")
    outside = root / "outside"
    outside.mkdir()
    (root / "t").mkdir()
    (root / "t/sub").symlink_to(outside)
    assert (
        "a file cannot be overwritten with a directory"
        in run(*GPUFS, "cp", "-r", tmp_path / "t", root, check=False).stderr
    )
    assert os.listdir(outside) == []


def test_into_itself_nothing_is_made(root: Path) -> None:
    """cp(1) finds it out when it is there already."""
    make_target(root)
    before = listing(root)
    for target in (root / "tree", root / "tree/sub"):
        done = run(*GPUFS, "cp", "-r", root / "tree", target, check=False)
        assert (done.returncode, "cannot be copied into itself" in done.stderr) == (1, True)
    assert listing(root) == before


@pytest.mark.parametrize("names", [("", "x"), ("x", "")])
def test_empty_names(names: tuple[str, str]) -> None:
    assert fails(2, "cp", *names) == "cp: an empty name is given where a file belongs"


def test_thousands_of_files_by_name_and_again(root: Path, tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(3000)]
    for name in names:
        (tmp_path / name).write_text(name)
    for _ in range(2):
        run(*GPUFS, "cp", *(tmp_path / name for name in names), root)
    assert sorted(os.listdir(root)) == sorted(names)
    assert all((root / name).read_text() == name for name in names)


def test_unreadable_files_are_told_and_the_others_copied(root: Path, tmp_path: Path) -> None:
    from support.processes import NOBODY, plain_user
    from support.users import user_gpufs

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
