"""Fixtures of all tests.

Tests that take `root` get an empty directory on a real gpufs mount, or below --gpufs-root=DIR (a directory of any
file system: the contract must hold on tmpfs too). Where gpufs differs from tmpfs for a reason that lies in GPU memory
or in FUSE, the test asks `on_gpufs` and says why.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support import fake_gpu
from support.cli import mountpoint, open_directory  # noqa: F401 - fixtures
from support.data import MIB, directory, remove_tree
from support.hanging import HangingMount
from support.mounting import GpufsMount, Mounter, Session, SharedMount, default_memory
from support.processes import NOBODY, session_processes, wait_until
from support.watchdog import mounted_at

SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpufs")
    group.addoption("--driver", default="host", choices=["host", "cuda", "hip"], help="driver of the mounts")
    group.addoption("--gpufs-root", metavar="DIR", help="run the contract tests in DIR instead of a mount")
    group.addoption("--mount-option", action="append", default=[], help="one more word for every `gpufs mount`")
    group.addoption("--slow", action="store_true", help="also the campaigns, and the long profile of property tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "driver: depends on the driver; scripts/test-fakes runs it over others")
    config.addinivalue_line("markers", "complains: the daemon is expected to log warnings")
    os.environ.pop("PYTHONUNBUFFERED", None)  # it hides what happens to output that is still buffered at the end
    # Shells ignore SIGINT for background jobs, nohup ignores SIGHUP, and programs that tests start would inherit that.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.umask(0o022)  # other users read what tests create
    config.stash[SESSION] = Session()
    common: dict[str, Any] = {
        "deadline": None,
        "print_blob": True,
        "suppress_health_check": list(hypothesis.HealthCheck),
    }
    hypothesis.settings.register_profile("short", derandomize=True, database=None, **common)
    hypothesis.settings.register_profile("long", database=None, **common)
    hypothesis.settings.load_profile("long" if config.getoption("--slow") else "short")


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION in config.stash:
        text = config.stash[SESSION].close()
        if text:
            print(f"\nwatchdog:\n{text}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="a campaign: needs --slow"))


def pytest_collection_finish() -> None:
    """What all the modules have loaded stays: to look through it again and again took a tenth of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Arms the watchdog a little beyond the test's own time-out: if that does not end the test, it aborts the mount."""
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0]) if marker and marker.args else float(item.config.getini("timeout") or 120)
    session = item.config.stash[SESSION]
    session.tell(do="arm", seconds=seconds + 10, what=item.nodeid)
    try:
        return (yield)
    finally:
        session.tell(do="disarm")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After a failure, ignores warnings about open files: the traceback keeps them alive into later tests."""
    report = yield
    if report.failed:
        for kind in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
            item.config.addinivalue_line("filterwarnings", f"default::{kind}")
    return report


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The test session. At its end no mount and no process of it may be left."""
    session: Session = request.config.stash[SESSION]
    yield session
    mounts = [str(path) for path in session.scratch.glob("mnt-*") if mounted_at(str(path))]
    assert not mounts, f"left mounted: {mounts}"
    # A guard ends shortly after its daemon.
    try:
        wait_until(lambda: not session_processes(session.name), 20, "the end of all processes")
    except AssertionError as error:
        raise AssertionError(f"left running: {session_processes(session.name)}") from error


@pytest.fixture(scope="session")
def cached(request: pytest.FixtureRequest) -> bool:
    """Whether files use the page cache, as on kernels without direct mappings (before 6.6)."""
    direct_io_allow_mmap = 1 << 36
    words = (word.partition("=") for word in request.config.getoption("--mount-option"))
    return any(name == "--mask-flags" and int(value, 0) & direct_io_allow_mmap for name, _, value in words)


@pytest.fixture(scope="session")
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--driver"))


@pytest.fixture
def on_cuda(driver: str) -> None:
    """For tests of a real GPU."""
    if driver != "cuda":
        pytest.skip("needs --driver cuda")


@pytest.fixture
def on_host_memory(driver: str) -> None:
    """For tests that read attached memory with the CPU."""
    if driver != "host":
        pytest.skip("reads attached memory with the CPU")


@pytest.fixture
def mount(session: Session, driver: str, pytestconfig: pytest.Config) -> Iterator[Mounter]:
    """Creates mounts for one test: mount("--option", memory=..., ...) -> GpufsMount. All end with the test."""
    made: list[GpufsMount] = []

    def make(*options: str, **named: object) -> GpufsMount:
        words = [*pytestconfig.getoption("--mount-option"), *options]
        made.append(GpufsMount(session, *words, **{"driver": driver, **named}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.rescue()


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.slow)])
def own(request: pytest.FixtureRequest, mount: Mounter, tmp_path: Path) -> Mounter:
    """own("--option", memory=...): a mount with a directory for nobody, over host memory and over a fake of CUDA."""

    def make(*words: str, memory: int = 128 * MIB, devices: int = 1) -> GpufsMount:
        environment = fake_gpu.environment(tmp_path, devices=devices) if request.param == "cuda" else {}
        options = {"driver": request.param, "memory": memory, "devices": devices, "environment": environment}
        made = mount(*words, allow_other=True, **options)
        folder = made.device / "nobodys"
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
        return made

    return make


@pytest.fixture(scope="session")
def _shared(session: Session, driver: str, pytestconfig: pytest.Config) -> Iterator[SharedMount]:
    words = pytestconfig.getoption("--mount-option")
    shared = SharedMount(
        lambda: GpufsMount(session, *words, driver=driver, devices=2, memory=default_memory(), allow_other=True)
    )
    yield shared
    shared.close()


@pytest.fixture
def shared_mount(request: pytest.FixtureRequest, _shared: SharedMount) -> Iterator[GpufsMount]:
    """The mount that tests share, with two devices on the host driver, open to all users."""
    mount = _shared.get()
    yield mount
    if request.node.get_closest_marker("complains"):
        time.sleep(0.1)  # what it logs late is not the next test's
        mount.complaints()
    else:
        _shared.check()


@pytest.fixture(scope="session")
def on_gpufs(request: pytest.FixtureRequest) -> bool:
    """False if the contract tests run on another file system."""
    return request.config.getoption("--gpufs-root") is None


@pytest.fixture(scope="module", autouse=True)
def _no_garbage() -> Iterator[None]:
    """The tracebacks of failures that tests expected keep arrays, whose leases the next file's tests would see."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def slow() -> Iterator[HangingMount]:
    """A server whose file takes minutes to read."""
    with HangingMount(operations=(), good=1 << 30, delay=0.005) as server:
        yield server


_numbers = itertools.count()


@pytest.fixture
def root(request: pytest.FixtureRequest, on_gpufs: bool) -> Iterator[Path]:
    """An empty directory, mode 777, on the file system under test."""
    if on_gpufs:
        base = request.getfixturevalue("shared_mount").device
    else:
        base = Path(request.config.getoption("--gpufs-root"))
    path = Path(base) / f"t{os.getpid()}-{next(_numbers)}"
    path.mkdir()
    path.chmod(0o777)
    yield path
    remove_tree(path)


@pytest.fixture
def reference() -> Iterator[Path]:
    """An empty directory, mode 777, on tmpfs."""
    with directory("/dev/shm") as path:
        yield path


@pytest.fixture
def host() -> Iterator[Path]:
    """An empty directory, mode 777, on a disk."""
    with directory("/var/tmp") as path:
        yield path
