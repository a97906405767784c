// What NVIDIA's driver answers about memory and events that processes share, on one GPU:
//   made     memory that another process has made, after that process has ended
//   events   interprocess events over a checkpoint
//   context  a second context next to the driver's checkpoint
//   pieces   export of memory that the driver has restored, by size
//
//   gcc -O2 -o answers answers.c -ldl && ./answers made events context pieces
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FUNCTIONS(X)                                                                                         \
    X(cuInit)                                                                                                \
    X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuGetErrorName) X(cuMemCreate)           \
        X(cuMemAddressReserve) X(cuMemMap) X(cuMemSetAccess) X(cuMemExportToShareableHandle)                 \
            X(cuMemImportFromShareableHandle) X(cuMemAlloc_v2) X(cuMemAllocHost_v2) X(cuMemsetD32_v2)        \
                X(cuMemsetD32Async) X(cuMemcpyDtoH_v2) X(cuMemcpyDtoD_v2) X(cuCtxSynchronize)                \
                    X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord) X(cuStreamWaitEvent)              \
                        X(cuIpcGetEventHandle) X(cuIpcOpenEventHandle) X(cuPointerGetAttribute)              \
                            X(cuCheckpointProcessLock) X(cuCheckpointProcessCheckpoint)                      \
                                X(cuCheckpointProcessRestore) X(cuCheckpointProcessUnlock)
#define DECLARE(name) static __typeof__(&name) p_##name;
FUNCTIONS(DECLARE)

static const size_t GIB = 1UL << 30, MIB = 1UL << 20;

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        printf("no %s\n", name);
        exit(3);
    }
    return found;
}

static void load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        puts(dlerror());
        exit(3);
    }
#define FIND(name) p_##name = symbol(library, #name);
    FUNCTIONS(FIND)
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static const char *name(CUresult result) {
    const char *text = "?";
    p_cuGetErrorName(result, &text);
    return text;
}

// A context on the first GPU.
static void init(void) {
    CUdevice device;
    CUcontext context;
    load();
    double begun = now();
    if (p_cuInit(0) || p_cuDeviceGet(&device, 0))
        exit(3);
    double initialised = now();
    if (p_cuDevicePrimaryCtxRetain(&context, device) || p_cuCtxSetCurrent(context))
        exit(3);
    printf("  process %d: cuInit %.3f s, context %.3f s\n", getpid(), initialised - begun,
           now() - initialised);
}

static void say(int socket, char word) {
    if (write(socket, &word, 1) != 1)
        exit(4);
}
static char hear(int socket) {
    char word = 0;
    return read(socket, &word, 1) == 1 ? word : 0;
}
static void ask(int socket, char word) {
    say(socket, word);
    hear(socket);
}

static void send_descriptor(int socket, int descriptor) {
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
    if (sendmsg(socket, &message, 0) != 1)
        exit(4);
}

static int received_descriptor(int socket) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec data = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int descriptor = -1;
    if (recvmsg(socket, &message, 0) == 1 && CMSG_FIRSTHDR(&message))
        memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    return descriptor;
}

// Calls of the driver's checkpoint, `l`ock, `c`heckpoint, `r`estore and `u`nlock, by a process of its own.
// Returns whether all succeeded.
static int driver(const char *calls, int pid) {
    fflush(stdout);
    int caller = fork();
    if (!caller) {
        load();
        p_cuInit(0);
        for (const char *call = calls; *call; call++) {
            CUcheckpointLockArgs lock = {.timeoutMs = 10000};
            double begun = now();
            CUresult result = *call == 'l'   ? p_cuCheckpointProcessLock(pid, &lock)
                              : *call == 'c' ? p_cuCheckpointProcessCheckpoint(pid, NULL)
                              : *call == 'r' ? p_cuCheckpointProcessRestore(pid, NULL)
                                             : p_cuCheckpointProcessUnlock(pid, NULL);
            printf("  %c %d: %s, %.0f ms\n", *call, pid, name(result), (now() - begun) * 1e3);
            fflush(stdout);
            if (result)
                _exit(1);
        }
        _exit(0);
    }
    int status = 1;
    waitpid(caller, &status, 0);
    return !status;
}

static void in_use(const char *when) {
    char command[300];
    snprintf(command, sizeof command,
             "echo '  %s: MiB' $(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits) ', by "
             "process:' $(nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits | tr "
             "'\\n' ';')",
             when);
    fflush(stdout);
    if (system(command))
        puts("  no nvidia-smi");
}

static void end(int pid) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static const CUmemAllocationProp DEVICE = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                           .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};

static CUdeviceptr mapped(CUmemGenericAllocationHandle handle, size_t bytes) {
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at = 0;
    CUresult result = p_cuMemAddressReserve(&at, bytes, 0, 0, 0);
    if (!result)
        result = p_cuMemMap(at, bytes, 0, handle, 0);
    if (!result)
        result = p_cuMemSetAccess(at, bytes, &access, 1);
    if (result)
        printf("  map: %s\n", name(result));
    return at;
}

static CUresult exported(int *descriptor, CUmemGenericAllocationHandle handle) {
    return p_cuMemExportToShareableHandle(descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static void of_piece(const char *whose, const CUdeviceptr piece[2], void *host) {
    unsigned handles = 9;
    int turns = 20;
    p_cuMemcpyDtoD_v2(piece[1], piece[0], GIB);
    p_cuCtxSynchronize();
    double begun = now();
    for (int turn = 0; turn < turns; turn++)
        p_cuMemcpyDtoD_v2(piece[1], piece[0], GIB);
    p_cuCtxSynchronize();
    double on_gpu = now() - begun;
    p_cuMemcpyDtoH_v2(host, piece[0], GIB);
    begun = now();
    p_cuMemcpyDtoH_v2(host, piece[0], GIB);
    double out = now() - begun;
    p_cuPointerGetAttribute(&handles, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, piece[0]);
    printf("  %s: copies on the GPU %.0f GiB/s, to the host %.1f GiB/s, handle types %u\n", whose,
           turns / on_gpu, 1 / out, handles);
}

static void made(void) {
    int pair[2], pieces[2];
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    int maker = fork();
    if (!maker) {
        init();
        for (int nth = 0; nth < 2; nth++) {
            CUmemGenericAllocationHandle handle;
            int descriptor = -1;
            if (p_cuMemCreate(&handle, GIB, &DEVICE, 0) || exported(&descriptor, handle))
                exit(3);
            send_descriptor(pair[1], descriptor);
        }
        fflush(stdout);
        hear(pair[1]);
        _exit(0);
    }
    for (int nth = 0; nth < 2; nth++)
        pieces[nth] = received_descriptor(pair[0]);
    int user = fork();
    if (!user) {
        init();
        CUdeviceptr own[2], others[2];
        void *host;
        p_cuMemAllocHost_v2(&host, GIB);
        for (int nth = 0; nth < 2; nth++) {
            CUmemGenericAllocationHandle handle;
            if (p_cuMemCreate(&handle, GIB, &DEVICE, 0))
                exit(3);
            own[nth] = mapped(handle, GIB);
            CUresult result = p_cuMemImportFromShareableHandle(&handle, (void *)(long)pieces[nth],
                                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
            if (result)
                printf("  import: %s\n", name(result));
            others[nth] = mapped(handle, GIB);
        }
        in_use("the maker lives");
        say(pair[0], 'e');
        usleep(1500000);
        in_use("the maker has ended");
        of_piece("own", own, host);
        of_piece("imported", others, host);
        fflush(stdout);
        _exit(0);
    }
    waitpid(user, NULL, 0);
    waitpid(maker, NULL, 0);
}

// Work of some tenths of a second, after which the event is reached.
static void exporter(int socket) {
    CUevent event;
    CUipcEventHandle handle;
    CUdeviceptr memory;
    init();
    p_cuMemAlloc_v2(&memory, 8 * GIB);
    CUresult result = p_cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    if (!result)
        result = p_cuIpcGetEventHandle(&handle, event);
    printf("  export: %s\n", name(result));
    fflush(stdout);
    if (write(socket, &handle, sizeof handle) != sizeof handle)
        exit(4);
    while (hear(socket)) {
        double begun = now();
        for (int turn = 0; turn < 200; turn++)
            p_cuMemsetD32Async(memory, turn, 8 * GIB / 4, 0);
        result = p_cuEventRecord(event, 0);
        say(socket, 'k');
        CUresult done = p_cuCtxSynchronize();
        printf("  exporter: work of %.3f s, %s, %s\n", now() - begun, name(result), name(done));
        fflush(stdout);
    }
    _exit(0);
}

static void importer(int socket, CUipcEventHandle handle) {
    CUevent event;
    init();
    printf("  import: %s\n", name(p_cuIpcOpenEventHandle(&event, handle)));
    fflush(stdout);
    say(socket, 'k');
    while (hear(socket)) {
        double begun = now();
        CUresult result = p_cuStreamWaitEvent(0, event, 0), done = p_cuCtxSynchronize();
        printf("  importer: waited %.3f s, %s, %s\n", now() - begun, name(result), name(done));
        fflush(stdout);
        say(socket, 'k');
    }
    _exit(0);
}

// Both have the event open. The importer has to wait as long as the exporter works.
static void events(void) {
    int first[2], second[2];
    CUipcEventHandle handle;
    socketpair(AF_UNIX, SOCK_STREAM, 0, first);
    socketpair(AF_UNIX, SOCK_STREAM, 0, second);
    int exports = fork();
    if (!exports)
        exporter(first[1]);
    if (read(first[0], &handle, sizeof handle) != sizeof handle)
        return;
    int imports = fork();
    if (!imports)
        importer(second[1], handle);
    hear(second[0]);
    for (int round = 0; round < 2; round++) {
        puts(round ? " after the checkpoint" : " before");
        ask(first[0], 'w');
        ask(second[0], 'w');
        usleep(700000);
        if (!round &&
            !(driver("l", exports) && driver("l", imports) && driver("c", exports) && driver("c", imports) &&
              driver("r", exports) && driver("r", imports) && driver("u", exports) && driver("u", imports)))
            break;
    }
    end(exports);
    end(imports);
}

static void neighbour(int socket, int copies) {
    CUdeviceptr memory;
    void *host;
    init();
    p_cuMemAlloc_v2(&memory, GIB);
    p_cuMemAllocHost_v2(&host, GIB);
    p_cuMemcpyDtoH_v2(host, memory, GIB);
    fflush(stdout);
    say(socket, 'k');
    double begun = now();
    long turns = 0;
    char word;
    while (recv(socket, &word, 1, copies ? MSG_DONTWAIT : 0) < 0) {
        p_cuMemcpyDtoH_v2(host, memory, GIB);
        turns++;
    }
    if (copies)
        printf("  copies next to it: %.1f GiB/s\n", turns / (now() - begun));
    fflush(stdout);
    _exit(0);
}

static void context(void) {
    static const char *const NEXT_TO[] = {"nobody", "an idle context", "copies at full rate"};
    for (int round = 0; round < 3; round++) {
        int pair[2], other = 0, its[2];
        socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
        int job = fork();
        if (!job) {
            CUdeviceptr memory;
            init();
            p_cuMemAlloc_v2(&memory, 8 * GIB);
            p_cuMemsetD32_v2(memory, 3, 8 * GIB / 4);
            p_cuCtxSynchronize();
            fflush(stdout);
            say(pair[1], 'k');
            hear(pair[1]);
            _exit(0);
        }
        hear(pair[0]);
        if (round) {
            socketpair(AF_UNIX, SOCK_STREAM, 0, its);
            other = fork();
            if (!other)
                neighbour(its[1], round == 2);
            hear(its[0]);
        }
        printf(" next to %s\n", NEXT_TO[round]);
        in_use("now");
        driver("lcru", job);
        if (other) {
            say(its[0], 'e');
            waitpid(other, NULL, 0);
        }
        end(job);
    }
}

static void pieces(void) {
    static const size_t SIZES[] = {2, 8, 32, 64, 128, 256, 512, 768, 1024};
    enum { COUNT = sizeof SIZES / sizeof *SIZES };
    int pair[2];
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    int owner = fork();
    if (!owner) {
        CUmemGenericAllocationHandle handles[COUNT];
        CUdeviceptr at[COUNT];
        init();
        for (unsigned nth = 0; nth < COUNT; nth++) {
            if (p_cuMemCreate(&handles[nth], SIZES[nth] * MIB, &DEVICE, 0))
                exit(3);
            at[nth] = mapped(handles[nth], SIZES[nth] * MIB);
            p_cuMemsetD32_v2(at[nth], nth, SIZES[nth] * MIB / 4);
        }
        p_cuCtxSynchronize();
        fflush(stdout);
        say(pair[1], 'k');
        hear(pair[1]);
        for (unsigned nth = 0; nth < COUNT; nth++) {
            int descriptor = -1;
            unsigned word = 99;
            CUresult result = exported(&descriptor, handles[nth]);
            p_cuMemcpyDtoH_v2(&word, at[nth] + 4096, sizeof word);
            printf("  %zu MiB: %s, %s\n", SIZES[nth], name(result),
                   word == nth ? "its bytes" : "other bytes");
        }
        fflush(stdout);
        _exit(0);
    }
    hear(pair[0]);
    if (driver("lcru", owner))
        say(pair[0], 'e');
    else
        kill(owner, SIGKILL);
    waitpid(owner, NULL, 0);
}

int main(int count, char **words) {
    signal(SIGPIPE, SIG_IGN);
    for (int nth = 1; nth < count; nth++) {
        const char *word = words[nth];
        printf("== %s\n", word);
        fflush(stdout);
        if (!strcmp(word, "made"))
            made();
        else if (!strcmp(word, "events"))
            events();
        else if (!strcmp(word, "context"))
            context();
        else if (!strcmp(word, "pieces"))
            pieces();
        else {
            printf("no such question\n");
            return 2;
        }
    }
    return 0;
}
