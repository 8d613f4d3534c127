"""Writes the C source of gpufs.engine._native from the declarations in native/include/gpufs.h.

Usage: generate_binding.py HEADER OUTPUT
The declarations are what stands between the header's CFFI markers. The build calls this; it needs cffi alone.
"""

import sys
from pathlib import Path

import cffi

BEGIN = "/* CFFI BEGIN */"
END = "/* CFFI END */"

# What the module has besides the engine's interface: native/binding/dlpack.h.
PYTHON_ONLY = "void* gpufs_dlpack_capsule_address(void);"
# What Python calls when a capsule with a DLPack tensor goes that nobody has consumed. A consumer renames the capsule.
# In C, because a destructor gets the capsule, which cffi cannot pass on.
CAPSULE_DECLARATION = "uintptr_t gpufs_capsule_destructor(void);"
CAPSULE_SOURCE = """
static void gpufs_release_capsule(PyObject *capsule) {
  const int versioned = PyCapsule_IsValid(capsule, "dltensor_versioned");
  if (!versioned && !PyCapsule_IsValid(capsule, "dltensor")) return;
  gpufs_tensor_release(PyCapsule_GetPointer(capsule, versioned ? "dltensor_versioned" : "dltensor"), versioned);
}
static uintptr_t gpufs_capsule_destructor(void) { return (uintptr_t)&gpufs_release_capsule; }
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
    builder.cdef(PYTHON_ONLY)
    builder.cdef(CAPSULE_DECLARATION)
    builder.set_source("gpufs.engine._native", '#include "gpufs.h"\n#include "dlpack.h"\n' + CAPSULE_SOURCE)
    builder.emit_c_code(output)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} HEADER OUTPUT")
    try:
        main(sys.argv[1], sys.argv[2])
    except (OSError, ValueError, cffi.CDefError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")
