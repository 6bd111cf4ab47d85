// A driver whose device is the host: memory is allocated, copied and filled, kernels do nothing, and work is done when it is enqueued.
//
// FAKE_FAIL=n: the call of number n, from 1 on, answers FAKE_CODE instead of doing anything; with FAKE_STICKY all later ones too.
// FAKE_LOG: what orders streams is written to stderr, and copies within the device, frees in a stream, and the ends of streams.
// FAKE_DEVICES=n: how many devices there are, 1 unless set.
// FAKE_CONTEXT=n: what callbacks of streams are told became of the stream's work; 0 unless set.
// A fake NCCL (crates/cuda_loader/tests/fake_nccl) makes a stream busy; what comes after that in the stream waits.
// On stderr: the call that fails, and at the end how many there were.

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

__attribute__((destructor)) static void end(void) { fprintf(stderr, "fake driver: %d calls\n", calls); }

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
    *value = attribute == 75 ? 6 : attribute == 76 ? 1 : attribute == 97 ? 48 << 10 : 64;
DONE
// Each with memory of its own.
CALL(cuDeviceCanAccessPeer, int *can, int device, int peer) (void)device; (void)peer; *can = 0; DONE
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
