"""A program with memory on a GPU, over the fake libraries: registers a part of an allocation as a file.

Usage: python -m support.fake_program cuda|hip PATH BYTES OFFSET KIND     It prints "ready" or the failure, and then
serves lines on standard input: "write OFFSET HEX", "read OFFSET BYTES", "close", "end".
KIND: plain (one allocation), virtual (mapped physical memory), pieces (the same, 2 MiB at a time, as torch's expandable
segments), pinned (of the host).
"""

from __future__ import annotations

import ctypes
import sys

import gpufs
from support.data import noise

CUDA = {
    "library": "libcuda.so.1",
    "allocate": "cuMemAlloc_v2",
    "create": "cuMemCreate",
    "reserve": "cuMemAddressReserve",
    "map": "cuMemMap",
    "access": "cuMemSetAccess",
    "pin": "cuMemHostRegister_v2",
}
HIP = {
    "library": "libamdhip64.so.7",
    "allocate": "hipMalloc",
    "create": "hipMemCreate",
    "reserve": "hipMemAddressReserve",
    "map": "hipMemMap",
    "access": "hipMemSetAccess",
    "pin": "hipHostRegister",
}
_GRANULE = 2 << 20


def must(code: int) -> None:
    if code:
        raise AssertionError(f"the fake library returns {code}")


def allocate(driver: str, size: int, kind: str) -> int:
    names = CUDA if driver == "cuda" else HIP
    library = ctypes.CDLL(names["library"])
    if driver == "cuda":
        context = ctypes.c_void_p()
        must(library.cuInit(0))
        must(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        must(library.cuCtxPushCurrent_v2(context))
    else:
        must(library.hipInit(0))
    if kind == "pinned":
        memory = ctypes.create_string_buffer(size)
        globals()["keep"] = memory
        must(library[names["pin"]](memory, ctypes.c_size_t(size), 1))
        return ctypes.addressof(memory)
    address = ctypes.c_uint64()
    if kind in ("virtual", "pieces"):
        size64, zero, handle = ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64()
        # Pinned memory of device 0 that can be exported as a descriptor; access of device 0 for reading and writing.
        properties, access = (ctypes.c_int * 8)(1, 1, 1, 0), (ctypes.c_int * 3)(1, 0, 3)
        must(library[names["reserve"]](ctypes.byref(address), size64, zero, zero, zero))
        step = _GRANULE if kind == "pieces" else size
        for offset in range(0, size, step):
            piece, bytes64 = ctypes.c_uint64(address.value + offset), ctypes.c_size_t(step)
            must(library[names["create"]](ctypes.byref(handle), bytes64, properties, zero))
            must(library[names["map"]](piece, bytes64, zero, handle, zero))
            must(library[names["access"]](piece, bytes64, access, ctypes.c_size_t(1)))
        return address.value
    must(library[names["allocate"]](ctypes.byref(address), ctypes.c_size_t(size)))
    return address.value


def main() -> None:
    driver, path, size, offset, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    base = allocate(driver, size, kind)
    address = base + offset
    content = noise(size)
    ctypes.memmove(base, content, size)  # the fake device's memory is the host's
    try:
        registration = gpufs.register(address, path, size=size - offset)
    except OSError as error:
        print(error.errno, error, flush=True)
        return
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "write":
            data = bytes.fromhex(words[2])
            ctypes.memmove(address + int(words[1]), data, len(data))
        elif words[0] == "read":
            print(ctypes.string_at(address + int(words[1]), int(words[2])).hex(), flush=True)
            continue
        elif words[0] == "close":
            registration.close()
        elif words[0] == "end":
            return
        print("done", flush=True)


if __name__ == "__main__":
    main()
