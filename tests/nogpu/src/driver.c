// libcuda.so.1: the registry of memory, and what torch and Triton ask of the driver. Kernels do nothing.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "nogpu.h"
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
typedef struct { char *p; size_t n; int kind, device; } Block;
static Block *blocks;
static int nblocks, cap;
static size_t used[64];
#define UNIT (2ul << 20)  // a GPU's pages
#define DRIVERS (500ul << 20)  // what the driver takes of a GPU's memory

int nogpu_devices(void) {
  char *all = getenv("NOGPU_DEVICES"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  int n = all ? atoi(all) : 1, chosen = 1; if (!visible) return n; if (!*visible || *visible == '-') return 0;
  for (; *visible; visible++) chosen += *visible == ','; return chosen < n ? chosen : n;
}
size_t nogpu_total(void) {
  char *given = getenv("NOGPU_MEMORY");
  return given ? strtoul(given, 0, 10) : 79ul * 1024 * 1024 * 1024 + 192ul * 1024 * 1024;
}
int nogpu_device(void) { return current; }
void nogpu_set_device(int d) { current = d; }
void nogpu_say(const char *fmt, ...) {
  va_list a; va_start(a, fmt); fprintf(stderr, "nogpu: "); vfprintf(stderr, fmt, a); fputc('\n', stderr); va_end(a);
}

// NOGPU_REPORT: names and counts
typedef struct { char key[300]; long n; } Count;
static Count *counts;
void nogpu_report(void) {
  char path[4096]; if (!counts) return;
  snprintf(path, sizeof path, "%s.%d", getenv("NOGPU_REPORT"), getpid()); FILE *f = fopen(path, "w");
  if (!f) return;
  for (int i = 0; i < 65536; i++) if (counts[i].n) fprintf(f, "%8ld %s\n", counts[i].n, counts[i].key); fclose(f);
}
void nogpu_count(const char *what, const char *name) {
  static int reporting = -1;
  if (reporting < 0 && (reporting = getenv("NOGPU_REPORT") != 0)) { counts = calloc(65536, sizeof *counts); atexit(nogpu_report); }
  if (!reporting) return; char key[300]; unsigned h = 5381; snprintf(key, sizeof key, "%s %s", what, name);
  for (char *c = key; *c; c++) h = h * 33 + *c; pthread_mutex_lock(&lock);
  for (h &= 65535; counts[h].n && strcmp(counts[h].key, key);) h = (h + 1) & 65535;
  strcpy(counts[h].key, key); counts[h].n++; pthread_mutex_unlock(&lock);
}
int nogpu_default(const char *name, int answer) {
  if (strstr(name, "emm") || strstr(name, "emv")) nogpu_count("matmul", name);  // cublasGemmEx, cublasSgemm_v2 ...
  if (answer && strncmp(name, "nvml", 4)) nogpu_say("%s is not written, answers %d", name, answer); return answer;
}

// memory: the host's, taken from the system when written; blocks are in order of their addresses
static int find(const void *p) {
  int a = 0, b = nblocks;
  while (a < b) { int m = (a + b) / 2; if (blocks[m].p <= (char *)p) a = m + 1; else b = m; } return a - 1;
}
static void add(void *p, size_t n, int kind) {
  pthread_mutex_lock(&lock); int i = find(p) + 1;
  if (nblocks == cap) blocks = realloc(blocks, (cap = cap * 2 + 64) * sizeof *blocks);
  memmove(blocks + i + 1, blocks + i, (nblocks++ - i) * sizeof *blocks); blocks[i] = (Block){p, n, kind, current};
  if (kind == DEVICE) used[current] += n; pthread_mutex_unlock(&lock);
}
void *nogpu_alloc(size_t n, int kind) {
  n = n ? n : 1; if (kind == DEVICE) n = (n + UNIT - 1) / UNIT * UNIT;
  if (kind == DEVICE && used[current] + n > nogpu_total() - DRIVERS) return 0;
  void *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 0; add(p, n, kind); return p;
}
void *nogpu_resolve(const void *p, int *kind, int *device, size_t *size) {
  pthread_mutex_lock(&lock); int i = find(p);
  Block b = i >= 0 && (char *)p < blocks[i].p + blocks[i].n ? blocks[i] : (Block){0}; pthread_mutex_unlock(&lock);
  if (b.p && kind) *kind = b.kind; if (b.p && device) *device = b.device; if (b.p && size) *size = b.n; return b.p;
}
int nogpu_free(void *p) {
  pthread_mutex_lock(&lock); int i = find(p); Block b = i >= 0 && blocks[i].p == p ? blocks[i] : (Block){0};
  if (b.p) memmove(blocks + i, blocks + i + 1, (nblocks-- - i - 1) * sizeof *blocks);
  if (b.kind == DEVICE) used[b.device] -= b.n; pthread_mutex_unlock(&lock);
  if (b.p) munmap(b.p, b.n); return !b.p;
}
void nogpu_memory(size_t *f, size_t *t) { *t = nogpu_total(); *f = *t - DRIVERS - used[current]; }

static const int attributes[140] = {  // an H100's
  [1] = 1024, 1024, 1024, 64, 2147483647, 65535, 65535, 49152, 65536, 32, 2147483647, 65536, 1980000, 512, 1, 132,
  [31] = 1, 1, [36] = 2619000, 5120, 52428800, 2048, 3, 1, [75] = 9, [78] = 1, 1, 1, 233472, 65536, 1,
  [89] = 1, 1, 1, [95] = 1, [97] = 232448, [99] = 1, [102] = 1, 1, [106] = 32, [108] = 33554432, 134213632,
  [111] = 1024, [115] = 1, [120] = 1};
int nogpu_attribute(int a) { return a < 140 ? attributes[a] : 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return i < nogpu_devices() ? 0 : 101; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = nogpu_attribute(a); return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (void *)(size_t)(0x1000 + current); return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { if (c) current = (size_t)c - 0x1000; return 0; }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "an error of a GPU that is not there"; return 0; }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) {
  if (a != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return nogpu_default("cuPointerGetAttribute(other)", 1);
  *(CUdeviceptr *)out = p; return !nogpu_resolve((void *)p, 0, 0, 0);
}
// modules (Triton): a function is its name
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = malloc(1); return image ? 0 : 1; }
CUresult cuModuleLoad(CUmodule *m, const char *file) { *m = malloc(1); return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { *f = (void *)strdup(name); return 0; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = a == 0 ? 1024 : a == 4 ? 64 : 0; return 0; }
long nogpu_launches;  // of modules, so that a capture is not thought empty
int nogpu_launchable(const char *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                     size_t shared) {
  size_t threads = (size_t)bx * by * bz;
  if (gx && gy && gz && threads && gy <= 65535 && gz <= 65535 && threads <= 1024 && bz <= 64 && shared <= 232448) return 1;
  nogpu_say("launch of %.80s: grid %u %u %u, block %u %u %u, shared %zu", f, gx, gy, gz, bx, by, bz, shared);
  return 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
  nogpu_count("kernel", (char *)f); nogpu_launches++;
  return !nogpu_launchable((char *)f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                           c->sharedMemBytes);
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream s, void **p, void **e) {
  return cuLaunchKernelEx(&(CUlaunchConfig){gx, gy, gz, bx, by, bz, shared}, f, p, e);
}
