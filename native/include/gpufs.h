/* gpufs.h - the C interface of the native engine; the only thing Python sees of it.
 *
 * Conventions
 *  - Every function that can fail returns a gpufs_status by value: error is 0 or a positive errno, device_code the
 *    vendor runtime's own code or 0. The text of the calling thread's last failure is gpufs_message().
 *  - Objects are named by gpufs_handle: 0 is never valid, a handle that was closed is EBADF for ever after.
 *  - No C++ exception crosses this interface. Any thread may call any function unless its comment says otherwise.
 *  - Sizes and offsets are in bytes, times in seconds and nanoseconds since 1970-01-01 UTC.
 *
 * cffi reads the part between the CFFI markers: it holds declarations only, no preprocessor lines.
 */
#ifndef GPUFS_H
#define GPUFS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* CFFI BEGIN */

typedef uint64_t gpufs_handle;

typedef struct {
  int32_t error;       /* 0 or a positive errno */
  int32_t device_code; /* the vendor runtime's code, 0 if the failure is not the device's */
} gpufs_status;

/* The text of the calling thread's last failed call; "" if none failed. Valid until its next call. */
const char *gpufs_message(void);
/* "1.2.3", the same as the Python package's version. */
const char *gpufs_version(void);

/* ---- logging ---- */

enum { GPUFS_LOG_DEBUG = 10, GPUFS_LOG_INFO = 20, GPUFS_LOG_WARNING = 30, GPUFS_LOG_ERROR = 40 };
/* Lines of at least `level` go to descriptor fd, which stays the caller's and open (-1: nowhere, the default). */
gpufs_status gpufs_log_configure(int fd, int level);

/* ---- engine and devices ---- */

typedef struct {
  const char *driver;    /* "host", "cuda", "hip" */
  int32_t devices;       /* host: how many to simulate; others: how many to use, 0 for all */
  uint64_t memory_bytes; /* cap for each device, 0 for the driver's default (host has none: EINVAL) */
  /* Files up to this size share slabs of device memory instead of taking a granule each; 0: none do. At most 1 MiB. */
  uint64_t slab_file_bytes;
} gpufs_engine_options;

typedef struct {
  char name[128];
  char pci_address[32]; /* "" where there is none */
  int32_t index;
  int32_t numa_node; /* -1: unknown */
  uint64_t total_bytes;
  uint64_t granule; /* bytes in which memory is taken */
  int32_t cpu_addressable;
} gpufs_device_info;

typedef struct {
  uint64_t total_bytes;
  uint64_t free_bytes;
  uint64_t held_bytes;    /* by buffers of this engine */
  int32_t health_error;   /* 0, or the errno of the failure that put the device out of service */
  int32_t health_device_code;
} gpufs_device_memory;

gpufs_status gpufs_engine_open(const gpufs_engine_options *options, gpufs_handle *engine);
/* Closes every buffer and mount of the engine that is still open, then the devices. */
gpufs_status gpufs_engine_close(gpufs_handle engine);
gpufs_status gpufs_engine_device_count(gpufs_handle engine, int32_t *count);
gpufs_status gpufs_engine_device_info(gpufs_handle engine, int32_t device, gpufs_device_info *info);
gpufs_status gpufs_engine_device_memory(gpufs_handle engine, int32_t device, gpufs_device_memory *memory);

/* ---- buffers ---- */

enum { GPUFS_SEEK_DATA = 3, GPUFS_SEEK_HOLE = 4 };
enum { GPUFS_KEEP_SIZE = 1, GPUFS_PUNCH_HOLE = 2, GPUFS_ZERO_RANGE = 16 }; /* as fallocate(2) */

typedef struct {
  uint64_t size;
  uint64_t held_bytes; /* device memory really taken */
  int32_t device;
} gpufs_buffer_info;

gpufs_status gpufs_buffer_create(gpufs_handle engine, int32_t device, gpufs_handle *buffer);
gpufs_status gpufs_buffer_close(gpufs_handle buffer);
gpufs_status gpufs_buffer_info_get(gpufs_handle buffer, gpufs_buffer_info *info);
gpufs_status gpufs_buffer_resize(gpufs_handle buffer, uint64_t size);
gpufs_status gpufs_buffer_allocate(gpufs_handle buffer, uint32_t mode, uint64_t offset, uint64_t bytes);
gpufs_status gpufs_buffer_seek(gpufs_handle buffer, int32_t whence, uint64_t offset, uint64_t *found);
/* *done is the count moved, short only at the end of the file (read). */
gpufs_status gpufs_buffer_read(gpufs_handle buffer, uint64_t offset, void *destination, uint64_t bytes, uint64_t *done);
gpufs_status gpufs_buffer_write(gpufs_handle buffer, uint64_t offset, const void *source, uint64_t bytes, uint64_t *done);
/* The device address of offset 0; from now on the buffer never moves and cannot grow past maximum_bytes. */
gpufs_status gpufs_buffer_address(gpufs_handle buffer, uint64_t maximum_bytes, uint64_t *address);

/* ---- mount: the data plane of one FUSE connection ---- */

typedef struct {
  int32_t fuse_fd;          /* an open and mounted /dev/fuse; the mount takes it over, also when opening fails */
  int32_t relay_fd;         /* native end of gpufs_relay_pair(), whose other end pyfuse3 has; taken over too */
  int32_t reader_threads;   /* 0: chosen by the number of CPUs */
  int32_t worker_threads;   /* bound of the pool for operations that may take long; 0: default */
  uint32_t max_write;       /* bytes of one READ or WRITE, page multiple; 0: default */
  uint64_t mask_flags;      /* INIT flags to treat as not offered by the kernel (tests of older kernels) */
  double attribute_timeout; /* seconds, for natively answered GETATTR */
  const char *transport;    /* "auto", "device" (later: "io_uring") */
} gpufs_mount_options;

/* The socket pair between the planes, both ends close-on-exec and with room for messages of a megabyte (or what the
 * system allows). native_fd is for gpufs_mount_options, control_fd is what pyfuse3 gets as /dev/fd/N; the caller owns
 * both until then, and control_fd for good. */
gpufs_status gpufs_relay_pair(int32_t *native_fd, int32_t *control_fd);

gpufs_status gpufs_mount_open(gpufs_handle engine, const gpufs_mount_options *options, gpufs_handle *mount);
/* Starts the threads. Call after the descriptor is mounted and before pyfuse3.main. */
gpufs_status gpufs_mount_start(gpufs_handle mount);
/* An eventfd of the mount's that becomes readable once the connection has ended (unmounted or aborted). */
gpufs_status gpufs_mount_ended_fd(gpufs_handle mount, int *fd);
/* Ends the threads, closes the descriptors and frees the table. Not to be called from a pyfuse3 handler. */
gpufs_status gpufs_mount_close(gpufs_handle mount);
/* JSON object of counters into text (NUL terminated). ERANGE with *needed set when capacity is too small. */
gpufs_status gpufs_mount_statistics(gpufs_handle mount, char *text, uint64_t capacity, uint64_t *needed);

/* ---- the inode table: attributes of every inode of a mount, shared by both planes ---- */

typedef struct {
  uint64_t ino;
  uint64_t size;
  uint64_t blocks; /* of 512 bytes, memory really held */
  int64_t atime, mtime, ctime;
  uint32_t atime_ns, mtime_ns, ctime_ns;
  uint32_t mode; /* type and permission bits */
  uint32_t nlink;
  uint32_t uid;
  uint32_t gid;
  uint32_t rdev;
  uint32_t blksize;
  int32_t device; /* where a regular file has its buffer and where STATFS looks; -1: no device */
} gpufs_attributes;

enum {
  GPUFS_SET_MODE = 1,
  GPUFS_SET_UID = 2,
  GPUFS_SET_GID = 4,
  GPUFS_SET_SIZE = 8,       /* regular files: resizes the buffer; others: sets the number */
  GPUFS_SET_ATIME = 16,
  GPUFS_SET_MTIME = 32,
  GPUFS_SET_CTIME = 64,
  GPUFS_SET_ATIME_NOW = 128,
  GPUFS_SET_MTIME_NOW = 256,
  GPUFS_SET_CTIME_NOW = 512,
  GPUFS_SET_NLINK = 1024
};

/* Adds an inode. A regular file with device >= 0 gets an empty buffer there (size is ignored). EEXIST if known. */
gpufs_status gpufs_inode_add(gpufs_handle mount, const gpufs_attributes *attributes);
/* Removes it; the buffer lives until the last open file and running operation on it end. ENOENT if unknown. */
gpufs_status gpufs_inode_remove(gpufs_handle mount, uint64_t ino);
gpufs_status gpufs_inode_get(gpufs_handle mount, uint64_t ino, gpufs_attributes *attributes);
/* Sets what `set` names, all or nothing, and returns the attributes as they are afterwards (attributes is in and out).
 * Of a mode only the permission bits are set. The change time becomes now unless it is set itself; a new size also sets
 * the modification time unless that is set. */
gpufs_status gpufs_inode_set(gpufs_handle mount, uint64_t ino, uint32_t set, gpufs_attributes *attributes);

/* Opens a regular file: *fh goes into pyfuse3's FileInfo, and READ and WRITE on it never reach Python.
 * flags: as open(2); O_TRUNC empties it. Bit 62 of *fh is set: handles of Python's own must not have it. */
gpufs_status gpufs_file_open(gpufs_handle mount, uint64_t ino, int32_t flags, uint64_t *fh);
/* The answer to RELEASE. */
gpufs_status gpufs_file_release(gpufs_handle mount, uint64_t fh);

/* A handle to the buffer of a regular file, which lives at least as long; gpufs_buffer_close() drops this reference
 * only. EISDIR or EINVAL for what has no buffer. Closed with the mount. */
gpufs_status gpufs_mount_buffer(gpufs_handle mount, uint64_t ino, gpufs_handle *buffer);

/* Tells the kernel, on the notification thread: contents and attributes, or a name, are not what it has cached.
 * Returns once queued; never blocks. */
gpufs_status gpufs_mount_invalidate_inode(gpufs_handle mount, uint64_t ino);
gpufs_status gpufs_mount_invalidate_entry(gpufs_handle mount, uint64_t parent, const char *name, uint64_t name_bytes);

/* CFFI END */

#ifdef __cplusplus
}
#endif

#endif /* GPUFS_H */
