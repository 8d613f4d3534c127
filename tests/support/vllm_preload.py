"""`vllm preload` as a program, without what vLLM's other commands import. Its arguments are the command's."""

from __future__ import annotations

import sys


def main() -> None:
    from vllm.entrypoints.cli.preload import PreloadSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    command = PreloadSubcommand()
    command.subparser_init(parser.add_subparsers())
    command.cmd(parser.parse_args(["preload", *sys.argv[1:]]))


if __name__ == "__main__":  # each cache is a process that imports this file
    main()
