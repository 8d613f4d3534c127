"""The knob table: what is read from where, what is refused and with which words, and the page made of it."""

import os
import sys
from pathlib import Path

import pytest
from support.processes import run

from gpufs import config
from gpufs.config import memory

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = Path("/nonexistent/gpufs.toml")


def load(
    arguments: dict[str, str | bool | None] | None = None,
    environ: dict[str, str] | None = None,
    config_file: Path | None = None,
    system_file: Path = NOWHERE,
) -> config.Settings:
    return config.load(
        arguments or {}, environ or {}, str(config_file) if config_file else None, system_file=system_file
    )


@pytest.mark.parametrize("page", ["knobs", "commands"])
def test_the_pages_of_the_reference_are_up_to_date(page: str) -> None:
    """`make docs` generates them."""
    made = run(sys.executable, ROOT / "scripts/generate_reference.py", page).stdout
    assert (ROOT / f"docs/{page}.md").read_text() == made


def test_a_table_is_for_one_mount(tmp_path: Path) -> None:
    file = tmp_path / "gpufs.toml"
    file.write_text(
        'memory = "64M"\nlog_level = "debug"\n["/mnt/a/"]\nmemory = "96M"\n["/mnt/b"]\nlog_level = "error"\n'
    )

    def values(mountpoint: str, **arguments: str) -> tuple[int, str]:
        found = config.load(arguments, {}, str(file), mountpoint=mountpoint)
        return found["memory"] >> 20, found["log_level"]

    assert [values(name) for name in ("/mnt/a", "/mnt/b", "/mnt", "")] == [
        (96, "debug"),
        (64, "error"),
        (64, "debug"),
        (64, "debug"),
    ]
    assert values("/mnt/a", memory="128M") == (128, "debug")
    file.write_text('["/mnt/b"]\nmemroy = "1G"\n')
    with pytest.raises(config.ConfigError, match="memory"):
        values("/mnt/a")
    file.write_text('["/mnt/b"]\nmemory = "much"\n')
    assert config.load({}, {}, str(file), mountpoint="/mnt/a")["memory"] is None
    with pytest.raises(config.ConfigError, match=r"/mnt/b"):
        values("/mnt/b")


@pytest.mark.parametrize("knob", config.KNOBS, ids=lambda knob: knob.name)
def test_every_knob_can_be_set_everywhere(knob: config.Knob, tmp_path: Path) -> None:
    """Command line, variable and file give the same value for the same text."""
    text = {
        "io_chunk_bytes": "1M",
        "io_pinned_bytes": "64M",
        "io_fastpath": "off",
        "slab_file_bytes": "1M",
        "lock_policy": "mandatory",
        "hip_memory": "plain",
        "io_file_systems": "nfs4,lustre",
        "memory": "64M",
        "user_limits": "root=1G,1234=none",
        "metadata": "64M",
        "driver": "host",
        "log_level": "debug",
        "log_file": "/tmp/a.log",
        "allow_other": "true",
        "trust_readers": "true",
        "evict": "true",
        "allow_non_empty": "true",
        "auto_unmount": "false",
        "survive": "false",
        "core_dumps": "true",
        "foreground": "true",
        "backing": "data=/srv/data,fixed=/srv/fixed:ro",
        "devices": "GPU-4f3e,2",
        "read_ahead": "1M",
    }.get(knob.name, "3")
    file = tmp_path / "a.toml"
    file.write_text(f'{knob.name} = "{text}"\n')
    values = [
        load({knob.name: text})[knob.name],
        load(environ={knob.variable: text})[knob.name],
        load(config_file=file)[knob.name],
    ]
    assert values[0] == values[1] == values[2] != knob.default


def test_the_command_line_wins_over_variables_and_files(tmp_path: Path) -> None:
    """Command line, environment, --config (instead of the other files), user's file, system's file, default."""
    system, named = tmp_path / "system.toml", tmp_path / "named.toml"
    user = tmp_path / "xdg/gpufs/config.toml"
    user.parent.mkdir(parents=True)
    system.write_text("devices = 1\nio_workers = 1\n")
    user.write_text("devices = 2\n")
    named.write_text("devices = 3\n")
    home = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}

    def devices(chosen: config.Settings) -> tuple[int, str]:
        return chosen["devices"], chosen.origins["devices"]

    assert devices(load(system_file=system)) == (1, str(system))
    assert devices(load(environ=home, system_file=system)) == (2, str(user))
    assert load(environ=home, system_file=system)["io_workers"] == 1
    assert devices(load(environ=home, config_file=named, system_file=system)) == (3, str(named))
    assert load(environ=home, config_file=named, system_file=system)["io_workers"] == 0
    assert devices(load(environ={**home, "GPUFS_CONFIG": str(named)}, system_file=system)) == (3, str(named))
    four = {**home, "GPUFS_DEVICES": "4"}
    assert devices(load(environ=four, config_file=named, system_file=system)) == (4, "GPUFS_DEVICES")
    assert devices(load({"devices": "5"}, four, named, system)) == (5, "--devices")
    assert devices(load({"devices": None}, four, named, system)) == (4, "GPUFS_DEVICES")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("all", 0),
        ("2", 2),
        ("2,", ["2"]),
        ("2,0", ["2", "0"]),
        ("2:0", ["2", "0"]),
        ("GPU-4f3e", ["GPU-4f3e"]),
        ("MIG-4f3e-12, GPU-9", ["MIG-4f3e-12", "GPU-9"]),
    ],
)
def test_devices_are_counted_or_listed(text: str, value: int | list[str]) -> None:
    assert load({"devices": text})["devices"] == value


def test_lists_in_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('backing = ["a=/x", "b=/y,z:ro"]\n')
    assert load(config_file=file)["backing"] == [("a", "/x", False), ("b", "/y,z", True)]
    file.write_text('devices = [2, "GPU-4f3e"]\n')
    assert load(config_file=file)["devices"] == ["2", "GPU-4f3e"]
    file.write_text("devices = [2]\n")
    assert load(config_file=file)["devices"] == ["2"]
    file.write_text('backing = ["a=/x", "a=/y"]\n')
    with pytest.raises(config.ConfigError, match=r"^backing: 'a=/x,a=/y' \(.*\) is not allowed"):
        load(config_file=file)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"io_chunk_bytes": "64M", "io_pinned_bytes": "1M"}, ["io_pinned_bytes: 1M", "io_chunk_bytes: 64M"]),
        ({"io_pinned_bytes": "1M"}, ["io_pinned_bytes: 1M (--io-pinned-bytes)", "io_chunk_bytes: 2M (default)"]),
    ],
)
def test_values_that_exclude_each_other_are_named(values: dict[str, str | bool | None], words: list[str]) -> None:
    with pytest.raises(config.ConfigError) as error:
        config.load(values, {}, system_file=NOWHERE)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("driver", "nvidia"),
        ("devices", "0"),
        ("devices", "two"),
        ("devices", "GPU-4f3e,all"),
        ("memory", "1M"),
        ("memory", "lots"),
        ("read_ahead", "5000"),
        ("keep_freed", "-1"),
        ("mask_flags", "x"),
        ("log_file", ""),
        ("mount_timeout", "0"),
        ("mount_timeout", "nan"),
        ("io_chunk_bytes", "3M"),
    ],
)
def test_a_bad_value_is_reported_with_its_knob_and_origin(name: str, text: str, tmp_path: Path) -> None:
    knob = config.BY_NAME[name]
    file = tmp_path / "a.toml"
    file.write_text(f'{name} = "{text}"\n')
    origins: list[tuple[dict[str, str | bool | None], dict[str, str], Path | None, str]] = [
        ({name: text}, {}, None, knob.option),
        ({}, {knob.variable: text}, None, knob.variable),
        ({}, {}, file, str(file)),
    ]
    for arguments, environ, config_file, origin in origins:
        with pytest.raises(config.ConfigError) as error:
            load(arguments, environ, config_file)
        assert str(error.value) == f"{name}: {text!r} ({origin}) is not allowed: {knob.kind.allowed}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("memroy = 1\n", "unknown key 'memroy', is it memory?"),
        ("xyzzy = 1\n", "unknown key 'xyzzy'"),
        ("memory = [1]\n", "memory: [1] ("),
        ('memory = ["1G"]\n', "memory: ['1G'] ("),
        ('backing = ["a=/", 5]\n', "backing: 'a=/,5' ("),
        ("backing = []\n", "backing: '' ("),
        ("memory\n", "is not valid TOML"),
        ("\xff", "is not valid TOML"),
    ],
)
def test_bad_files_are_named(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(config.ConfigError) as error:
        load(config_file=file)
    assert words in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def machine_root(tmp_path: Path, *, total: int, available: int, files: dict[str, str] | None = None) -> Path:
    content = {
        "proc/meminfo": f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n",
        **(files or {}),
    }
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


GIB = 1 << 30


def test_limits_of_all_cgroups_above_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "1\n",
    }
    root = machine_root(tmp_path, total=8 * GIB, available=6 * GIB, files=files)
    assert memory.memory_of_machine(root) == memory.Memory(4 * GIB, 2 * GIB)


def test_limits_of_version_1_count(tmp_path: Path) -> None:
    """In a container that shows the host's path of its cgroup, whose files are at the top."""
    files = {
        "proc/self/cgroup": "4:cpu:/docker/1\n3:memory:/docker/1\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    root = machine_root(tmp_path, total=8 * GIB, available=6 * GIB, files=files)
    assert memory.memory_of_machine(root) == memory.Memory(4 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("groups", "files", "limited"),
    [
        ("0::/a\n", {"a/memory.max": "max\n"}, False),
        ("0::/a/b\n", {"a/memory.max": f"{GIB}\n", "a/b/memory.max": "max\n"}, True),
        ("0::/\n", {"memory.max": f"{GIB}\n"}, True),  # in a container
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": f"{GIB}\n"}, True),
        ("4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"}, False),
        ("", {}, False),
    ],
)
def test_limited_memory_is_noticed(tmp_path: Path, groups: str, files: dict[str, str], limited: bool) -> None:
    found = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    root = machine_root(tmp_path, total=8 * GIB, available=6 * GIB, files={"proc/self/cgroup": groups, **found})
    assert config.is_memory_limited(root) == limited


def test_the_default_memory_fits_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of_machine", lambda: memory.Memory(8 * GIB, 6 * GIB))
    assert config.host_memory(None, 1) == 3 * GIB
    assert config.host_memory(None, 7) == 3 * GIB // 7 // config.GRANULE * config.GRANULE
    assert config.host_memory(2 * GIB, 4) == 2 * GIB
    with pytest.raises(config.ConfigError, match=r"memory: 3 x 3.0 GiB is more than this machine has: 8.0 GiB"):
        config.host_memory(3 * GIB, 3)
    monkeypatch.setattr(memory, "memory_of_machine", lambda: memory.Memory(8 * GIB, 3 << 20))
    with pytest.raises(config.ConfigError, match="too little for 2 devices"):
        config.host_memory(None, 2)


def test_a_pipe_in_place_of_the_users_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "gpufs"
    folder.mkdir()
    os.mkfifo(folder / "config.toml")
    with pytest.raises(config.ConfigError, match="not a regular file"):
        config.load({}, {"XDG_CONFIG_HOME": str(tmp_path)}, system_file=NOWHERE)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("given", ["the directory", "the file"])
def test_files_of_another_user_do_not_configure_root(tmp_path: Path, given: str) -> None:
    """sudo may keep the HOME of another user."""
    file = tmp_path / ".config/gpufs/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text('memory = "64M"\n')
    (tmp_path / "gpufs").symlink_to(file.parent)
    os.chown(tmp_path if given == "the directory" else file, 65534, 65534)
    for variable in ("HOME", "XDG_CONFIG_HOME"):
        assert load(environ={variable: str(tmp_path)})["memory"] is None
    assert load(environ={"HOME": str(tmp_path)}, config_file=file)["memory"] == 64 << 20
