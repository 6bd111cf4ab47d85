// A driver whose device is the host: memory is allocated, copied and filled, kernels do nothing, and work is done when it is enqueued.
//
// FAKE_FAIL=n: the call of number n, from 1 on, answers FAKE_CODE instead of doing anything; with FAKE_STICKY all later ones too.
// FAKE_LOG: what orders streams is written to stderr, and copies within the device, frees in a stream, and the ends of streams.
// FAKE_DEVICES=n: how many devices there are, 1 unless set.
// FAKE_CONTEXT=n: what callbacks of streams are told became of the stream's work; 0 unless set.
// FAKE_PEERS: devices can access each other's memory.
// FAKE_PLAIN: no device can map memory.
// A fake NCCL (crates/cuda_loader/tests/fake_nccl) makes a stream busy; what comes after that in the stream waits.
// On stderr: the call that fails, and at the end how many there were, and what is still reserved, made and mapped. A mapping that breaks a
// rule of the driver's ends the process.

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int calls, fail_at, code, sticky, logs;
static const char *last = "nothing";

__attribute__((constructor)) static void begin(void) {
    const char *at = getenv("FAKE_FAIL"), *with = getenv("FAKE_CODE");
    fail_at = at ? atoi(at) : 0;
    code = with ? atoi(with) : 999;
    sticky = getenv("FAKE_STICKY") != NULL;
    logs = getenv("FAKE_LOG") != NULL;
}

// Memory that is mapped: ranges of addresses, and what lies in them.
typedef struct { uint64_t address, bytes; int used; } Place;
enum { PLACES = 4096, GRANULARITY = 2 << 20 };
static Place ranges[PLACES], mappings[PLACES];
static struct { uint64_t bytes; int held, mapped; } made[PLACES];
static int owner[PLACES];
static pthread_mutex_t places = PTHREAD_MUTEX_INITIALIZER;

static void rule(int is_kept, const char *what) {
    if (is_kept) return;
    fprintf(stderr, "fake driver: against the rules: %s\n", what);
    _exit(77);
}

static int count(const Place *list) {
    int n = 0;
    for (int i = 0; i < PLACES; i++) n += list[i].used;
    return n;
}

static int find(const Place *list, uint64_t address) {
    for (int i = 0; i < PLACES; i++)
        if (list[i].used && list[i].address == address) return i;
    return -1;
}

static int enter(Place *list, uint64_t address, uint64_t bytes) {
    for (int i = 0; i < PLACES; i++)
        if (!list[i].used) {
            list[i] = (Place){address, bytes, 1};
            return i;
        }
    rule(0, "too many places for the fake");
    return -1;
}

static uint64_t made_bytes(void) {
    uint64_t bytes = 0;
    for (int i = 1; i < PLACES; i++)
        if (made[i].held || made[i].mapped) bytes += made[i].bytes;
    return bytes;
}

__attribute__((destructor)) static void end(void) {
    fprintf(stderr, "fake driver: %d calls\n", calls);
    fprintf(stderr, "fake driver: left %d reserved, %d mapped, %llu bytes made\n", count(ranges), count(mappings),
            (unsigned long long)made_bytes());
}

static int fails(const char *name) {
    calls++;
    if (fail_at && (sticky ? calls >= fail_at : calls == fail_at)) {
        if (calls == fail_at) fprintf(stderr, "fake driver: %s after %s fails\n", name, last);
        return code;
    }
    last = name;
    return 0;
}

static void log_of(const char *name, const void *a, const void *b) {
    if (logs) fprintf(stderr, "fake driver: %s %p %p\n", name, a, b);
}

// Begins a function of the driver.
#define CALL(name, ...)                       \
    unsigned name(__VA_ARGS__) {              \
        int failure = fails(#name);           \
        if (failure) return (unsigned)failure;

#define DONE return 0; }

typedef struct { int is_capturing; int busy; } Stream;

static _Thread_local void *current;

static int is_busy(Stream *stream) { return __atomic_load_n(&stream->busy, __ATOMIC_SEQ_CST) > 0; }

static void wait_for(Stream *stream) {
    while (!stream->is_capturing && is_busy(stream)) usleep(100);
}

// Of the fake NCCL, which is no caller that is to be counted.
unsigned cuCtxGetCurrent(void **context) { *context = current; return 0; }

CALL(cuInit, unsigned flags) (void)flags; DONE
CALL(cuDriverGetVersion, int *version) *version = 12040; DONE
CALL(cuDeviceGetCount, int *count) 
    const char *devices = getenv("FAKE_DEVICES");
    *count = devices ? atoi(devices) : 1;
DONE
CALL(cuDeviceGet, int *device, int ordinal) *device = ordinal; DONE
CALL(cuDeviceGetName, char *name, int length, int device) (void)device; snprintf(name, (size_t)length, "fake"); DONE
CALL(cuDeviceTotalMem_v2, size_t *bytes, int device) (void)device; *bytes = 1 << 30; DONE
CALL(cuDeviceGetAttribute, int *value, int attribute, int device)
    (void)device;
    // Compute capability 6.1; blocks of at most 48 KiB.
    if (attribute == 102 && getenv("FAKE_PLAIN")) { *value = 0; return 0; }
    *value = attribute == 75 ? 6 : attribute == 76 ? 1 : attribute == 97 ? 48 << 10 : 64;
DONE
CALL(cuDeviceCanAccessPeer, int *can, int device, int peer) (void)device; (void)peer; *can = getenv("FAKE_PEERS") != NULL; DONE
CALL(cuCtxEnablePeerAccess, void *peer, unsigned flags) (void)peer; (void)flags; DONE
CALL(cuDevicePrimaryCtxRetain, void **context, int device) *context = (void *)(uintptr_t)(64 + device); DONE
CALL(cuDevicePrimaryCtxRelease_v2, int device) (void)device; DONE
CALL(cuCtxSetCurrent, void *context) current = context; DONE
CALL(cuCtxSynchronize, void) DONE

CALL(cuMemAlloc_v2, uint64_t *address, size_t bytes)
    if (bytes > (size_t)1 << 30) return 2;
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!memory) return 2;
    // Nothing that a test could take for a result.
    memset(memory, 0x5a, bytes);
    *address = (uint64_t)(uintptr_t)memory;
DONE
CALL(cuMemFree_v2, uint64_t address) free((void *)(uintptr_t)address); DONE
CALL(cuMemGetAllocationGranularity, size_t *bytes, const void *prop, int option) (void)prop; (void)option; *bytes = GRANULARITY; DONE
CALL(cuMemAddressReserve, uint64_t *address, size_t bytes, size_t alignment, uint64_t hint, uint64_t flags)
    (void)alignment; (void)hint; (void)flags;
    rule(bytes > 0 && bytes % GRANULARITY == 0, "bytes of a reservation");
    char *all = mmap(NULL, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return 2;
    *address = ((uint64_t)(uintptr_t)all + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    pthread_mutex_lock(&places);
    enter(ranges, *address, bytes);
    pthread_mutex_unlock(&places);
DONE
CALL(cuMemAddressFree, uint64_t address, size_t bytes)
    pthread_mutex_lock(&places);
    int at = find(ranges, address);
    rule(at >= 0 && ranges[at].bytes == bytes, "free of what is not reserved");
    for (int i = 0; i < PLACES; i++)
        rule(!mappings[i].used || mappings[i].address < address || mappings[i].address >= address + bytes, "free of what is mapped");
    ranges[at].used = 0;
    pthread_mutex_unlock(&places);
    munmap((void *)(uintptr_t)address, bytes);
DONE
CALL(cuMemCreate, uint64_t *handle, size_t bytes, const int *prop, uint64_t flags)
    (void)flags;
    rule(prop[0] == 1 && prop[2] == 1 && bytes > 0 && bytes % GRANULARITY == 0, "memory that is made");
    if (made_bytes() + bytes > (size_t)1 << 30) return 2;
    pthread_mutex_lock(&places);
    for (*handle = 1; made[*handle].held || made[*handle].mapped; ++*handle) {}
    made[*handle].bytes = bytes;
    made[*handle].held = 1;
    pthread_mutex_unlock(&places);
DONE
CALL(cuMemRelease, uint64_t handle) rule(made[handle].held, "release of what is not held"); made[handle].held = 0; DONE
CALL(cuMemMap, uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags)
    (void)flags;
    pthread_mutex_lock(&places);
    rule(made[handle].held && !made[handle].mapped && made[handle].bytes == bytes && offset == 0, "mapping of memory");
    int inside = 0;
    for (int i = 0; i < PLACES; i++)
        inside |= ranges[i].used && ranges[i].address <= address && address + bytes <= ranges[i].address + ranges[i].bytes;
    rule(inside && address % GRANULARITY == 0, "mapping of what is not reserved");
    for (int i = 0; i < PLACES; i++)
        rule(!mappings[i].used || address + bytes <= mappings[i].address || mappings[i].address + mappings[i].bytes <= address, "mapping over another");
    owner[enter(mappings, address, bytes)] = (int)handle;
    made[handle].mapped = 1;
    pthread_mutex_unlock(&places);
DONE
CALL(cuMemSetAccess, uint64_t address, size_t bytes, const int *descriptions, size_t number)
    rule(number > 0 && descriptions[0] == 1 && descriptions[2] == 3, "access");
    log_of("access of so many, the last", (void *)number, (void *)(uintptr_t)descriptions[3 * number - 2]);
    int at = find(mappings, address);
    rule(at >= 0 && mappings[at].bytes == bytes, "access to what is not mapped");
    if (mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE)) return 999;
    memset((void *)(uintptr_t)address, 0x5a, bytes);
DONE
CALL(cuMemUnmap, uint64_t address, size_t bytes)
    pthread_mutex_lock(&places);
    int at = find(mappings, address);
    rule(at >= 0 && mappings[at].bytes == bytes, "end of what is not mapped");
    mappings[at].used = 0;
    made[owner[at]].mapped = 0;
    pthread_mutex_unlock(&places);
    mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
DONE
CALL(cuMemAllocAsync, uint64_t *address, size_t bytes, Stream *stream) (void)stream; return cuMemAlloc_v2(address, bytes); DONE
CALL(cuMemFreeAsync, uint64_t address, Stream *stream)
    log_of("free", (void *)(uintptr_t)address, stream);
    free((void *)(uintptr_t)address);
DONE
CALL(cuMemHostAlloc, void **address, size_t bytes, unsigned flags) (void)flags; *address = malloc(bytes); DONE
CALL(cuMemFreeHost, void *address) free(address); DONE
CALL(cuMemGetInfo_v2, size_t *available, size_t *total) *available = 1 << 29; *total = 1 << 30; DONE
CALL(cuPointerGetAttributes, unsigned count, int *attributes, void **data, uint64_t address)
    (void)count; (void)attributes; (void)address;
    *(unsigned *)data[0] = 0;
DONE

CALL(cuStreamCreate, Stream **stream, unsigned flags) (void)flags; *stream = calloc(1, sizeof **stream); DONE
CALL(cuStreamDestroy_v2, Stream *stream) log_of("destroy", stream, NULL); free(stream); DONE
CALL(cuStreamSynchronize, Stream *stream) wait_for(stream); DONE
CALL(cuStreamQuery, Stream *stream) if (is_busy(stream)) return 600; DONE
CALL(cuStreamWaitEvent, Stream *stream, void *event, unsigned flags) (void)flags; log_of("wait", stream, event); DONE
typedef struct { void (*callback)(Stream *, int, void *); Stream *stream; void *data; } Callback;

// In a thread of its own, some time after the work.
static void *call_back(void *given) {
    Callback call = *(Callback *)given;
    free(given);
    wait_for(call.stream);
    usleep(2000);
    const char *status = getenv("FAKE_CONTEXT");
    call.callback(call.stream, status ? atoi(status) : 0, call.data);
    return NULL;
}

CALL(cuStreamAddCallback, Stream *stream, void (*callback)(Stream *, int, void *), void *data, unsigned flags)
    (void)flags;
    if (stream->is_capturing) return 900;
    Callback *call = malloc(sizeof *call);
    *call = (Callback){callback, stream, data};
    pthread_t thread;
    if (pthread_create(&thread, NULL, call_back, call)) return 999;
    pthread_detach(thread);
DONE
CALL(cuEventCreate, void **event, unsigned flags) (void)flags; *event = malloc(1); DONE
CALL(cuEventDestroy_v2, void *event) free(event); DONE
CALL(cuEventRecord, void *event, Stream *stream) log_of("record", stream, event); DONE
CALL(cuEventQuery, void *event) (void)event; DONE
CALL(cuEventSynchronize, void *event) (void)event; DONE
CALL(cuEventElapsedTime, float *ms, void *start, void *end) (void)start; (void)end; *ms = 1; DONE

CALL(cuMemcpyHtoDAsync_v2, uint64_t to, const void *from, size_t bytes, Stream *stream)
    wait_for(stream);
    memcpy((void *)(uintptr_t)to, from, bytes);
DONE
CALL(cuMemcpyDtoHAsync_v2, void *to, uint64_t from, size_t bytes, Stream *stream)
    wait_for(stream);
    memcpy(to, (const void *)(uintptr_t)from, bytes);
DONE
CALL(cuMemcpyDtoDAsync_v2, uint64_t to, uint64_t from, size_t bytes, Stream *stream)
    wait_for(stream);
    log_of("copy", stream, NULL);
    if (!stream->is_capturing) memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
DONE
CALL(cuMemsetD8Async, uint64_t to, unsigned char value, size_t bytes, Stream *stream)
    wait_for(stream);
    if (!stream->is_capturing) memset((void *)(uintptr_t)to, value, bytes);
DONE

CALL(cuModuleLoadDataEx, void **module, const void *image, unsigned count, int *options, void **values)
    (void)image; (void)count; (void)options; (void)values;
    *module = malloc(1);
DONE
CALL(cuModuleUnload, void *module) free(module); DONE
CALL(cuModuleGetFunction, void **function, void *module, const char *name) (void)name; *function = module; DONE
CALL(cuFuncGetAttribute, int *value, int attribute, void *function) (void)attribute; (void)function; *value = 32; DONE
CALL(cuFuncSetAttribute, void *function, int attribute, int value) (void)function; (void)attribute; (void)value; DONE
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, int *blocks, void *function, int threads, size_t bytes)
    (void)function; (void)threads; (void)bytes;
    *blocks = 2;
DONE
CALL(cuLaunchKernel, void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned bytes,
     Stream *stream, void **params, void **extra)
    (void)function; (void)gx; (void)gy; (void)gz; (void)bx; (void)by; (void)bz; (void)bytes; (void)stream; (void)params; (void)extra;
DONE

CALL(cuThreadExchangeStreamCaptureMode, int *mode)
    static _Thread_local int now = 1;
    int before = now;
    now = *mode;
    *mode = before;
DONE
CALL(cuStreamIsCapturing, Stream *stream, int *status) *status = stream->is_capturing; DONE
CALL(cuStreamBeginCapture_v2, Stream *stream, int mode) (void)mode; stream->is_capturing = 1; DONE
CALL(cuStreamEndCapture, Stream *stream, void **graph) stream->is_capturing = 0; *graph = malloc(1); DONE
CALL(cuGraphInstantiateWithFlags, void **exec, void *graph, uint64_t flags) (void)graph; (void)flags; *exec = malloc(1); DONE
CALL(cuGraphLaunch, void *exec, Stream *stream) (void)exec; (void)stream; DONE
CALL(cuGraphExecDestroy, void *exec) free(exec); DONE
CALL(cuGraphDestroy, void *graph) free(graph); DONE
