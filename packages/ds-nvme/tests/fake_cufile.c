/* cuFile and the CUDA driver as far as ds_nvme.gds calls them, on host memory. Declared from NVIDIA's cuFile API
 * Reference Guide, apart from the declarations in the package, so that a wrong one there shows.
 *
 * It is stricter than the real library: writes must be whole pages, files opened with O_DIRECT, registered memory
 * not overrun; and files still open when they are let go. What it finds wrong is counted in fake.violations.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct { int err; int cu_err; } Status;

enum FileHandleType { OPAQUE_FD = 1, OPAQUE_WIN32 = 2, USERSPACE_FS = 3 };

typedef struct {
    enum FileHandleType type;
    union { int fd; void *handle; } handle;
    const void *fs_ops;
} Description;

typedef struct {
    struct {
        unsigned int major_version, minor_version;
        size_t poll_thresh_size, max_direct_io_size;
        unsigned int dstatusflags, dcontrolflags;
    } nvfs;
    unsigned int fflags, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
    unsigned int max_batch_io_size, max_batch_io_timeout_msecs;
} Properties;

typedef struct { int magic, fd; } Handle;

/* What a test sees and sets. */
struct {
    long opened, files, buffers, reads, writes, bytes, violations, threads;
    long most_bytes;     /* a call moves at most so many; 0: all */
    long hold;           /* calls wait while it is set, at most half a minute or so */
    long waiting;        /* calls that do */
    long fail_at;        /* the I/O call of this number (from 1) fails */
    long failure;        /* with this result */
    long failure_errno;  /* and this errno */
    long open_error, open_cuda_error, buffer_error, file_error, devices, init_error;
    long last_base, last_offset;
} fake = {.devices = 1};

static Properties properties = {
    .nvfs = {2, 25, 4, 16384, 1u << 4 | 1u << 5, 1u << 1}, .fflags = 1u << 3, .max_device_pinned_mem_size = 33554432};

static struct { const char *base; size_t nbytes; } registered[64];
static __thread int seen;

static Status status(int err, int cu_err) { return (Status){err, cu_err}; }

int cuInit(unsigned int flags) { return flags ? 1 : (int)fake.init_error; }
int cuDeviceGetCount(int *count) { *count = (int)fake.devices; return 0; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_FAKE"; return code == 0; }

Status cuFileGetVersion(int *version) { *version = 1140; return status(0, 0); }
Status cuFileDriverOpen(void) {
    __sync_fetch_and_add(&fake.opened, 1);
    return status((int)fake.open_error, (int)fake.open_cuda_error);
}
Status cuFileDriverGetProperties(Properties *found) { *found = properties; return status(0, 0); }
void fake_properties(unsigned major, unsigned status_flags, unsigned control, unsigned features) {
    properties.nvfs.major_version = major;
    properties.nvfs.minor_version = major ? 25 : 0;
    properties.nvfs.dstatusflags = status_flags;
    properties.nvfs.dcontrolflags = control;
    properties.fflags = features;
}

Status cuFileHandleRegister(void **handle, Description *description) {
    if (fake.file_error) return status((int)fake.file_error, 0);
    if (description->type != OPAQUE_FD || description->fs_ops) return status(5022, 0);
    int flags = fcntl(description->handle.fd, F_GETFL);
    if (flags < 0) return status(5022, 0);
    if (!(flags & O_DIRECT)) return status(5020, 0);
    Handle *made = malloc(sizeof *made);
    *made = (Handle){0x5eed, description->handle.fd};
    *handle = made;
    __sync_fetch_and_add(&fake.files, 1);
    return status(0, 0);
}
void cuFileHandleDeregister(void *handle) {
    Handle *known = handle;
    if (known->magic != 0x5eed || fcntl(known->fd, F_GETFL) < 0) __sync_fetch_and_add(&fake.violations, 1);
    known->magic = 0;
    free(known);
    __sync_fetch_and_sub(&fake.files, 1);
}

Status cuFileBufRegister(const void *base, size_t nbytes, int flags) {
    if (fake.buffer_error) return status((int)fake.buffer_error, 0);
    if (flags) return status(5022, 0);
    for (int i = 0; i < 64; i++)
        if (registered[i].base == base) return status(5023, 0);
    for (int i = 0; i < 64; i++)
        if (!registered[i].base) {
            registered[i].base = base;
            registered[i].nbytes = nbytes;
            __sync_fetch_and_add(&fake.buffers, 1);
            return status(0, 0);
        }
    return status(5036, 0);
}
Status cuFileBufDeregister(const void *base) {
    for (int i = 0; i < 64; i++)
        if (registered[i].base == base) {
            registered[i].base = NULL;
            __sync_fetch_and_sub(&fake.buffers, 1);
            return status(0, 0);
        }
    return status(5024, 0);
}

static ssize_t transfer(int write, void *handle, char *base, size_t nbytes, off_t offset, off_t at) {
    Handle *known = handle;
    long number = __sync_add_and_fetch(write ? &fake.writes : &fake.reads, 1);
    if (!seen) { seen = 1; __sync_fetch_and_add(&fake.threads, 1); }
    __sync_fetch_and_add(&fake.waiting, 1);
    for (int i = 0; *(volatile long *)&fake.hold && i < 150000; i++) usleep(200);
    __sync_fetch_and_sub(&fake.waiting, 1);
    fake.last_base = (long)base;
    fake.last_offset = at;
    if (known->magic != 0x5eed) { __sync_fetch_and_add(&fake.violations, 1); return -5027; }
    if (fake.fail_at && number >= fake.fail_at) { errno = (int)fake.failure_errno; return fake.failure; }
    for (int i = 0; i < 64; i++)
        if (registered[i].base == base && (size_t)at + nbytes > registered[i].nbytes) return -5017;
    if (fake.most_bytes && (long)nbytes > fake.most_bytes) nbytes = (size_t)fake.most_bytes;
    if (write && (offset % 4096 || nbytes % 4096)) { __sync_fetch_and_add(&fake.violations, 1); return -5022; }
    /* Through aligned memory, as the files are opened with O_DIRECT. */
    off_t first = offset / 4096 * 4096;
    size_t cover = (offset + nbytes - first + 4095) / 4096 * 4096;
    char *bounce;
    if (posix_memalign((void **)&bounce, 4096, cover)) return -5043;
    ssize_t moved;
    if (write) {
        memcpy(bounce, base + at, nbytes);
        moved = pwrite(known->fd, bounce, nbytes, offset);
    } else {
        moved = pread(known->fd, bounce, cover, first);
        if (moved >= 0) {
            moved -= offset - first;
            if (moved < 0) moved = 0;
            if ((size_t)moved > nbytes) moved = (ssize_t)nbytes;
            memcpy(base + at, bounce + (offset - first), (size_t)moved);
        }
    }
    int code = errno;
    free(bounce);
    errno = code;
    if (moved > 0) __sync_fetch_and_add(&fake.bytes, moved);
    return moved;
}
ssize_t cuFileRead(void *handle, void *base, size_t nbytes, off_t offset, off_t at) {
    return transfer(0, handle, base, nbytes, offset, at);
}
ssize_t cuFileWrite(void *handle, const void *base, size_t nbytes, off_t offset, off_t at) {
    return transfer(1, handle, (char *)base, nbytes, offset, at);
}

size_t fake_layout(int which) {
    switch (which) {
    case 0: return sizeof(Status);
    case 1: return sizeof(Description);
    case 2: return offsetof(Description, handle);
    case 3: return offsetof(Description, fs_ops);
    case 4: return sizeof(Properties);
    case 5: return offsetof(Properties, nvfs.max_direct_io_size);
    case 6: return offsetof(Properties, nvfs.dcontrolflags);
    case 7: return offsetof(Properties, fflags);
    default: return offsetof(Properties, max_batch_io_timeout_msecs);
    }
}
