"""The modes in which a program uses a file's memory in place, named as numpy.memmap names them."""

from typing import Final, Literal, TypeAlias, get_args

Mode: TypeAlias = Literal["r", "r+", "c"]

READ: Final = "r"
READ_WRITE: Final = "r+"
COPY_ON_WRITE: Final = "c"
# The environment's variable with the mode in which a program's safetensors files are used in place.
IN_PLACE_VARIABLE: Final = "GPUFS_IN_PLACE"
# With it, such programs print what is in place and what was copied.
REPORT_VARIABLE: Final = "GPUFS_IN_PLACE_REPORT"
MODES: Final[tuple[Mode, ...]] = get_args(Mode)


def check_mode(mode: str) -> None:
    """Raise ValueError unless it is one of the modes."""
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is none of 'r', 'r+' and 'c'")
