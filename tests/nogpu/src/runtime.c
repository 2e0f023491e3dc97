// libcudart.so.13: copies copy, streams and events are in order at once, kernels are counted and not run.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include "nogpu.h"
typedef cudaError_t E;
enum { INVALID = 1, MEMORY = 2, CONFIGURATION = 9, CAPTURING = 900, MISPLACED = 901, OF_A_CAPTURE = 907 };
static __thread int last;
static E fail(int e, const char *what) { nogpu_say("%s refused: %d", what, e); return last = e; }

// streams, events, capture
typedef struct { long launches, copies, before; } Graph;
typedef struct { int priority; unsigned flags; int mode; unsigned long long capture; Graph *graph; } Stream;
typedef struct { unsigned flags; int recorded; double ms; unsigned long long capture; Graph *graph; } Event;
extern long nogpu_launches;
static Stream legacy;
static unsigned long long captures;
static int capturing;
static __thread int exchange_mode, own_captures;
static char over[1 << 16];  // captures that have ended, and with them those of streams that had joined
static Stream *S(cudaStream_t s) {
  Stream *x = (size_t)s < 16 ? &legacy : (Stream *)s; if (over[x->capture & 65535]) x->capture = 0;
  return x;
}
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec / 1e6; }
// what waits for the GPU, or allocates, is refused while a capture is under way, unless this thread's mode is relaxed
static int unsafe(void) {
  if (!capturing || exchange_mode == cudaStreamCaptureModeRelaxed) return 0;
  return exchange_mode == cudaStreamCaptureModeGlobal || own_captures;
}
E cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
  Stream *n = calloc(1, sizeof *n); n->flags = f; n->priority = p; *s = (void *)n; return 0;
}
E cudaStreamDestroy(cudaStream_t s) { if (S(s) != &legacy) free(s); return 0; }
E cudaStreamQuery(cudaStream_t s) { return S(s)->capture ? fail(CAPTURING, "cudaStreamQuery in a capture") : 0; }
E cudaStreamSynchronize(cudaStream_t s) {
  nogpu_count("sync", "stream");
  return S(s)->capture || unsafe() ? fail(CAPTURING, "cudaStreamSynchronize in a capture") : 0;
}
E cudaDeviceSynchronize(void) {
  nogpu_count("sync", "device"); return unsafe() ? fail(CAPTURING, "cudaDeviceSynchronize in a capture") : 0;
}
E cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
  Event *v = (void *)e; if (v->capture && !over[v->capture & 65535]) { S(s)->capture = v->capture; S(s)->graph = v->graph; } return 0;
}
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *st) { *st = S(s)->capture ? 1 : 0; return 0; }
E cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *st, unsigned long long *id, cudaGraph_t *g,
                           const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
  *st = S(s)->capture ? 1 : 0; if (id) *id = S(s)->capture; if (g) *g = (void *)S(s)->graph; if (nodes) *nodes = 0;
  if (edges) *edges = 0; if (n) *n = 0; return 0;
}
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) {
  int before = exchange_mode; exchange_mode = *m; *m = before; return 0;
}
E cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
  Stream *x = S(s); if (x == &legacy || x->capture) return fail(MISPLACED, "cudaStreamBeginCapture");
  x->capture = ++captures; x->mode = m; x->graph = calloc(1, sizeof(Graph)); x->graph->before = nogpu_launches;
  capturing += m == cudaStreamCaptureModeGlobal; own_captures++; return 0;
}
E cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  Stream *x = S(s); if (!x->capture) return fail(MISPLACED, "cudaStreamEndCapture");
  capturing -= x->mode == cudaStreamCaptureModeGlobal; own_captures--;
  x->graph->launches += nogpu_launches - x->graph->before; *g = (void *)x->graph; over[x->capture & 65535] = 1; return 0;
}
E cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { *e = malloc(8); return 0; }
E cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { nogpu_count("graph", "launch"); return 0; }
E cudaGraphDestroy(cudaGraph_t g) { free(g); return 0; }
E cudaGraphExecDestroy(cudaGraphExec_t e) { free(e); return 0; }
E cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *n, size_t *c) { *c = ((Graph *)g)->launches + ((Graph *)g)->copies; return 0; }
E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { Event *n = calloc(1, sizeof *n); n->flags = f; *e = (void *)n; return 0; }
E cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
E cudaEventDestroy(cudaEvent_t e) { free(e); return 0; }
E cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned external) {
  Event *v = (void *)e; *v = (Event){v->flags, 1, now(), external & 1 ? 0 : S(s)->capture, S(s)->graph}; return 0;
}
E cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
E cudaEventQuery(cudaEvent_t e) {
  return ((Event *)e)->capture && capturing ? fail(OF_A_CAPTURE, "cudaEventQuery of an event of a capture") : 0;
}
E cudaEventSynchronize(cudaEvent_t e) {
  nogpu_count("sync", "event");
  return ((Event *)e)->capture && capturing ? fail(OF_A_CAPTURE, "cudaEventSynchronize of an event of a capture") : 0;
}
E cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  Event *x = (void *)a, *y = (void *)b;
  if ((x->flags | y->flags) & cudaEventDisableTiming || !x->recorded || !y->recorded)
    return fail(400, "cudaEventElapsedTime of an event that is not recorded or not timed");
  *ms = y->ms > x->ms && y->ms - x->ms < 1e-3 ? 1e-3f : y->ms - x->ms; return 0;
}

// devices
E cudaGetDeviceCount(int *n) { *n = nogpu_devices(); return *n ? 0 : fail(100, "cudaGetDeviceCount"); }
E cudaGetDevice(int *d) { *d = nogpu_device(); return 0; }
E cudaSetDevice(int d) { if (d < 0 || d >= nogpu_devices()) return fail(101, "cudaSetDevice"); nogpu_set_device(d); return 0; }
E cudaGetLastError(void) { int e = last; last = 0; return e; }
E cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorString(E e) {
  return e == MEMORY ? "out of memory" : e == INVALID ? "invalid argument"
       : e == CAPTURING ? "operation not permitted when stream is capturing" : "an error of a GPU that is not there";
}
const char *cudaGetErrorName(E e) { return e == MEMORY ? "cudaErrorMemoryAllocation" : "cudaErrorNogpu"; }
E cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
E cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
E cudaDeviceCanAccessPeer(int *c, int a, int b) { *c = a != b; return 0; }
E cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = nogpu_attribute(a); return 0; }
E cudaDeviceGetPCIBusId(char *b, int l, int d) { snprintf(b, l, "0000:%02x:00.0", 0x1b + d); return 0; }
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  *p = (struct cudaDeviceProp){.name = NOGPU_NAME, .totalGlobalMem = nogpu_total(), .sharedMemPerBlock = 49152,
    .regsPerBlock = 65536, .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64},
    .maxGridSize = {2147483647, 65535, 65535}, .major = 9, .multiProcessorCount = 132, .ECCEnabled = 1,
    .pciBusID = 0x1b + d, .unifiedAddressing = 1, .memoryBusWidth = 5120, .l2CacheSize = 52428800,
    .maxThreadsPerMultiProcessor = 2048, .sharedMemPerMultiprocessor = 233472, .regsPerMultiprocessor = 65536,
    .cooperativeLaunch = 1, .sharedMemPerBlockOptin = 232448, .maxBlocksPerMultiProcessor = 32};
  memset(&p->uuid, 0x11 + d, 16); return 0;
}
E cudaGetDriverEntryPointByVersion(const char *s, void **p, unsigned v, unsigned long long f,
                                   enum cudaDriverEntryPointQueryResult *st) {
  char newer[200]; void *driver = dlopen("libcuda.so.1", RTLD_LAZY); snprintf(newer, sizeof newer, "%s_v2", s);
  *p = dlsym(driver, s) ?: dlsym(driver, newer); if (st) *st = *p ? 0 : 1; return *p ? 0 : fail(500, s);
}

// memory
E cudaMalloc(void **p, size_t n) {
  if (unsafe()) return fail(CAPTURING, "cudaMalloc in a capture"); nogpu_count("memory", "cudaMalloc");
  *p = nogpu_alloc(n, DEVICE); return *p ? 0 : (last = MEMORY);
}
E cudaFree(void *p) {
  if (unsafe() && p) return fail(CAPTURING, "cudaFree in a capture");
  return p && nogpu_free(p) ? fail(INVALID, "cudaFree") : 0;
}
E cudaHostAlloc(void **p, size_t n, unsigned f) {
  if (unsafe()) return fail(CAPTURING, "cudaHostAlloc in a capture"); *p = nogpu_alloc(n, PINNED);
  return *p ? 0 : MEMORY;
}
E cudaFreeHost(void *p) { return nogpu_free(p) ? fail(INVALID, "cudaFreeHost") : 0; }
E cudaMemGetInfo(size_t *f, size_t *t) { nogpu_memory(f, t); return 0; }
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int kind = 0, device = -2; nogpu_resolve(p, &kind, &device, 0);
  int type = kind == DEVICE ? cudaMemoryTypeDevice : kind ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  *a = (struct cudaPointerAttributes){type, device, kind ? (void *)p : 0, kind == DEVICE ? 0 : (void *)p}; return 0;
}
static int on_device(const void *p) { int k = 0; return nogpu_resolve(p, &k, 0, 0) && k == DEVICE; }
static E copy(void *d, const void *s, size_t n, int kind, cudaStream_t st, int async) {
  static const char *names[] = {"host to host", "to device", "to host", "on device", "default"};
  int to_device = kind == 1 || kind == 3, from_device = kind == 2 || kind == 3; if (!n) return 0;
  if ((to_device && !on_device(d)) || (from_device && !on_device(s))) return fail(INVALID, "a copy of another kind");
  if (!async && unsafe()) return fail(CAPTURING, "a synchronous copy in a capture");
  if (async && S(st)->capture) {
    int pageable = kind < 3 && !nogpu_resolve(kind == 1 ? s : d, 0, 0, 0); S(st)->graph->copies++;
    return pageable ? fail(CAPTURING, "a copy with pageable memory in a capture") : 0;
  }
  nogpu_count(async ? "copy async" : "copy", names[kind]); memmove(d, s, n); return 0;
}
E cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) { return copy(d, s, n, k, st, 1); }
E cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { return copy(d, s, n, k, 0, 0); }
E cudaMemcpyPeerAsync(void *d, int to, const void *s, int from, size_t n, cudaStream_t st) { return copy(d, s, n, 3, st, 1); }
E cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t st) {
  if (!n) return 0; if (!on_device(p)) return fail(INVALID, "cudaMemsetAsync");
  if (S(st)->capture) { S(st)->graph->copies++; return 0; }
  char *first = (char *)(((size_t)p + 4095) & ~4095ul), *end = (char *)(((size_t)p + n) & ~4095ul);
  if (v || end <= first) { memset(p, v, n); return 0; }
  memset(p, 0, first - (char *)p); memset(end, 0, (char *)p + n - end);
  madvise(first, end - first, MADV_DONTNEED);  // zeros that take no memory
  return 0;
}

// kernels: known by the host function's address
typedef struct { const void *f; const char *name; } Kernel;
static void *kernels;
static int by_address(const void *a, const void *b) { const void *x = ((Kernel *)a)->f, *y = ((Kernel *)b)->f; return (x > y) - (x < y); }
static const char *kernel_name(const void *f) { Kernel **k = tfind(&(Kernel){f}, &kernels, by_address); return k ? (*k)->name : "?"; }
void __cudaRegisterFunction(void **h, const char *f, char *df, const char *name) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; Kernel *k = malloc(sizeof *k); *k = (Kernel){f, name};
  pthread_mutex_lock(&lock); tsearch(k, &kernels, by_address); pthread_mutex_unlock(&lock);
}
void **__cudaRegisterFatBinary(void *p) { return malloc(64); }
char __cudaInitModule(void **h) { return 1; }
static __thread struct { dim3 g, b; size_t shared; void *s; } call[16];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared, void *s) {
  call[depth].g = g; call[depth].b = b; call[depth].shared = shared; call[depth++].s = s; return 0;
}
E __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *shared, void *s) {
  depth--; *g = call[depth].g; *b = call[depth].b; *shared = call[depth].shared; *(void **)s = call[depth].s; return 0;
}
E __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return 0; }
E cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t shared, cudaStream_t s) {
  nogpu_count("kernel", kernel_name(f)); if (S(s)->capture) S(s)->graph->launches++;
  return nogpu_launchable(kernel_name(f), g.x, g.y, g.z, b.x, b.y, b.z, shared) ? 0 : fail(CONFIGURATION, "a launch");
}
E __cudaLaunchKernel(void *f, dim3 g, dim3 b, void **a, size_t sh, cudaStream_t s) { return cudaLaunchKernel(f, g, b, a, sh, s); }
E cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
  return cudaLaunchKernel(f, c->gridDim, c->blockDim, a, c->dynamicSmemBytes, c->stream);
}
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 64, .ptxVersion = 90, .binaryVersion = 90};
  a->maxDynamicSharedSizeBytes = 232448; return 0;
}
E cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) {
  int too_large = a == cudaFuncAttributeMaxDynamicSharedMemorySize && v > 232448;
  return too_large ? fail(INVALID, "cudaFuncSetAttribute") : 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned fl) { *n = 2; return 0; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; return 0; }
