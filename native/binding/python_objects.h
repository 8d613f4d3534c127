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
