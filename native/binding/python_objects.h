// What the Python module has besides the engine's interface: functions that take Python objects, which cffi cannot
// pass.
// The module is C.
#pragma once

#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#include "gpufs.h"

// ---- references that native objects hold ----

// Drops a reference to an object, from any thread that may wait for the interpreter's lock.
static void gpufs_drop_object(void* object) {
  if (!Py_IsInitialized()) return;  // after the interpreter has ended its objects are gone with it
  const PyGILState_STATE state = PyGILState_Ensure();
  Py_DecRef((PyObject*)object);
  PyGILState_Release(state);
}

static uintptr_t gpufs_drop_object_address(void) { return (uintptr_t)&gpufs_drop_object; }

// ---- DLPack ----

// The destructor of a capsule. Consumers rename a capsule: one with its first name has not been consumed.
static void gpufs_release_capsule(PyObject* capsule) {
  const int versioned = PyCapsule_IsValid(capsule, "dltensor_versioned");
  if (!versioned && !PyCapsule_IsValid(capsule, "dltensor")) return;
  gpufs_tensor_release(PyCapsule_GetPointer(capsule, versioned ? "dltensor_versioned" : "dltensor"), versioned);
}

static uintptr_t gpufs_capsule_destructor(void) { return (uintptr_t)&gpufs_release_capsule; }

// Returns a capsule with `bytes` bytes of memory that belongs to `owner`, as elements of uint8. NULL and an exception
// without memory for it. The caller has the interpreter's lock.
static PyObject* gpufs_bytes_capsule(PyObject* owner, void* data, int32_t device_type, int32_t device, int64_t bytes) {
  const gpufs_dl_tensor tensor = {data, device_type, device, 1, 1, 8, 1, &bytes, NULL, 0};
  void* managed = NULL;
  Py_IncRef(owner);  // until the consumer releases the tensor, or the export fails
  if (gpufs_tensor_export(0, owner, gpufs_drop_object, &tensor, 0, 0, &managed).error != 0) return PyErr_NoMemory();
  PyObject* const capsule = PyCapsule_New(managed, "dltensor", gpufs_release_capsule);
  if (capsule == NULL) gpufs_tensor_release(managed, 0);
  return capsule;
}

static uintptr_t gpufs_bytes_capsule_address(void) { return (uintptr_t)&gpufs_bytes_capsule; }
