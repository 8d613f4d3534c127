"""The counters of mounts for Prometheus."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpufs.statistics._format import DETAILS, DEVICE_GAUGES, ENGINE_COUNTERS, ENGINE_GAUGES

_SIZE_BOUNDS: Final = tuple(float(1 << power) for power in range(9, 37))  # 512 bytes to 64 GiB
_TIME_BOUNDS: Final = tuple((1 << power) / 1e9 for power in range(9, 38))  # 512 ns to 137 s
_MOUNT: Final = ("mountpoint",)
_HANGS_SECONDS: Final = 30.0  # without new gauges, which the process writes every second
_DEVICE: Final = ("mountpoint", "device")


def metrics(mounts: Iterable[dict[str, Any]]) -> bytes:
    """Return the counters of mounts in Prometheus' text format.

    Parameters
    ----------
    mounts
        For each mount what `parse` returns. One with "error", or whose process is dead, has only the series `gpufs_up`.
        The last of several with the same mountpoint counts.

    Returns
    -------
    bytes
        The text. Every series has the label `mountpoint`, and that of a device the label `device`. What a backend has
        never done is left out.
    """
    return generate_latest(registry(lambda: mounts))


def registry(read: Callable[[], Iterable[dict[str, Any]]]) -> CollectorRegistry:
    """Return a registry of the metrics of the mounts that ``read`` returns at each scrape, as for `metrics`."""
    collectors = CollectorRegistry()
    collectors.register(_Collector(read))
    return collectors


class _Collector(Collector):
    """The collector that prometheus_client asks for the families of metrics."""

    def __init__(self, read: Callable[[], Iterable[dict[str, Any]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        named = {_label(counters["mountpoint"]): counters for counters in self._read()}
        up = GaugeMetricFamily(
            "gpufs_up", "1 if the mount's counters can be read and its process writes them.", labels=_MOUNT
        )
        alive = {path: counters for path, counters in named.items() if not counters.get("error") and counters["alive"]}
        for mountpoint in named:
            hangs = mountpoint not in alive or alive[mountpoint]["updated"] < time.time() - _HANGS_SECONDS
            up.add_metric([mountpoint], float(not hangs))
        yield up
        yield from _families(alive)


def _label(text: str | None) -> str:
    """Make a label of a name: names of files are bytes, and the format is UTF-8."""
    return (text or "").encode(errors="backslashreplace").decode()


def _families(mounts: Mapping[str, dict[str, Any]]) -> Iterator[Metric]:
    build = GaugeMetricFamily("gpufs_build_info", "1; the labels say what runs.", labels=[*_MOUNT, "version", "driver"])
    started = GaugeMetricFamily(
        "gpufs_start_time_seconds", "When the mount's daemon began, in seconds since 1970.", labels=_MOUNT
    )
    deaths = CounterMetricFamily("gpufs_deaths", "Daemons of the mount that have died.", labels=_MOUNT)
    for mountpoint, counters in mounts.items():
        build.add_metric([mountpoint, _label(counters["version"]), _label(counters["driver"])], 1)
        started.add_metric([mountpoint], counters["started"])
        deaths.add_metric([mountpoint], counters["deaths"])
    yield from (build, started, deaths)
    for key, kind, names in (
        ("gauges", GaugeMetricFamily, ENGINE_GAUGES),
        ("counters", CounterMetricFamily, ENGINE_COUNTERS),
    ):
        for name, text in names.items():
            family = kind(f"gpufs_{name}", text, labels=_MOUNT)
            for mountpoint, counters in mounts.items():
                family.add_metric([mountpoint], counters[key][name])
            yield family

    devices = [
        ([mountpoint, device["name"]], device)
        for mountpoint, counters in mounts.items()
        for device in counters["devices"]
    ]
    for name, text in DEVICE_GAUGES.items():
        gauge = GaugeMetricFamily(f"gpufs_device_{name}", text, labels=_DEVICE)
        for labels, device in devices:
            gauge.add_metric(labels, device["gauges"][name])
        yield gauge
    yield from _of_backends(devices)
    for name, text in DETAILS.items():
        detail = CounterMetricFamily(f"gpufs_transfer_{name}", text, labels=[*_DEVICE, "direction"])
        for labels, device in devices:
            for flow, details in device["transfers"].items():
                detail.add_metric([*labels, _label(flow)], details[name])
        yield detail


def _of_backends(devices: Sequence[tuple[list[str], dict[str, Any]]]) -> Iterator[Metric]:
    names = [*_DEVICE, "backend", "direction"]
    moved = CounterMetricFamily("gpufs_bytes", "Bytes moved into (in) or out of (out) device memory.", labels=names)
    errors = CounterMetricFamily("gpufs_errors", "Operations that failed.", labels=names)
    running = GaugeMetricFamily("gpufs_in_flight", "Operations that have begun and not ended.", labels=names)
    refusals = CounterMetricFamily(
        "gpufs_refusals", "Requests that a backend did not take, by reason.", labels=[*names, "reason"]
    )
    sizes = HistogramMetricFamily("gpufs_operation_size_bytes", "Bytes that an operation moved.", labels=names)
    times = HistogramMetricFamily("gpufs_operation_duration_seconds", "How long an operation took.", labels=names)
    for place, device in devices:
        for backend, flows in device["backends"].items():
            for flow, counts in flows.items():
                if not (counts["operations"] or counts["in_flight"] or counts["refusals"]):
                    continue
                labels = [*place, _label(backend), _label(flow)]
                moved.add_metric(labels, counts["bytes"])
                errors.add_metric(labels, counts["errors"])
                running.add_metric(labels, counts["in_flight"])
                for reason, number in counts["refusals"].items():
                    refusals.add_metric([*labels, _label(reason)], number)
                sizes.add_metric(labels, _cumulative(counts["sizes"], _SIZE_BOUNDS), counts["bytes"])
                times.add_metric(labels, _cumulative(counts["times"], _TIME_BOUNDS), counts["seconds"])
    yield from (moved, errors, running, refusals, sizes, times)


def _cumulative(buckets: Sequence[Sequence[Any]], bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Return for each bound how many values are not above it."""
    shown = [
        (str(limit), sum(number for bound, number in buckets if bound is not None and bound <= limit))
        for limit in bounds
    ]
    return [*shown, ("+Inf", sum(number for _, number in buckets))]
