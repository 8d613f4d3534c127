// DLPack capsules of memory that a Python object owns; part of the Python module, which is C.
// The structures have the layout of DLPack 1.1 (https://dmlc.github.io/dlpack/latest/c_api.html).
// Consumers release a capsule from any thread, also without the interpreter's lock.
#pragma once

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
} gpufs_dlpack_tensor;

typedef struct gpufs_dlpack_plain {
  gpufs_dlpack_tensor tensor;
  void* owner;
  void (*deleter)(struct gpufs_dlpack_plain*);
} gpufs_dlpack_plain;

typedef struct gpufs_dlpack_versioned {
  uint32_t major;
  uint32_t minor;
  void* owner;
  void (*deleter)(struct gpufs_dlpack_versioned*);
  uint64_t flags;
  gpufs_dlpack_tensor tensor;
} gpufs_dlpack_versioned;

static void gpufs_dlpack_release(void* owner, void* block) {
  // After the interpreter has ended its objects are gone with it.
  if (Py_IsInitialized()) {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DecRef((PyObject*)owner);
    PyGILState_Release(state);
  }
  free(block);
}

static void gpufs_dlpack_delete_plain(gpufs_dlpack_plain* managed) { gpufs_dlpack_release(managed->owner, managed); }

static void gpufs_dlpack_delete_versioned(gpufs_dlpack_versioned* managed) {
  gpufs_dlpack_release(managed->owner, managed);
}

// Consumers rename a capsule when they take it over. One that still has its first name was not taken.
static void gpufs_dlpack_drop(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) {
    gpufs_dlpack_delete_plain((gpufs_dlpack_plain*)PyCapsule_GetPointer(capsule, "dltensor"));
  } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    gpufs_dlpack_delete_versioned((gpufs_dlpack_versioned*)PyCapsule_GetPointer(capsule, "dltensor_versioned"));
  }
}

// A capsule that keeps `owner` alive. `extents`: ndim sizes, then ndim strides, in elements. `flags`: of a versioned
// capsule. Called with the interpreter's lock; NULL with an exception set if there is no memory.
static PyObject* gpufs_dlpack_capsule(PyObject* owner, int versioned, uint64_t flags, const gpufs_dlpack_tensor* tensor,
                                      const int64_t* extents) {
  const size_t header = versioned ? sizeof(gpufs_dlpack_versioned) : sizeof(gpufs_dlpack_plain);
  const size_t extents_bytes = 2 * (size_t)tensor->ndim * sizeof(int64_t);
  char* const block = (char*)malloc(header + extents_bytes);
  if (block == NULL) return PyErr_NoMemory();
  int64_t* const copied = (int64_t*)(block + header);
  memcpy(copied, extents, extents_bytes);
  gpufs_dlpack_tensor filled = *tensor;
  filled.shape = copied;
  filled.strides = copied + tensor->ndim;
  if (versioned) {
    const gpufs_dlpack_versioned managed = {1, 1, owner, gpufs_dlpack_delete_versioned, flags, filled};
    memcpy(block, &managed, sizeof managed);
  } else {
    const gpufs_dlpack_plain managed = {filled, owner, gpufs_dlpack_delete_plain};
    memcpy(block, &managed, sizeof managed);
  }
  PyObject* const capsule = PyCapsule_New(block, versioned ? "dltensor_versioned" : "dltensor", gpufs_dlpack_drop);
  if (capsule == NULL) {
    free(block);
    return NULL;
  }
  Py_IncRef(owner);
  return capsule;
}

// Where gpufs_dlpack_capsule is: cffi cannot pass Python objects, so ctypes calls it.
static void* gpufs_dlpack_capsule_address(void) { return (void*)gpufs_dlpack_capsule; }
