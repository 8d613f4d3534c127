/* gpufs.h - the C interface of the native engine; the only thing Python sees of it.
 *
 * Conventions
 *  - Every function that can fail returns a gpufs_status by value: error is 0 or a positive errno, device_code the
 *    vendor runtime's own code or 0. The text of the calling thread's last failure is gpufs_message().
 *  - Objects are named by gpufs_handle: 0 is never valid, a handle that was closed is EBADF for ever after.
 *  - No C++ exception crosses this interface. Any thread may call any function unless its comment says otherwise.
 *  - Sizes and offsets are in bytes, times in seconds and nanoseconds since 1970-01-01 UTC.
 *  - Values of enums and flags are not checked: Python makes them from names.
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

/* Closes any handle but an engine's, and those that belong to its object. Only these wait or fail, and stay open then:
 * mount: ends its threads; not while the control plane answers a request.
 * transfer, queue: cancels what is under way and waits until none of it uses its memory any more. ETIMEDOUT: some has
 *   not ended within 10 s and uses its memory until it does; a queue takes no more, and what has ended is collected.
 * pool: EBUSY while something is allocated in it.
 * Memory of a mapping is unmapped once no DLPack tensor of it is left. */
gpufs_status gpufs_close(gpufs_handle handle);

/* The text of the calling thread's last failed call; "" if none failed. Valid until its next call. */
const char* gpufs_message(void);
/* "1.2.3", the same as the Python package's version. */
const char* gpufs_version(void);

/* ---- logging ---- */

enum { GPUFS_LOG_DEBUG = 10, GPUFS_LOG_INFO = 20, GPUFS_LOG_WARNING = 30, GPUFS_LOG_ERROR = 40 };
/* Lines of at least `level` go to descriptor fd, which stays the caller's and open (-1: nowhere, the default). Writing
 * blocks as the descriptor does; lines for which a non-blocking one has no space are dropped, and counted in a later
 * one. */
gpufs_status gpufs_log_configure(int fd, int level);

/* ---- engine and devices ---- */

/* How the HIP driver allocates a buffer's memory. PLAIN: by one hipMalloc, which the fastpath reaches; it grows by a
 * copy. VIRTUAL: in ranges of addresses, which the fastpath does not reach. AUTO: PLAIN if the kernel can move files to
 * and from the device. Memory is always plain if the runtime's ranges do not work. */
enum { GPUFS_HIP_MEMORY_AUTO = 0, GPUFS_HIP_MEMORY_VIRTUAL = 1, GPUFS_HIP_MEMORY_PLAIN = 2 };

/* Whether the engine locks host memory for copies (gpufs_buffer_read, gpufs_buffer_write) and the memory of a mount's
 * requests. AUTO: only that of requests, if possible. OFF: none. MANDATORY: both, for the time of a copy, which fails
 * if its memory cannot be locked. */
enum { GPUFS_LOCK_AUTO = 0, GPUFS_LOCK_OFF = 1, GPUFS_LOCK_MANDATORY = 2 };

typedef struct {
  const char* driver;    /* "host", "cuda", "hip" */
  int32_t devices;       /* host: how many to simulate; others: how many to use, 0 for all */
  uint64_t memory_bytes; /* cap for each device, 0 for the driver's default (host has none: EINVAL) */
  /* Buffers up to this size share slabs of device memory instead of taking a granule each; 0: none. At most 1 MiB. */
  uint64_t slab_file_bytes;
  /* The file for the counters, which outlives the process; NULL or "": private memory. The file is replaced, has mode
   * 0600, and is locked while the engine lives. If it cannot be created the engine logs that and uses private memory.
   * docs/internals/statistics-file.md has its format. */
  const char* statistics_path;
  /* GPUs: how long released device memory is cached for the next buffer; 0: no cache. */
  uint32_t keep_freed_ms;
  int32_t lock_policy; /* GPUFS_LOCK_AUTO, _OFF or _MANDATORY: when host memory is locked without a request */
  int32_t hip_memory;  /* GPUFS_HIP_MEMORY_AUTO, _VIRTUAL or _PLAIN; other drivers: no effect */
  /* GPUs: which to use, in this order, instead of the first ones: numbers and UUIDs ("GPU-4f3e..."; a unique beginning
   * is enough), separated by commas. ENXIO, with a list of all GPUs, if one does not exist. NULL or "": by number. */
  const char* chosen_devices;
  /* Pinned host memory as one device more, the last one, to which files can be parked; 0: none. EOPNOTSUPP: the driver
   * cannot have it. */
  uint64_t host_memory_bytes;
} gpufs_engine_options;

typedef struct {
  char name[128];
  char pci_address[32]; /* "" where there is none */
  char uuid[64];        /* "GPU-..." or "MIG-..." as the vendor's tools print it; "" where there is none */
  int32_t index;
  int32_t numa_node; /* -1: unknown */
  uint64_t total_bytes;
  uint64_t granule;    /* bytes in which memory is allocated */
  uint64_t slot_bytes; /* the largest buffer that shares a granule: it takes a power of two of bytes; 0: none does */
  int32_t cpu_addressable;
  int32_t fastpath_memory; /* the fastpath can reach the memory of buffers */
  int32_t keeps_memory;    /* the memory of buffers can outlive the process: gpufs_mount_options.keeper */
  int32_t host_tier;       /* it is that of gpufs_engine_options.host_memory_bytes */
} gpufs_device_info;

typedef struct {
  uint64_t total_bytes;
  uint64_t free_bytes;
  uint64_t held_bytes;  /* by buffers of this engine */
  int32_t health_error; /* 0, or the errno of the failure that put the device out of service */
  int32_t health_device_code;
} gpufs_device_memory;

gpufs_status gpufs_engine_open(const gpufs_engine_options* options, gpufs_handle* engine);
/* Closes every open buffer and mount of the engine, then the devices. ETIMEDOUT: the engine is closed, but a device did
 * not finish what operations and transfers waited for. Memory of the program that they use must stay allocated until
 * the process ends. */
gpufs_status gpufs_engine_close(gpufs_handle engine);
gpufs_status gpufs_engine_device_count(gpufs_handle engine, int32_t* count);
gpufs_status gpufs_engine_device_info(gpufs_handle engine, int32_t device, gpufs_device_info* info);
gpufs_status gpufs_engine_device_memory(gpufs_handle engine, int32_t device, gpufs_device_memory* memory);
/* Fails if the device is out of service. Never waits for it. */
gpufs_status gpufs_engine_device_check(gpufs_handle engine, int32_t device);

/* The counters of the engine, in a file or not, have the format of docs/internals/statistics-file.md. */
/* Stores a description of them, a JSON object. EFBIG beyond 3840 bytes. */
gpufs_status gpufs_statistics_describe(gpufs_handle engine, const char* json);
/* Writes the gauges (memory, pools) and the time beside the counters. Call it about every second. */
gpufs_status gpufs_statistics_publish(gpufs_handle engine);
/* Publishes, and gives a copy of everything, which is valid until the calling thread asks for the next one. */
gpufs_status gpufs_statistics_read(gpufs_handle engine, const char** data, uint64_t* bytes);

/* Starts to record what the process's threads do, in the format of docs/internals/trace-records.md. EBUSY if it was
 * started already. */
gpufs_status gpufs_trace_start(void);
/* Stops, and drops what has not been read. */
gpufs_status gpufs_trace_stop(void);
/* Moves records out; *bytes is a multiple of 64, and 0 when there are none now. */
gpufs_status gpufs_trace_read(void* data, uint64_t capacity, uint64_t* bytes);

/* ---- buffers ---- */

enum { GPUFS_SEEK_DATA = 3, GPUFS_SEEK_HOLE = 4 };
enum { GPUFS_KEEP_SIZE = 1, GPUFS_PUNCH_HOLE = 2, GPUFS_ZERO_RANGE = 16 }; /* as fallocate(2) */

typedef struct {
  uint64_t size;
  uint64_t held_bytes; /* device memory really taken */
  uint64_t room_bytes; /* that limits still allow; UINT64_MAX: there are none */
  int32_t device;
  uint64_t placement;    /* where in its memory the first byte lies, see gpufs_lease_open */
  uint64_t parked_bytes; /* memory of the host tier that holds its contents; 0: they are on the device */
} gpufs_buffer_info;

gpufs_status gpufs_buffer_create(gpufs_handle engine, int32_t device, gpufs_handle* buffer);
gpufs_status gpufs_buffer_info_get(gpufs_handle buffer, gpufs_buffer_info* info);
/* Before a growth by so many bytes: waits while there is less free memory and memory of removed files is coming back.
 * Success also if the time is over. */
gpufs_status gpufs_buffer_await_memory(gpufs_handle buffer, uint64_t bytes, uint32_t timeout_ms);
gpufs_status gpufs_buffer_resize(gpufs_handle buffer, uint64_t size);
gpufs_status gpufs_buffer_allocate(gpufs_handle buffer, uint32_t mode, uint64_t offset, uint64_t bytes);
gpufs_status gpufs_buffer_seek(gpufs_handle buffer, int32_t whence, uint64_t offset, uint64_t* found);
/* *done is the count moved, short only at the end of the file (read). Where the host memory is locked the device copies
 * straight from and to it; EACCES for a read to memory that is locked as read_only. */
gpufs_status gpufs_buffer_read(gpufs_handle buffer, uint64_t offset, void* destination, uint64_t bytes, uint64_t* done);
gpufs_status gpufs_buffer_write(gpufs_handle buffer, uint64_t offset, const void* source, uint64_t bytes,
                                uint64_t* done);
/* Copies within and between devices, from one buffer of the engine's to another, holes as zeros; the buffer grows as
 * needed. *done is the count, short only at the end of the source. */
gpufs_status gpufs_buffer_copy(gpufs_handle source, uint64_t source_offset, gpufs_handle buffer, uint64_t offset,
                               uint64_t bytes, uint64_t* done);

/* ---- memory that programs share ---- */

/* WRITE: those who map the memory may write to it. LOCAL: the memory is used in this process, by its address, and is
 * not exported. */
enum { GPUFS_LEASE_WRITE = 1, GPUFS_LEASE_LOCAL = 2, GPUFS_MAPPING_PRIVATE = 4 };

typedef struct {
  uint64_t bytes;     /* of the buffer, from its start */
  uint64_t address;   /* of the first byte in this process, while the lease is open; refreshing may change it */
  uint64_t placement; /* where in the memory of the pieces the first byte lies */
} gpufs_lease_info;

/* One piece of memory: [offset, offset+bytes) of the buffer's memory, at the start of the descriptor for GPUs, at
 * `offset` of it on the host driver. */
typedef struct {
  uint64_t offset;
  uint64_t bytes;
  int32_t fd;
  uint32_t reserved; /* 0 */
} gpufs_shared_piece;

typedef struct {
  uint64_t address;  /* of the first byte in this process */
  uint64_t bytes;    /* mapped from there */
  uint64_t capacity; /* to which it can be extended */
  int32_t device;    /* the device's number in this process */
} gpufs_mapping_info;

/* A lease keeps the first bytes of a buffer, as many as it has now, in place for somebody who maps them or uses their
 * address. While it is open the buffer cannot be made smaller than that, nor punched there (EBUSY); it can grow. The
 * memory exists until the lease is closed, also if the buffer's file is removed. label: what messages call the holder;
 * NULL: nothing. WRITE allocates holes (ENOSPC as usual); without it they are ENODATA. EOPNOTSUPP: the device's memory
 * cannot be exported; the text says why. Closed with the buffer's engine or mount.
 * placement: where in its memory the first byte should lie, below 256, so that what the program uses is aligned; -1: it
 * does not matter. The contents move there unless others use them or the device is full: see the info. */
gpufs_status gpufs_lease_open(gpufs_handle buffer, uint32_t flags, const char* label, int64_t placement,
                              gpufs_handle* lease);
/* Opens a lease on a file of a mount that its holder had before: on its first `bytes` alone, although it may have grown
 * since, by holes perhaps. placement: as above. */
gpufs_status gpufs_lease_open_again(gpufs_handle mount, uint64_t ino, uint32_t flags, uint64_t bytes, const char* label,
                                    int64_t placement, gpufs_handle* lease);
gpufs_status gpufs_lease_info_get(gpufs_handle lease, gpufs_lease_info* info);
/* Extends it to what the buffer has grown to. */
gpufs_status gpufs_lease_refresh(gpufs_handle lease);
/* The pieces from `from` on, at most `capacity` of them: 0, or the end of a piece that was returned before. Their
 * descriptors are the caller's. The last piece may reach beyond the lease's bytes. *count is 0 at the end. */
gpufs_status gpufs_lease_pieces(gpufs_handle lease, uint64_t from, gpufs_shared_piece* pieces, uint64_t capacity,
                                uint64_t* count);

/* Maps memory that another program leases; no engine is needed. The device is found by its PCI address (any text on the
 * host driver), since its number differs between programs. GPUFS_LEASE_WRITE: this program may write to the memory.
 * GPUFS_MAPPING_PRIVATE: it may write to it, and other programs do not see that; a GPU's memory must be a copy of its
 * own already. Without either the memory is mapped read-only. reserve_bytes: addresses for growth. ENODEV: this process
 * does not see the device. */
gpufs_status gpufs_mapping_open(const char* driver, const char* pci_address, uint32_t flags, uint64_t reserve_bytes,
                                gpufs_handle* mapping);
/* Maps pieces, in order, after what is mapped. Takes over their descriptors in every case. A failure leaves those
 * before it mapped. EFBIG: beyond the capacity. */
gpufs_status gpufs_mapping_add(gpufs_handle mapping, const gpufs_shared_piece* pieces, uint64_t count);
/* Unmaps all pieces and keeps the addresses, at which gpufs_mapping_add() can map others, after all work that this
 * process has queued on the device. */
gpufs_status gpufs_mapping_clear(gpufs_handle mapping);
/* Copies mapped memory to the host, after all work that this process has queued on the device. EINVAL: not mapped. */
gpufs_status gpufs_mapping_read(gpufs_handle mapping, uint64_t offset, void* destination, uint64_t bytes);
gpufs_status gpufs_mapping_info_get(gpufs_handle mapping, gpufs_mapping_info* info);
/* For a mapping of host memory: an access to it that is not allowed (a write to one that was opened without
 * GPUFS_LEASE_WRITE, any where nothing is mapped) prints `text` as a line on standard error before the signal, SIGSEGV,
 * does what it would do without this. "": no longer. */
gpufs_status gpufs_mapping_explain_accesses(gpufs_handle mapping, const char* text);

/* As DLPack's binary interface has them: version 1, and before there were versions. */
typedef struct {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: contiguous in C order */
  uint64_t byte_offset;
} gpufs_dl_tensor;
typedef struct {
  gpufs_dl_tensor tensor;
  void* context;
  void (*deleter)(void*);
} gpufs_dl_legacy;
typedef struct {
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(void*);
  uint64_t flags; /* 1: read-only, 4: elements smaller than a byte are padded */
  gpufs_dl_tensor tensor;
} gpufs_dl_versioned;

/* A gpufs_dl_versioned or gpufs_dl_legacy with a copy of the tensor, which keeps what it belongs to until its deleter
 * is called; any thread may call that. `owner`: the handle of a lease or mapping, whose memory stays, open or closed.
 * 0: `object`, for which release(object) is called, also if this call fails. */
gpufs_status gpufs_tensor_export(gpufs_handle owner, void* object, void (*release)(void*),
                                 const gpufs_dl_tensor* tensor, int32_t versioned, int32_t read_only, void** managed);
/* Calls the deleter. */
void gpufs_tensor_release(void* managed, int32_t versioned);

/* ---- host memory that is locked ---- */

/* Locks (pins) memory of the program's own: devices then copy from and to it without a detour. Ranges are bytes; the
 * driver pins the pages that they touch, and two ranges may share one. What is inside a locked range adds a reference
 * to it, and every gpufs_host_lock() needs its gpufs_host_unlock() of the same range: the last one really unlocks.
 * Memory that somebody else has locked is recorded whole and never unlocked by the engine. read_only: the memory is
 * only copied to devices (it may be mapped for reading only).
 *
 * The memory must stay mapped until it is unlocked: nobody notices when it goes, and what comes to its addresses then
 * is not what devices see. Locks are the process's; a forked child has none. With the engine they all go.
 *
 * EINVAL: empty, or beyond the address space. EFAULT: not mapped. EEXIST: it overlaps a locked range and is not inside
 * it; the text names both. EACCES: it is locked as read_only. ENOMEM: no more can be locked; the text says what to do.
 * Nothing has changed then. */
gpufs_status gpufs_host_lock(gpufs_handle engine, const void* address, uint64_t bytes, int32_t read_only);
/* ENOENT: that range is not locked. Another failure is the driver's: it is locked as before. */
gpufs_status gpufs_host_unlock(gpufs_handle engine, const void* address, uint64_t bytes);

typedef struct {
  int32_t foreign; /* somebody else locked it */
  /* Where every device of the driver sees the range that was asked about; 0: the driver gives no address. The host
   * driver: its own address. Which accesses are coherent: docs/locked-memory.md. */
  uint64_t device_address;
} gpufs_host_lock_info;

/* ENOENT when not all of the range is locked, as one. */
gpufs_status gpufs_host_lock_info_get(gpufs_handle engine, const void* address, uint64_t bytes,
                                      gpufs_host_lock_info* info);

/* ---- keeper: the process that holds a mount's descriptors, and acts when this process ends ---- */

/* A descriptor that the keeper holds. The engine's keys are 2 and those of more than 32 bits; the others are the
 * caller's. */
typedef struct {
  uint64_t key;
  int32_t fd;
} gpufs_kept_fd;

/* Starts the keeper of a mount at a path; the program is gpufs-keeper. With a socket (else -1), which it takes over, it
 * continues with the keeper at the other end, which has started this process and holds `held`. A keeper that ends or
 * fails is replaced, and its successor gets everything again. Closing the handle leaves the keeper alone. */
gpufs_status gpufs_keeper_open(const char* program, const char* mountpoint, int32_t socket, const gpufs_kept_fd* held,
                               uint64_t count, gpufs_handle* keeper);
/* Holds the descriptors in place of what is held under their keys. They stay the caller's, and open until they are
 * dropped. Both wait, at most 5 s, for a keeper that is slow. */
gpufs_status gpufs_keeper_hold(gpufs_handle keeper, const gpufs_kept_fd* held, uint64_t count);
gpufs_status gpufs_keeper_drop(gpufs_handle keeper, const uint64_t* keys, uint64_t count);
/* Sends a message of native/keeper/keeper.cc that is not about keys, of 200 numbers at most; later keepers get the last
 * one of each kind. fd: goes with it, and is taken over; or -1. */
gpufs_status gpufs_keeper_note(gpufs_handle keeper, uint32_t kind, const uint64_t* numbers, uint64_t count, int32_t fd);
/* Fails, with the reason for users, while the keeper lacks something. */
gpufs_status gpufs_keeper_health(gpufs_handle keeper);
/* Ends the keeper, which closes everything that it holds. */
gpufs_status gpufs_keeper_end(gpufs_handle keeper);

/* ---- mount: the data plane of one FUSE connection ---- */

typedef struct {
  int32_t fuse_fd;         /* an open and mounted /dev/fuse; the mount takes it over, also when opening fails */
  int32_t relay_fd;        /* native end of gpufs_relay_pair(); taken over too */
  uint64_t mask_flags;     /* INIT flags to treat as not offered by the kernel (tests of older kernels) */
  uint64_t metadata_bytes; /* host memory that names and attributes may take, then ENOSPC; 0: no limit */
  uint64_t user_bytes;     /* device memory for each plain user on each device, then EDQUOT; 0: no limit */
  gpufs_handle keeper;     /* the mount continues what it holds the journal of; 0: the mount dies with this process */
} gpufs_mount_options;

/* The socket pair between the planes, both ends close-on-exec and with room for messages of a megabyte (or what the
 * system allows). native_fd is for gpufs_mount_options, control_fd is for the control plane; the caller owns
 * both until then, and control_fd for good. */
gpufs_status gpufs_relay_pair(int32_t* native_fd, int32_t* control_fd);

gpufs_status gpufs_mount_open(gpufs_handle engine, const gpufs_mount_options* options, gpufs_handle* mount);
/* The format of the journals that this version reads and writes. */
uint32_t gpufs_journal_format(void);
/* Frees the memory of files of the process before that the kernel has forgotten without this process's knowledge:
 * call it from time to time. */
gpufs_status gpufs_mount_release_forgotten(gpufs_handle mount);
/* Closes open files and directories of the process before, without a request of the kernel. Before gpufs_mount_start.
 * Handles that are not open are ignored. */
gpufs_status gpufs_mount_close_handles(gpufs_handle mount, const uint64_t* handles, uint64_t count);
/* Fails, with the reason for users, if no other process can continue the mount, whatever its keeper has. */
gpufs_status gpufs_mount_survives(gpufs_handle mount);
/* Starts the threads. Call after the descriptor is mounted and before requests are answered. */
gpufs_status gpufs_mount_start(gpufs_handle mount);
/* Reads ahead of programs that go through mappings from front to back. directory: where the mount is; it must answer,
 * and not on the calling thread. piece: bytes to ask the kernel for at a time, at most what it reads ahead on this
 * mount. EPERM without the right to open files by their handles (CAP_DAC_READ_SEARCH). Once. */
gpufs_status gpufs_mount_read_ahead(gpufs_handle mount, const char* directory, uint64_t piece);
/* Waits until stat(2) of a path returns, which this process may serve itself, on a thread without this process's
 * descriptors: if the process is killed meanwhile, they close. The errno of stat(2). */
gpufs_status gpufs_await_answer(const char* path);
/* An eventfd of the mount's that becomes readable once the connection has ended (unmounted or aborted). */
gpufs_status gpufs_mount_ended_fd(gpufs_handle mount, int* fd);

/* A file and what has been moved to and from its memory since it was created. */
typedef struct {
  uint64_t ino;
  uint64_t bytes_read;
  uint64_t bytes_written;
} gpufs_file_activity;
/* The files with the most bytes moved since the last call of this function come first. *count: on entry the capacity of
 * files, then how many there are. Files whose bytes were never moved are left out. */
gpufs_status gpufs_mount_busiest(gpufs_handle mount, gpufs_file_activity* files, uint64_t* count);

/* How many regular files a device has, those without a name included. */
gpufs_status gpufs_mount_files(gpufs_handle mount, int32_t device, uint64_t* count);

/* Which reads set access times: as mount(8) has it for relatime (the default), strictatime and noatime;
 * not_directories != 0: nodiratime. At any time. */
enum { GPUFS_RELATIME = 0, GPUFS_STRICTATIME = 1, GPUFS_NOATIME = 2 };
gpufs_status gpufs_mount_access_times(gpufs_handle mount, int32_t policy, int32_t not_directories);

/* ---- inodes and names. The engine keeps them, and serves the kernel's requests about them. ---- */

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

/* Creates an inode of the mount's own, under a name in a directory; directory 0: the root, without a name. Of the
 * attributes mode, uid, gid, size and device count, and the number; 0: the next one. The engine counts links.
 * target: of a symbolic link, else null. Users can change nothing where device is -1. */
gpufs_status gpufs_name_place(gpufs_handle mount, uint64_t directory, const char* name,
                              const gpufs_attributes* attributes, const char* target, uint64_t* ino);
/* The inode at a path below the root, without following symbolic links. ENOENT if it does not exist. */
gpufs_status gpufs_name_find(gpufs_handle mount, const char* path, uint64_t* ino);
/* The path of an inode below the root: one of them if it has several. Valid until the calling thread asks again. It may
 * hold any bytes but 0. ENOENT without a name. */
gpufs_status gpufs_name_path(gpufs_handle mount, uint64_t ino, const char** path);
/* Removes all names of a registered file: the kernel looks for each again whenever it is used. ENOENT if unknown. */
gpufs_status gpufs_name_remove_all(gpufs_handle mount, uint64_t ino);

/* References keep an inode that has no names, as the kernel's do. A process that goes on with the mount of another
 * takes them again before gpufs_mount_start(), which drops the others. ENOENT if unknown. */
gpufs_status gpufs_inode_hold(gpufs_handle mount, uint64_t ino);
gpufs_status gpufs_inode_release(gpufs_handle mount, uint64_t ino);
gpufs_status gpufs_inode_get(gpufs_handle mount, uint64_t ino, gpufs_attributes* attributes);
/* Its contents were changed by other means than the mount's operations (a transfer): modification and change time
 * become now, set-id bits are cleared, and the kernel drops what it has cached. ENOENT if unknown. */
gpufs_status gpufs_inode_written(gpufs_handle mount, uint64_t ino);

/* Opens a regular file or block device of the host below backing/ by a descriptor, which stays the caller's and whose
 * mode and O_APPEND count: *fh goes into the reply. Natively answered like those of buffers: READ, WRITE,
 * LSEEK, FALLOCATE, FLUSH, FSYNC, COPY_FILE_RANGE; everything else about the inode is the control plane's. Bit 61 of
 * *fh is set: handles of Python's own must not have it. May block; fails as gpufs_backing_open() does. */
gpufs_status gpufs_backing_file_open(gpufs_handle mount, int32_t fd, uint64_t* fh);
/* Closes a file handle: the answer to RELEASE, which is relayed for backing files alone. EBADF if unknown. */
gpufs_status gpufs_file_release(gpufs_handle mount, uint64_t fh);

/* A handle to the buffer of a regular file, which lives at least as long; closing it drops this reference
 * only. EISDIR or EINVAL for what has no buffer. Closed with the mount. */
gpufs_status gpufs_mount_buffer(gpufs_handle mount, uint64_t ino, gpufs_handle* buffer);

/* ---- limits of device memory. A file's memory is charged to its owner, and to the limited directory that it is in.
 * Beyond a limit whatever takes memory fails with EDQUOT. ---- */

enum { GPUFS_NO_LIMIT = -1, GPUFS_DEFAULT_LIMIT = -2 };
/* Of a user on a device, in bytes. GPUFS_DEFAULT_LIMIT: user_bytes; none for root and this process's user. */
gpufs_status gpufs_quota_user(gpufs_handle mount, int32_t device, uint32_t uid, int64_t limit);
/* Of a directory on a device, in bytes: all that is and will be below it is charged to it. GPUFS_NO_LIMIT: no longer.
 * EINVAL for another inode, EBUSY if a directory above or below has a limit. */
gpufs_status gpufs_quota_directory(gpufs_handle mount, uint64_t ino, int64_t limit);
/* Charges a buffer of the mount's engine to a user, whatever the limit; its growth needs space below it. */
gpufs_status gpufs_quota_buffer(gpufs_handle mount, gpufs_handle buffer, uint32_t uid);
/* What a user's files on a device take and may take, or the files below a directory. */
typedef struct {
  uint64_t directory; /* its inode; 0: a user's account */
  int32_t device;     /* -1 for a directory */
  uint32_t uid;
  uint64_t used_bytes;
  int64_t limit_bytes; /* or GPUFS_NO_LIMIT */
} gpufs_account;
/* All accounts but those of users who use nothing and have no limit. Valid until the calling thread asks again. */
gpufs_status gpufs_quota_list(gpufs_handle mount, const gpufs_account** accounts, uint64_t* count);

/* Memory of another program, as that passed it on; nothing in it is trusted. */
enum {
  GPUFS_SHARE_FILE = 0,       /* host: a descriptor of a file in memory */
  GPUFS_SHARE_DESCRIPTOR = 1, /* GPUs: descriptors of physical memory */
  GPUFS_SHARE_IPC = 2         /* GPUs: the vendor's handle of an allocation */
};
typedef struct {
  int32_t kind;
  int32_t fd;       /* FILE; stays the caller's */
  int32_t writable; /* 0: writes to the file are EPERM */
  uint64_t offset;  /* the memory begins so far into what the descriptors or the handle stand for */
  uint64_t bytes;
  uint8_t handle[64];               /* IPC */
  const gpufs_shared_piece* pieces; /* DESCRIPTOR: all physical memory, in order; the descriptors stay the caller's */
  uint64_t piece_count;
} gpufs_foreign_memory;

/* Makes such memory the contents of a file, whose size is fixed then. The file must be new, empty, and open for writing
 * once: by the O_CREAT | O_EXCL that created it (EBUSY). EINVAL: the memory is not what the caller says. The kernel has
 * been told on return. Not from a thread that answers requests of the mount. */
gpufs_status gpufs_inode_register(gpufs_handle mount, uint64_t ino, const gpufs_foreign_memory* memory);
/* Moves the contents of a file to the host tier, or back to its device; *parked: whether they are there (those of small
 * files stay). EBUSY: a program has a lease on them. ENOSPC, EDQUOT: there is no space, or a limit is reached. */
gpufs_status gpufs_inode_park(gpufs_handle mount, uint64_t ino, int32_t* parked);
gpufs_status gpufs_inode_bring_back(gpufs_handle mount, uint64_t ino);
/* What these files, all of one device, need to be parked or to come back, and what is free there now. If that is too
 * little, waits up to three seconds for memory that is being freed. EOPNOTSUPP: there is no host tier. */
gpufs_status gpufs_inodes_space(gpufs_handle mount, const uint64_t* inos, uint64_t count, int32_t parks,
                                uint64_t* needed, uint64_t* free);
/* Before the mount is started: a full device parks files that nobody uses. */
gpufs_status gpufs_mount_evict(gpufs_handle mount);
/* Ends that: all calls on the file fail with ESTALE. On return nothing uses the memory any more, and the kernel has
 * dropped what it had cached. ETIMEDOUT: something still uses the memory, and it is unmapped later. EINVAL: the file is
 * not a registered one. Threads as above. */
gpufs_status gpufs_inode_revoke(gpufs_handle mount, uint64_t ino, uint32_t timeout_ms);

/* ---- backing files and transfers: bytes between files and device memory ---- */

enum { GPUFS_AUTO = 0, GPUFS_ON = 1, GPUFS_OFF = 2, GPUFS_REQUIRE = 3 };

typedef struct {
  uint64_t chunk_bytes;  /* one piece of work and one pinned slot, a power of two; 0: 2 MiB */
  uint64_t pinned_bytes; /* host memory that may be pinned at most; 0: 192 MiB */
  int32_t workers;       /* threads that one client has at most on a NUMA node; 0: by the number of CPUs */
  int32_t fastpath;      /* GPUFS_AUTO, GPUFS_OFF or GPUFS_REQUIRE */
  /* Types of file systems that the fastpath may use beside ext4, xfs and block devices, as /proc/self/mountinfo names
   * them, separated by commas ("nfs4,lustre"); "any"; NULL or "": none. */
  const char* file_systems;
} gpufs_io_options;

/* Before the engine's first transfer, mount or statistics: EBUSY afterwards. EINVAL names what is out of range. */
gpufs_status gpufs_io_configure(gpufs_handle engine, const gpufs_io_options* options);

typedef struct {
  char file_system[32]; /* "ext4"; "" where its mount is not visible here */
  int32_t block_device;
  int32_t readable;
  int32_t writable;
  int32_t direct;        /* it could be opened with O_DIRECT too */
  uint32_t offset_align; /* of O_DIRECT */
  uint32_t memory_align;
  uint32_t fastpath_refusals; /* what about the file itself keeps it from the fastpath: see gpufs_refusal_name() */
} gpufs_backing_info;

/* A regular file or block device for transfers. Descriptors of its own are opened with the mode of `fd`, never wider;
 * fd stays the caller's. May block for as long as the file's server does. EBADF: O_PATH. EISDIR, EINVAL: another kind
 * of file. EDEADLK: on a mount of gpufs. */
gpufs_status gpufs_backing_open(gpufs_handle engine, int32_t fd, gpufs_handle* backing);
gpufs_status gpufs_backing_info_get(gpufs_handle backing, gpufs_backing_info* info);
/* What keeps every file from the fastpath of a driver, whose libraries are looked for: bits as above, 0 for nothing. */
gpufs_status gpufs_fastpath_probe(const char* driver, uint32_t* refusals);
/* The name of a bit (0, 1, ...) of a refusal mask; "" beyond the last. */
const char* gpufs_refusal_name(int32_t bit);

enum { GPUFS_LOAD = 0, GPUFS_STORE = 1 }; /* file to device, device to file */
enum { GPUFS_SYNC_NONE = 0, GPUFS_SYNC_DATA = 1, GPUFS_SYNC_FULL = 2 };
enum { GPUFS_TRANSFER_QUEUED = 0, GPUFS_TRANSFER_RUNNING = 1, GPUFS_TRANSFER_DONE = 2 };

typedef struct {
  gpufs_handle backing;
  gpufs_handle buffer; /* 0: device memory that the program allocated itself, named by the next three */
  int32_t device;      /* its index in the engine */
  uint64_t address;
  uint64_t address_bytes;
  uint64_t file_offset;
  uint64_t buffer_offset; /* or the offset from address */
  uint64_t bytes;         /* UINT64_MAX: to the end of the source */
  int32_t direction;
  int32_t sync;     /* after a store */
  int32_t sparse;   /* holes of the source become holes of a file or buffer that can have them */
  int32_t fastpath; /* GPUFS_AUTO: as configured; GPUFS_ON: auto; GPUFS_OFF, GPUFS_REQUIRE */
  int32_t share;    /* threads at most, 0: the client's share */
  uint64_t client;  /* whose it is: threads are shared evenly between clients */
} gpufs_transfer_request;

typedef struct {
  int32_t state;
  int32_t error; /* once done: 0 or an errno, also after progress; ECANCELED if cancelled before its end */
  int32_t device_code;
  int32_t sync_failed; /* the error is that of the sync: nothing is known to be durable */
  uint64_t total;      /* there is to move, as known so far */
  uint64_t moved;      /* anywhere in the range */
  uint64_t prefix;     /* from the start without a gap; once done, what counts */
  uint64_t fastpath_bytes;
  uint64_t fallback_bytes;
  uint64_t hole_bytes; /* moved by neither: holes that stayed holes */
  uint32_t refusals;   /* why fastpath did not take all of it */
  char message[512];   /* the failure's text as far as it fits */
} gpufs_transfer_progress;

/* Returns once it is queued. Device memory that is not a buffer must stay valid until the transfer is done, and a load
 * into it or a store from it must not race with work that the program queued: finish that first. */
gpufs_status gpufs_transfer_start(gpufs_handle engine, const gpufs_transfer_request* request, gpufs_handle* transfer);
/* Waits until it is done, up to timeout_ms (< 0: for ever); *done says whether it is. How it ended: see progress. */
gpufs_status gpufs_transfer_wait(gpufs_handle transfer, int64_t timeout_ms, int32_t* done);
gpufs_status gpufs_transfer_progress_get(gpufs_handle transfer, gpufs_transfer_progress* progress);
/* Asks it to stop at its next piece; never blocks. */
gpufs_status gpufs_transfer_cancel(gpufs_handle transfer);
/* An eventfd of the transfer's, readable once it is done; valid until the transfer is closed. */
gpufs_status gpufs_transfer_event_fd(gpufs_handle transfer, int* fd);
/* ---- operations: reads and writes on streams, and batches of them ---- */

/* Promises about all operations of a stream. FIXED: the number is read when an operation is submitted, though it is
 * given by a cell. ALIGNED: sizes and offsets are multiples of 4096, EINVAL otherwise. */
enum {
  GPUFS_STREAM_FIXED_BUFFER_OFFSET = 1,
  GPUFS_STREAM_FIXED_FILE_OFFSET = 2,
  GPUFS_STREAM_FIXED_SIZE = 4,
  GPUFS_STREAM_ALIGNED = 8
};

typedef struct {
  uint64_t operations;   /* under way at most; 0: 65536 */
  uint64_t stream_depth; /* outstanding on one stream at most; 0: 256 */
  int64_t timeout_ms;    /* how long a submission waits for space on a stream or a device; < 0: 10 s, 0: not at all */
  int32_t stream_waits;  /* streams wait for values where the device can: GPUFS_AUTO or GPUFS_OFF */
} gpufs_async_options;

/* Before the engine's first stream or queue: EBUSY afterwards. */
gpufs_status gpufs_async_configure(gpufs_handle engine, const gpufs_async_options* options);

typedef struct {
  uint64_t native; /* as the vendor's runtime calls it: CUstream, hipStream_t */
  uint64_t outstanding;
  int32_t device;
  int32_t waits_for_values; /* 0: calls of the host hold it */
} gpufs_stream_info;

/* A stream of the engine's own on a device (native: NULL), or the program's own, which must live until its operations
 * are over; device -1 then asks the runtime, whose default streams are those of the device that is current on the
 * calling thread. Operations that are queued go on when it is closed; a stream of the engine's own goes once all that
 * is queued on it is done. */
gpufs_status gpufs_stream_open(gpufs_handle engine, int32_t device, const uint64_t* native, uint32_t flags,
                               gpufs_handle* stream);
gpufs_status gpufs_stream_info_get(gpufs_handle stream, gpufs_stream_info* info);
/* Calls function(argument) when the stream comes to it, on a thread of the driver's: no call of the driver is allowed
 * there, none of this interface that waits for operations, and it should be short, since streams share such threads. */
gpufs_status gpufs_stream_call(gpufs_handle stream, void (*function)(void*), void* argument);
/* Waits until all that is queued on it now is done, the program's own work too. */
gpufs_status gpufs_stream_synchronize(gpufs_handle stream);
/* Pinned host memory, zeroed: late numbers and counts that kernels write and read, too. *device_address: of *memory as
 * the device sees it. It must outlive the operations that name it. */
gpufs_status gpufs_pinned_create(gpufs_handle engine, int32_t device, uint64_t bytes, gpufs_handle* pinned,
                                 void** memory, uint64_t* device_address);
typedef struct {
  gpufs_transfer_request transfer;
  /* Not NULL: the number is read there when the stream comes to the operation, instead of transfer's. A size is then
   * read at once as well, and must not have grown by then. Readable until the operation is over. */
  const uint64_t* bytes_cell;
  const uint64_t* file_offset_cell;
  const uint64_t* buffer_offset_cell;
  gpufs_handle stream;   /* 0: see implied */
  int32_t implied;       /* on native_stream, which nobody registered; otherwise at once, in no order with others */
  int32_t native_device; /* as gpufs_stream_open()'s */
  uint64_t native_stream;
  /* Bytes moved, or a negative errno if it failed before any was: written before the stream goes on, writable until the
   * operation is over. May be NULL. */
  int64_t* count;
  uint64_t cookie;
  uint64_t trace_cookie; /* shown in traces */
} gpufs_operation;

typedef struct {
  uint64_t cookie;
  uint64_t id;
  gpufs_transfer_progress outcome;
} gpufs_completion;

/* A queue of operations: a batch. capacity: under way or not collected, at most; 0: as many as the engine has. */
gpufs_status gpufs_queue_open(gpufs_handle engine, uint64_t capacity, gpufs_handle* queue);
/* All of them or none: *bad is the first that cannot be; EAGAIN if there is no space for all. An operation on a stream
 * starts when the stream comes to it and holds the stream until it is over; one without starts at once. Should a stream
 * fail when others have been queued, the operation ends with that failure. ids: room for count, or NULL. */
gpufs_status gpufs_queue_submit(gpufs_handle queue, const gpufs_operation* operations, uint64_t count, uint64_t* ids,
                                uint64_t* bad);
/* Collects up to capacity operations that are over, once there are `fewest` or all there can be; waits for that up to
 * timeout_ms (< 0: for ever). */
gpufs_status gpufs_queue_collect(gpufs_handle queue, gpufs_completion* completions, uint64_t capacity, uint64_t fewest,
                                 int64_t timeout_ms, uint64_t* collected);
/* Operations that have not ended. */
gpufs_status gpufs_queue_under_way(gpufs_handle queue, uint64_t* count);
/* Asks an operation to stop, 0: all of them. ENOENT: it is over. */
gpufs_status gpufs_queue_cancel(gpufs_handle queue, uint64_t id);
/* ---- pools: allocation within memory that a program has attached ---- */

/* Divides a range of addresses among allocations (torch's, by the functions in native/binding/torch_allocator.cc). Does
 * not touch the memory. */
gpufs_status gpufs_pool_open(uint64_t address, uint64_t bytes, gpufs_handle* pool);
/* The calling thread allocates from this pool from now on; 0: from none. */
gpufs_status gpufs_pool_enter(gpufs_handle pool);
gpufs_status gpufs_pool_usage(gpufs_handle pool, uint64_t* used, uint64_t* largest_free);

/* CFFI END */

#ifdef __cplusplus
}
#endif

#endif /* GPUFS_H */
