# gpufs: everything that a developer runs. Each target may be run again; a second run does only what has changed.
#   make demo      set up this machine, build, mount, move real data in and out, unmount
#   make test      set up, build, all tests (native, Python, types, format); under 15 minutes on two cores
#   make check     sanitizer builds of the native tests, clang-tidy, all drivers over fakes, long campaigns
#   make bench     the benchmark: a table, and JSON in bench/results/
#   make docs      the knobs' page, and the Python interface's reference in build/docs/api/
#   make build     set up and build;  make format, make lint, make clean
#   make test-gpu, make bench-gpu    the same on a machine with a GPU
#   make wheel     dist/gpufs-*.whl, for any environment of Python
#   make deb       dist/gpufs_*.deb, for Debian and Ubuntu
#   make release   build/release/: all files of a release, checked and tried, and the commands that publish them;
#                  URL=https://HOST/PATH is where the project will be, for README and the packages
#   make install-helpers             for all users: gpufs, mount.gpufs, completions, manual pages, systemd unit (PREFIX, DESTDIR)
.DEFAULT_GOAL := build
.PHONY: setup build demo test check bench lint format clean docs test-gpu bench-gpu wheel deb release install-helpers uninstall-helpers

setup:
	@scripts/setup

build:
	@scripts/setup build
	@scripts/build

demo: build
	@scripts/demo

test:
	@scripts/test

check: setup
	@scripts/check

bench: build
	@scripts/setup bench
	@.venv/bin/python -m bench
	@.venv/bin/python -m bench.submissions

lint: setup
	@scripts/lint

format: setup
	@scripts/lint --fix

docs: build
	@scripts/docs

test-gpu:
	@scripts/test-gpu

bench-gpu:
	@scripts/bench-gpu
	@.venv/bin/python bench/gpu/programs.py

wheel: build
	@scripts/wheel

deb: wheel
	@scripts/deb

release: build
	@scripts/release $(URL)

install-helpers: wheel
	@scripts/install-helpers

uninstall-helpers:
	@scripts/install-helpers --remove

clean:
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis gpufs/engine/_native*.so gpufs/daemon/gpufs-keeper
