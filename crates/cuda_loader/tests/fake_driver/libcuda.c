/* A driver with a handful of functions. What it does not define must answer CUDA_ERROR_NOT_FOUND. */
#include <stdint.h>
#include <string.h>

static int initialised;

int cuInit(unsigned flags) {
    initialised = flags == 0;
    return initialised ? 0 : 1;
}

int cuDriverGetVersion(int *version) {
    *version = 12040;
    return 0;
}

int cuDeviceGetCount(int *count) {
    *count = 7;
    return initialised ? 0 : 3;
}

int cuGetErrorName(int code, const char **text) {
    *text = code == 912 ? "CUDA_ERROR_INVALID_CLUSTER_SIZE" : 0;
    return code == 912 ? 0 : 1;
}

/* Writes its eleven arguments where the first kernel parameter points, and answers with a code newer than cust_raw. */
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned smem, void *stream, void **params, void **extra) {
    uint64_t *seen = params[0];
    uint64_t all[11] = {(uintptr_t)function, gx,   gy, gz, bx, by, bz, smem, (uintptr_t)stream, (uintptr_t)params,
                        (uintptr_t)extra};
    memcpy(seen, all, sizeof all);
    return 912;
}

/* Calls back at once: the stream and the data as they came, and an error that the stream's context is said to have. */
int cuStreamAddCallback(void *stream, void (*callback)(void *, int, void *), void *data, unsigned flags) {
    if (flags != 0 || stream == 0) return 1;
    callback(stream, 700, data);
    return 0;
}

struct attribute {
    int id;
    char pad[8 - sizeof(int)];
    union {
        char bytes[64];
        struct {
            unsigned x, y, z;
        } cluster;
        int programmatic;
        int cooperative;
    } value;
};

struct config {
    unsigned grid[3], block[3], smem;
    void *stream;
    struct attribute *attributes;
    unsigned num_attributes;
};

int cuLaunchKernelEx(const struct config *config, void *function, void **params, void **extra) {
    uint64_t *seen = params[0];
    *seen++ = (uintptr_t)function;
    for (int i = 0; i < 3; i++) *seen++ = config->grid[i];
    for (int i = 0; i < 3; i++) *seen++ = config->block[i];
    *seen++ = config->smem;
    *seen++ = (uintptr_t)config->stream;
    *seen++ = (uintptr_t)extra;
    for (unsigned i = 0; i < config->num_attributes; i++) {
        const struct attribute *attribute = &config->attributes[i];
        if (attribute->id == 4) {
            *seen++ = attribute->value.cluster.x;
            *seen++ = attribute->value.cluster.y;
            *seen++ = attribute->value.cluster.z;
        } else if (attribute->id == 6) {
            *seen++ = attribute->value.programmatic;
        } else if (attribute->id == 2) {
            *seen++ = attribute->value.cooperative;
        }
    }
    return 0;
}

/* Twelve integer arguments: the last six come on the stack. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, uint64_t address, const uint64_t *dims,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    uint64_t all[16] = {type,   rank,     address, dims[0], dims[1],   strides[0], box[0], box[1],
                        steps[0], steps[1], interleave, swizzle, promotion, fill,     (uintptr_t)map % 64, 99};
    memcpy(map, all, sizeof all);
    return 0;
}

/* A float comes in a vector register. */
int cuParamSetf(void *function, int offset, float value) {
    return function == 0 && offset == 5 && value == 2.5f ? 0 : 1;
}

/* Fails as the driver does for broken PTX: the logs are options 3 and 5, their sizes 4 and 6. */
int cuModuleLoadDataEx(void **module, const char *image, unsigned count, const int *options, void **values) {
    *module = 0;
    for (unsigned i = 0; i + 1 < count; i++) {
        if (options[i] == 3) strncpy(values[i], "compiling for nothing", (uintptr_t)values[i + 1]);
        if (options[i] == 5) strncpy(values[i], strcmp(image, "bad") ? "not bad" : "line 1: bad", (uintptr_t)values[i + 1]);
    }
    return 218;
}
