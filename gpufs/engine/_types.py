"""What callers may pass in, as types: for type checkers and the reference; nothing imports it when a program runs."""

import ctypes
from typing import Any, TypeAlias

from numpy.typing import NDArray
from typing_extensions import Buffer as PythonBuffer

from gpufs.engine._arrays import DeviceRange, SupportsCudaArrayInterface, SupportsDLPack
from gpufs.engine._buffer import Buffer
from gpufs.engine._operations import Late

# Before Python 3.12 numpy does not declare that its arrays have the buffer protocol.
MemoryBuffer: TypeAlias = PythonBuffer | NDArray[Any]
# What a transfer can move to and from: see device_range() for arrays.
Memory: TypeAlias = Buffer | DeviceRange | SupportsCudaArrayInterface | SupportsDLPack | PythonBuffer
# A number, or the place from which it is read when the stream comes to the operation: see Late.
Number: TypeAlias = int | Late | ctypes.c_int64 | ctypes.c_uint64 | MemoryBuffer
