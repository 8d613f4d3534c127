# The compiled module: what cffi made of native/include/gpufs.h. Typed where it is used, in _binding.py.
from typing import Any

ffi: Any
lib: Any
