// NCCL on the host, for ranks that are threads of one process: addresses are the host's, and what is enqueued happens when all ranks have
// come. Until then the stream is busy, if it is one of the fake driver's (host/tests/driver_faults/libcuda.c). All communicators are
// nonblocking ones.
//
// FAKE_NCCL_LOG=file           a line for each call, with its arguments, but for questions of a communicator's state
// FAKE_NCCL_VERSION=n          what ncclGetVersion says
// FAKE_NCCL_PROGRESS=n         every call is in progress for n questions
// FAKE_NCCL_FAIL=n             the call of number n answers FAKE_NCCL_CODE (3 unless set) and does nothing; questions do not count
// FAKE_NCCL_FAIL_STATE=n       the question of number n finds that error
// FAKE_NCCL_HANG=name          calls of this name stay in progress
// FAKE_NCCL_ABORT_HANGS=1      an abort does not return
// On stderr: the call that fails, and at the end how many calls there were, and communicators that are still there.
//
// Compiled with -DLACKS_RECV there is no ncclRecv, with -DSTREAMS streams are the fake driver's.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { MOST = 16, OPS = 4096 };

typedef struct { char internal[128]; } Id;
typedef struct { int is_capturing; int busy; } Stream;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; const char *net; int share; } Config;

typedef struct {
    char what;  // 'r'educe, 'g'ather, 's'catter, 'b'roadcast
    const char *from;
    char *to;
    size_t count;
    int type, root;
    Stream *stream;
} Op;

struct Clique;
typedef struct Comm {
    struct Clique *clique;
    int rank, progress, error, hangs, begun, finalized;
    long pushed, done;
    Op ops[64];
} Comm;

typedef struct Clique {
    Id id;
    int size, here;
    Comm *ranks[MOST];
    // What waits for its other half: of a pair of ranks one is there first.
    struct { int is_send; const char *from; char *to; size_t bytes; Stream *stream; } mail[MOST][MOST][64];
    int mails[MOST][MOST];
    struct Clique *next;
} Clique;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Clique *cliques;
static int calls, states, ids, alive, version = 22703, progress, fail_at, fail_state, code = INTERNAL;
static const char *hang = "", *log_file;
static char last_error[256];
static __thread int depth;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

__attribute__((constructor)) static void begin(void) {
    version = number("FAKE_NCCL_VERSION", version);
    progress = number("FAKE_NCCL_PROGRESS", 0);
    fail_at = number("FAKE_NCCL_FAIL", 0);
    fail_state = number("FAKE_NCCL_FAIL_STATE", 0);
    code = number("FAKE_NCCL_CODE", INTERNAL);
    if (getenv("FAKE_NCCL_HANG")) hang = getenv("FAKE_NCCL_HANG");
    log_file = getenv("FAKE_NCCL_LOG");
}

__attribute__((destructor)) static void end(void) {
    fprintf(stderr, "fake nccl: %d calls\nfake nccl: %d questions\nfake nccl: %d alive\n", calls, states, alive);
}

// Counts a call and writes it down. With the lock.
static int fails(const char *name, const char *format, ...) {
    calls++;
    if (log_file) {
        FILE *file = fopen(log_file, "a");
        if (file) {
            va_list arguments;
            fprintf(file, "%s ", name);
            va_start(arguments, format);
            vfprintf(file, format, arguments);
            va_end(arguments);
            fprintf(file, "\n");
            fclose(file);
        }
    }
    if (calls != fail_at) return 0;
    fprintf(stderr, "fake nccl: %s fails\n", name);
    snprintf(last_error, sizeof last_error, "the fake lets %s fail", name);
    return code;
}

static long context(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), *found = NULL;
    if (!driver) return 0;
    int (*current)(void **) = (int (*)(void **))dlsym(driver, "cuCtxGetCurrent");
    if (current) current(&found);
    dlclose(driver);
    return (long)found;
}

static void set_busy(Stream *stream, int by) {
#ifdef STREAMS
    if (stream) __atomic_add_fetch(&stream->busy, by, __ATOMIC_SEQ_CST);
#else
    (void)stream; (void)by;
#endif
}

static int is_recorded(Stream *stream) {
#ifdef STREAMS
    return stream && stream->is_capturing;
#else
    (void)stream;
    return 0;
#endif
}

static size_t bytes_of(int type) { return type == 7 ? 4 : type == 6 || type == 9 ? 2 : 1; }

static float widen(const char *at, int type) {
    uint32_t bits = 0;
    float value;
    if (type == 7) memcpy(&value, at, 4);
    else {
        memcpy(&bits, at, 2);
        if (type == 6) {
            // Normal numbers and zero are all that the tests have.
            uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
            bits = rest ? sign | ((rest << 13) + ((127 - 15) << 23)) : sign;
        } else bits <<= 16;
        memcpy(&value, &bits, 4);
    }
    return value;
}

static void narrow(char *at, float value, int type) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (type == 7) memcpy(at, &bits, 4);
    else {
        // The tests' sums are exact.
        uint16_t half = (uint16_t)(bits >> 16);
        if (type == 6) half = value == 0 ? half & 0x8000 : (uint16_t)(((bits >> 16) & 0x8000) | (((bits & 0x7fffffffu) - ((127 - 15) << 23)) >> 13));
        memcpy(at, &half, 2);
    }
}

// All ranks have come to their next operation.
static void perform(Clique *clique) {
    Op *ops[MOST];
    for (int rank = 0; rank < clique->size; rank++) {
        Comm *comm = clique->ranks[rank];
        ops[rank] = &comm->ops[comm->done % 64];
    }
    int type = ops[0]->type;
    size_t count = ops[0]->count, size = bytes_of(type), each = count * size;
    char what = ops[0]->what, *result = malloc(each * MOST + 1);
    if (what == 'r' || what == 's') {
        size_t all = what == 's' ? count * (size_t)clique->size : count;
        for (size_t i = 0; i < all; i++) {
            float sum = 0;
            for (int rank = 0; rank < clique->size; rank++) sum += widen(ops[rank]->from + i * size, type);
            narrow(result + i * size, sum, type);
        }
    } else if (what == 'g') {
        for (int rank = 0; rank < clique->size; rank++) memcpy(result + (size_t)rank * each, ops[rank]->from, each);
    } else memcpy(result, ops[ops[0]->root]->from, each);
    for (int rank = 0; rank < clique->size; rank++) {
        if (what == 's') memcpy(ops[rank]->to, result + (size_t)rank * each, each);
        else memcpy(ops[rank]->to, result, what == 'g' ? each * (size_t)clique->size : each);
        set_busy(ops[rank]->stream, -1);
        clique->ranks[rank]->done++;
    }
    free(result);
}

// What a call answers, and what the next questions find. With the lock.
static int begun(Comm *comm, const char *name) {
    comm->progress = progress;
    comm->hangs = !strcmp(hang, name);
    return comm->progress || comm->hangs ? IN_PROGRESS : SUCCESS;
}

static int is_ready(Comm *comm) {
    return comm->clique->here == comm->clique->size && !comm->progress && !comm->hangs && !comm->error;
}

static int push(const char *name, Comm *comm, Op op) {
    pthread_mutex_lock(&lock);
    int failure = fails(name, "rank=%d from=%zu to=%zu count=%zu type=%d root=%d stream=%zu", comm->rank, (size_t)op.from, (size_t)op.to,
                        op.count, op.type, op.root, (size_t)op.stream);
    if (!failure && !is_ready(comm)) {
        snprintf(last_error, sizeof last_error, "a call before the last one is ready");
        failure = INVALID_ARGUMENT;
    }
    if (failure) comm->error = failure;
    int answer = failure ? failure : begun(comm, name);
    if (!failure && !is_recorded(op.stream)) {
        comm->ops[comm->pushed++ % 64] = op;
        set_busy(op.stream, 1);
        int all = 1;
        for (int rank = 0; rank < comm->clique->size; rank++) {
            Comm *other = comm->clique->ranks[rank];
            all = all && other && other->pushed > comm->done && other->done == comm->done;
        }
        if (all) perform(comm->clique);
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

static int mail(const char *name, Comm *comm, int is_send, const char *from, char *to, size_t bytes, int other, Stream *stream) {
    pthread_mutex_lock(&lock);
    int failure = fails(name, "rank=%d at=%zu bytes=%zu other=%d stream=%zu", comm->rank, is_send ? (size_t)from : (size_t)to, bytes, other,
                        (size_t)stream);
    if (!failure && !is_ready(comm) && !depth) failure = INVALID_ARGUMENT;
    if (failure) comm->error = failure;
    int answer = failure ? failure : depth ? SUCCESS : begun(comm, name);
    Clique *clique = comm->clique;
    int a = is_send ? comm->rank : other, b = is_send ? other : comm->rank, *waiting = &clique->mails[a][b];
    if (!failure && !is_recorded(stream)) {
        if (*waiting && clique->mail[a][b][0].is_send != is_send) {
            memcpy(is_send ? clique->mail[a][b][0].to : to, is_send ? from : clique->mail[a][b][0].from, bytes);
            set_busy(clique->mail[a][b][0].stream, -1);
            memmove(&clique->mail[a][b][0], &clique->mail[a][b][1], sizeof clique->mail[a][b][0] * 63);
            --*waiting;
        } else {
            int at = (*waiting)++;
            clique->mail[a][b][at].is_send = is_send;
            clique->mail[a][b][at].from = from;
            clique->mail[a][b][at].to = to;
            clique->mail[a][b][at].bytes = bytes;
            clique->mail[a][b][at].stream = stream;
            set_busy(stream, 1);
        }
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

int ncclGetVersion(int *result) { *result = version; return 0; }

const char *ncclGetErrorString(int result) {
    return result == INTERNAL ? "internal error" : result == INVALID_ARGUMENT ? "invalid argument" : result == 6 ? "remote process exited" : "an error";
}
const char *ncclGetLastError(Comm *comm) { (void)comm; return last_error; }

int ncclGetUniqueId(Id *id) {
    pthread_mutex_lock(&lock);
    int failure = fails("ncclGetUniqueId", "");
    memset(id, 0xab, sizeof *id);
    // Not found again in another process, and with a nul, which ends no copy of it.
    snprintf(id->internal, sizeof *id, "id %d of %d", ++ids, (int)getpid());
    pthread_mutex_unlock(&lock);
    return failure;
}

int ncclCommInitRankConfig(Comm **result, int size, Id id, int rank, Config *config) {
    pthread_mutex_lock(&lock);
    int failure = fails("ncclCommInitRankConfig", "rank=%d size=%d context=%ld blocking=%d config=%zu/%u", rank, size, context(), config->blocking,
                        config->size, config->version);
    if (!failure && (config->magic != 0xcafebeef || config->blocking != 0 || config->cga != INT_MIN || config->max_ctas != INT_MIN || config->net ||
                     config->share != INT_MIN || rank < 0 || rank >= size || size > MOST))
        failure = INVALID_ARGUMENT;
    *result = NULL;
    if (!failure) {
        Clique *clique = cliques;
        while (clique && memcmp(&clique->id, &id, sizeof id)) clique = clique->next;
        if (!clique) {
            clique = calloc(1, sizeof *clique);
            clique->id = id;
            clique->size = size;
            clique->next = cliques;
            cliques = clique;
        }
        Comm *comm = calloc(1, sizeof *comm);
        comm->clique = clique;
        comm->rank = rank;
        comm->progress = progress;
        comm->hangs = !strcmp(hang, "ncclCommInitRankConfig");
        if (clique->size != size || clique->ranks[rank]) comm->error = INVALID_USAGE;
        else { clique->ranks[rank] = comm; clique->here++; }
        alive++;
        *result = comm;
        failure = IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
    return failure;
}

int ncclCommGetAsyncError(Comm *comm, int *result) {
    pthread_mutex_lock(&lock);
    if (++states == fail_state) {
        fprintf(stderr, "fake nccl: ncclCommGetAsyncError fails\n");
        snprintf(last_error, sizeof last_error, "the fake lets a question fail");
        comm->error = code;
    }
    if (comm->error) *result = comm->error;
    else if (comm->hangs || comm->clique->here < comm->clique->size) *result = IN_PROGRESS;
    else if (comm->progress) { comm->progress--; *result = IN_PROGRESS; }
    else *result = SUCCESS;
    pthread_mutex_unlock(&lock);
    return 0;
}

int ncclCommFinalize(Comm *comm) {
    pthread_mutex_lock(&lock);
    int failure = fails("ncclCommFinalize", "rank=%d", comm->rank);
    comm->finalized = 1;
    int answer = failure ? failure : begun(comm, "ncclCommFinalize");
    pthread_mutex_unlock(&lock);
    return answer;
}

// A communicator's memory stays, so that one that is used behind its end is found.
static int ends(const char *name, Comm *comm) {
    int failure = fails(name, "rank=%d", comm->rank);
    if (comm->begun == -1) { fprintf(stderr, "fake nccl: %s of a communicator that has ended\n", name); abort(); }
    comm->begun = -1;
    alive--;
    for (; comm->done < comm->pushed; comm->done++) set_busy(comm->ops[comm->done % 64].stream, -1);
    for (int other = 0; other < comm->clique->size; other++)
        for (int way = 0; way < 2; way++) {
            int a = way ? comm->rank : other, b = way ? other : comm->rank;
            for (int at = 0; at < comm->clique->mails[a][b]; at++)
                if (comm->clique->mail[a][b][at].is_send == way) set_busy(comm->clique->mail[a][b][at].stream, -1);
            if (comm->clique->mails[a][b] && comm->clique->mail[a][b][0].is_send == way) comm->clique->mails[a][b] = 0;
        }
    if (comm->clique->ranks[comm->rank] == comm) comm->clique->ranks[comm->rank] = NULL;
    return failure;
}

int ncclCommDestroy(Comm *comm) {
    pthread_mutex_lock(&lock);
    if (!comm->finalized) fprintf(stderr, "fake nccl: destroyed before it was finalized\n");
    int answer = ends("ncclCommDestroy", comm);
    pthread_mutex_unlock(&lock);
    return answer;
}

int ncclCommAbort(Comm *comm) {
    pthread_mutex_lock(&lock);
    int answer = ends("ncclCommAbort", comm);
    pthread_mutex_unlock(&lock);
    while (getenv("FAKE_NCCL_ABORT_HANGS")) pause();
    return answer;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, Stream *stream) {
    return push(op == 0 ? "ncclAllReduce" : "not a sum", comm, (Op){'r', from, to, count, type, 0, stream});
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, Stream *stream) {
    return push("ncclAllGather", comm, (Op){'g', from, to, count, type, 0, stream});
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *comm, Stream *stream) {
    return push(op == 0 ? "ncclReduceScatter" : "not a sum", comm, (Op){'s', from, to, count, type, 0, stream});
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, Stream *stream) {
    return push("ncclBroadcast", comm, (Op){'b', from, to, count, type, root, stream});
}
int ncclSend(const void *from, size_t count, int type, int other, Comm *comm, Stream *stream) {
    return mail("ncclSend", comm, 1, from, NULL, count * bytes_of(type), other, stream);
}
#ifndef LACKS_RECV
int ncclRecv(void *to, size_t count, int type, int other, Comm *comm, Stream *stream) {
    return mail("ncclRecv", comm, 0, NULL, to, count * bytes_of(type), other, stream);
}
#endif

int ncclGroupStart(void) {
    pthread_mutex_lock(&lock);
    int failure = fails("ncclGroupStart", "");
    if (!failure) depth++;
    pthread_mutex_unlock(&lock);
    return failure;
}
int ncclGroupEnd(void) {
    pthread_mutex_lock(&lock);
    int failure = fails("ncclGroupEnd", "");
    if (depth < 1) failure = INVALID_USAGE;
    else depth--;
    pthread_mutex_unlock(&lock);
    return failure;
}
