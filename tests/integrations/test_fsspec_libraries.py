"""Libraries that open files of a mount by gpufs:// and fsspec: pandas, pyarrow, datasets.

scripts/check libraries installs them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.mounting import Mounter
from support.pages import Shell, blocks
from support.processes import run

pytestmark = pytest.mark.slow


@pytest.fixture
def url(root: Path) -> str:
    return f"gpufs://{root}"


def test_pandas(url: str) -> None:
    import pandas

    frame = pandas.DataFrame({"number": range(1000), "text": [str(number) for number in range(1000)]})
    for write, read in (
        (frame.to_parquet, pandas.read_parquet),
        (frame.to_feather, pandas.read_feather),
        (frame.to_pickle, pandas.read_pickle),
    ):
        write(f"{url}/frame")
        assert read(f"{url}/frame").equals(frame)
    frame.to_csv(f"{url}/frame.csv.gz", index=False)
    assert pandas.read_csv(f"{url}/frame.csv.gz", dtype={"text": str}).equals(frame)


def test_pyarrow(url: str) -> None:
    import pyarrow
    import pyarrow.dataset
    import pyarrow.parquet

    table = pyarrow.table({"part": [1, 1, 2], "number": [0.5, None, 2]})
    fs = fsspec.filesystem("gpufs")
    path = fs._strip_protocol(url)
    pyarrow.parquet.write_table(table, f"{path}/table", filesystem=fs)
    assert pyarrow.parquet.read_table(f"{path}/table", filesystem=fs).equals(table)
    pyarrow.parquet.write_to_dataset(table, f"{path}/parts", partition_cols=["part"], filesystem=fs)
    found = pyarrow.dataset.dataset(f"{path}/parts", filesystem=fs, partitioning="hive").to_table()
    assert found.select(["part", "number"]).sort_by("part").equals(table.set_column(0, "part", found["part"]))


@pytest.fixture
def datasets(host: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", host / "cache")
    datasets.disable_progress_bars()
    yield datasets
    datasets.enable_progress_bars()


def test_datasets(url: str, datasets: Any) -> None:
    data = datasets.Dataset.from_dict({"number": [1, 2, 3]})
    data.save_to_disk(f"{url}/saved")
    assert datasets.load_from_disk(f"{url}/saved")["number"][:] == [1, 2, 3]
    data.to_parquet(f"{url}/data.parquet")
    for streaming in (False, True):
        loaded = datasets.load_dataset("parquet", data_files=f"{url}/data.parquet", split="train", streaming=streaming)
        assert [row["number"] for row in loaded] == [1, 2, 3]


def test_pandas_and_arrow(mount: Mounter, tmp_path: Path) -> None:
    import pandas

    mounted = mount()
    page, shell = "howto/pandas-and-datasets.md", Shell(mounted.path, tmp_path)
    (tmp_path / "train.csv").write_text("token\n1\n")
    (mounted.device / "data").mkdir()
    pandas.DataFrame({"number": range(9)}).to_feather(mounted.device / "table.arrow", compression="uncompressed")
    program = "\n".join([*blocks(page), "print(table.nbytes)"])
    printed = run(sys.executable, "-c", shell.here(program)).stdout
    assert f"['{mounted.device}/rows/train.csv', '{mounted.device}/rows/train.parquet']" in printed
    assert printed.endswith("\n72\n")
    assert (tmp_path / "train.parquet").read_bytes() == (mounted.device / "rows/train.parquet").read_bytes()
