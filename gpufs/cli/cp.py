"""gpufs cp: copies files into device memory, out of it, and between devices."""

from typing import Any

import click

from gpufs.cli import _copy_options
from gpufs.cli._main import complete_directories, complete_files


@click.command(name="cp")
@click.argument("names", metavar="SOURCE... [DEST]", nargs=-1, required=True, shell_complete=complete_files)
@click.option(
    "-t",
    "--target-directory",
    "directories",
    metavar="DIR",
    multiple=True,
    shell_complete=complete_directories,
    help="Copy all SOURCEs into DIR. Given more than once, copy to each DIR and read each SOURCE once.",
)
@click.option(
    "-T", "--no-target-directory", "exact", is_flag=True, help="DEST is the copy itself, not a directory for it."
)
@click.option("-r", "-R", "--recursive", is_flag=True, help="Copy directories; symbolic links are copied as links.")
@click.option("-L", "--dereference", is_flag=True, help="Copy the files that symbolic links lead to, with -r and -a.")
@click.option("-p", "--preserve", is_flag=True, help="Keep mode, times and, where allowed, owner.")
@click.option("-a", "--archive", is_flag=True, help="The same as -r -p.")
@click.option("-n", "--no-clobber", is_flag=True, help="Skip files that already exist.")
@click.option("-u", "--update", is_flag=True, help="Skip files whose copies have the same size and time, or version.")
@click.option("--checksum", is_flag=True, help="With -u: compare contents instead of times.")
@click.option("--dry-run", is_flag=True, help="Copy nothing, and print what would be copied.")
@click.option(
    "--include", metavar="GLOB", multiple=True, help="With -r: copy only files that match this, or another --include."
)
@click.option("--exclude", metavar="GLOB", multiple=True, help="With -r: leave out files and directories that match.")
@click.option(
    "--partial",
    is_flag=True,
    help="Copy as much as fits, and keep a new file whose copy failed; go on with one of a URL.",
)
@_copy_options.verify
@_copy_options.fsync
@_copy_options.jobs("copied")
@click.option(
    "--fastpath",
    type=click.Choice(["auto", "off", "require"]),
    default="auto",
    help="Move the bytes between storage and device without host memory. auto: where possible, as the mount is "
    "configured; require: fail where it is not.  [default: auto]",
)
@_copy_options.shell
@_copy_options.remote_gpufs
@_copy_options.verbose
@_copy_options.quiet
@click.option("--json", is_flag=True, help="Print what was copied, and how, as a JSON object.")
@_copy_options.progress
def command(names: tuple[str, ...], directories: tuple[str, ...], **options: Any) -> int:
    """Copy SOURCE to DEST, or several SOURCEs into the directory DEST, at the engine's speed.

    With -t all names are SOURCEs. Repeat -t to load one file onto several GPUs: the file is read once, and its first
    copy goes from GPU to GPU. In bash: gpufs cp model.safetensors -t/mnt/gpufs/gpu{0..3}

    At least one side is on a gpufs mount. This command opens the files with your rights, and the mount's daemon moves
    the bytes. The other side may be a URL: s3://, gs://, az://, http(s):// or hf://ORG/MODEL[@REVISION][/FILE]; only
    the first three take files. A name may be HOST:PATH, on a machine that ssh reaches and that has gpufs; with several
    -t HOST:PATH each machine passes on to the next. - is standard input as SOURCE, or standard output as DEST. Copies
    that do not fit are refused before any byte is copied. If a copy fails or is interrupted, a new file is removed; an
    existing file has lost its old content and holds what was copied. Models in the cache of a hub are links to files
    elsewhere: copy them by -rL.
    For other options of cp(1), run cp itself. Exit codes: 0 all copied, 1 not all, 2 wrong options.
    """
    if len(names) == 1 and not directories:
        raise click.UsageError("Missing argument 'DEST'.", click.get_current_context())
    from gpufs.cli._cp_run import CpOptions, run  # help and completions need no client

    return run(list(names), list(directories), CpOptions(**options))
