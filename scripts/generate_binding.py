"""Writes the C source of gpufs.engine._native from the declarations in native/include/gpufs.h.

Usage: generate_binding.py HEADER OUTPUT
The declarations are what stands between the header's CFFI markers. The build calls this; it needs cffi alone.
"""

import sys
from pathlib import Path

import cffi

BEGIN = "/* CFFI BEGIN */"
END = "/* CFFI END */"

# What Python uses of native/binding/python_objects.h.
PYTHON_OBJECTS = """
uintptr_t gpufs_drop_object_address(void);
uintptr_t gpufs_capsule_destructor(void);
uintptr_t gpufs_bytes_capsule_address(void);
"""


def declarations(header: str) -> str:
    """The text between each pair of markers. ValueError when there is none or a pair is not closed."""
    parts = header.split(BEGIN)
    if len(parts) < 2:
        raise ValueError(f"no {BEGIN} marker")
    found = []
    for part in parts[1:]:
        text, end, _ = part.partition(END)
        if not end:
            raise ValueError(f"{BEGIN} without {END}")
        found.append(text)
    return "\n".join(found)


def main(header: str, output: str) -> None:
    """Generates `output` from `header`; the file is left alone where nothing changed, so that nothing is rebuilt."""
    builder = cffi.FFI()
    builder.cdef(declarations(Path(header).read_text(encoding="utf-8")))
    builder.cdef(PYTHON_OBJECTS)
    builder.set_source("gpufs.engine._native", '#include "gpufs.h"\n#include "python_objects.h"\n')
    builder.emit_c_code(output)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} HEADER OUTPUT")
    try:
        main(sys.argv[1], sys.argv[2])
    except (OSError, ValueError, cffi.CDefError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")
