// libnccl.so.2: collectives between processes of one machine, over files in /dev/shm. Right results, no speed: a call
// returns when it is done.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "nogpu.h"
typedef void *Stream;
typedef struct { char b[128]; } Id;
// local: one process has all ranks, each with a GPU (DataParallel)
typedef struct { char name[64]; int rank, n, splits, local; long seq, *sent, *got; } Comm;
enum { OK, SYSTEM = 2, INVALID = 4 };
enum { SUM, PRODUCT, MAX, MIN, AVERAGE };
static __thread char why[300];
static int invalid(const char *what, size_t a, size_t b) {
  snprintf(why, sizeof why, "%s (%zu, %zu)", what, a, b); nogpu_say("NCCL: %s", why); return INVALID;
}
const char *ncclGetErrorString(int e) { return e ? "the stub of NCCL refused" : "no error"; }
const char *ncclGetLastError(void *c) { return why; }
int ncclGetVersion(int *v) { *v = 22809; return OK; }
int ncclGetUniqueId(Id *id) {
  static int made; memset(id, 0, sizeof *id);
  snprintf(id->b, 60, "nogpu-%s-%d-%d", getenv("NOGPU_RUN"), getpid(), made++); return OK;
}
static Comm *make(const char *name, int n, int rank) {
  Comm *c = calloc(1, sizeof *c); *c = (Comm){.n = n, .rank = rank, .sent = calloc(n, 8), .got = calloc(n, 8)};
  snprintf(c->name, sizeof c->name, "%s", name); return c;
}

// files: who sees the name finds all bytes
static void path(char *p, Comm *c, const char *kind, int a, int b, long s) {
  snprintf(p, 200, "/dev/shm/%s.%s.%d.%d.%ld", c->name, kind, a, b, s);
}
static int post(const char *p, const void *d, size_t n) {
  char t[220]; snprintf(t, sizeof t, "%s.tmp", p); FILE *f = fopen(t, "w"); if (!f) return SYSTEM;
  size_t written = fwrite(d, 1, n, f); return fclose(f) || written < n || rename(t, p) ? SYSTEM : OK;
}
static int take(const char *p, void *d, size_t n, int drop) {
  FILE *f; struct stat st;
  for (int waits = 0; !(f = fopen(p, "r")); usleep(200))
    if (++waits > 1500000) { nogpu_say("NCCL: waited five minutes for %s", p); return SYSTEM; }
  fstat(fileno(f), &st); size_t got = fread(d, 1, n, f); fclose(f); if (drop) unlink(p);
  return (size_t)st.st_size == n && got == n ? OK : invalid("ranks disagree: bytes here, and there", n, st.st_size);
}
// every rank's n bytes, in rank order: the caller frees them
static char *all(Comm *c, const void *in, size_t n, int *error) {
  char p[200], *copy = malloc(n * c->n + 1); long s = c->seq++; *error = OK;
  if (c->n == 1) { memcpy(copy, in, n); return copy; } path(p, c, "all", c->rank, 0, s); *error = post(p, in, n);
  for (int r = 0; r < c->n && !*error; r++) { path(p, c, "all", r, 0, s); *error = take(p, copy + r * n, n, 0); }
  path(p, c, "all", c->rank, 0, s - 1);  // all have come to this round, and so have read the one before
  unlink(p); return copy;
}

#define TYPES(X) X(0, int8_t) X(1, uint8_t) X(2, int32_t) X(3, uint32_t) X(4, int64_t) X(5, uint64_t) X(6, _Float16) \
  X(7, float) X(8, double)
enum { FLOAT = 7, BF16 = 9 };
static size_t width(int t) { static const size_t w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return w[t]; }
static double get(const void *p, int t, size_t i) {
#define X(number, type) if (t == number) return ((type *)p)[i];
  TYPES(X)
#undef X
  uint32_t u = (uint32_t)((uint16_t *)p)[i] << 16; float f; memcpy(&f, &u, 4); return f;
}
static void set(void *p, int t, size_t i, double v) {
#define X(number, type) if (t == number) { ((type *)p)[i] = v; return; }
  TYPES(X)
#undef X
  float f = v; uint32_t u; memcpy(&u, &f, 4); ((uint16_t *)p)[i] = (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static int reduce(void *out, const char *in, size_t stride, size_t n, int t, int op, int ranks) {
  if (t > BF16 || op > AVERAGE) return invalid("no such reduction: type, operation", t, op);
  for (size_t i = 0; i < n; i++) {
    double v = 0;
    for (int r = 0; r < ranks; r++) {
      double x = get(in + r * stride, t, i);
      v = !r ? x : op == PRODUCT ? v * x : op == MAX ? (x > v ? x : v) : op == MIN ? (x < v ? x : v)
          : t == FLOAT ? (float)(v + x) : v + x;
    }
    set(out, t, i, op == AVERAGE ? v / ranks : v);
  }
  return OK;
}
static int check(const void *a, const void *b, size_t n, const char *name) {
  const void *both[] = {a, b}; int kind = 0; nogpu_count("nccl", name);
  for (int i = 0; i < 2; i++)
    if (n && both[i] && (!nogpu_resolve(both[i], &kind, 0, 0) || kind != DEVICE)) {
      nogpu_say("NCCL: %s of what is not on a GPU", name); return INVALID;
    }
  return OK;
}

// calls between ncclGroupStart and ncclGroupEnd are made at the end: sends first
enum { SEND, RECV, BROADCAST, REDUCE };
typedef struct { int kind; const void *in; void *out; size_t n; int peer; Comm *c; int t, op; } Call;
static __thread Call queue[1024];
static __thread int queued, group;
static int make_call(Call *q) {
  char p[200];
  if (q->kind == SEND) { path(p, q->c, "p2p", q->c->rank, q->peer, q->c->sent[q->peer]++); return post(p, q->in, q->n); }
  path(p, q->c, "p2p", q->peer, q->c->rank, q->c->got[q->peer]++); return take(p, q->out, q->n, 1);
}
static int make_local(Call *root) {  // all ranks' calls lie in the queue
  size_t bytes = root->n * width(root->t); char *parts = malloc((bytes + 1) * queued); int k = 0, e = OK;
  for (Call *q = queue; q < queue + queued; q++)
    if (q->kind == BROADCAST) memmove(q->out, root->in, bytes);
    else if (q->kind == REDUCE) memcpy(parts + k++ * bytes, q->in, bytes);
  if (root->kind == REDUCE) e = reduce(root->out, parts, bytes, root->n, root->t, root->op, k);
  free(parts); return e;
}
int ncclGroupStart(void) { group++; return OK; }
int ncclGroupEnd(void) {
  int e = OK; if (--group) return OK;
  for (int kind = SEND; kind <= REDUCE; kind++)
    for (Call *q = queue; q < queue + queued && !e; q++)
      if (q->kind == kind && kind <= RECV) e = make_call(q);
      else if (q->kind == kind && q->c->rank == q->peer) e = make_local(q);
  queued = 0; return e;
}
static int add(Call call) { if (!group && call.kind <= RECV) return make_call(&call); queue[queued++] = call; return OK; }
int ncclSend(const void *in, size_t n, int t, int peer, Comm *c, Stream s) {
  return check(in, 0, n, "send") ?: add((Call){SEND, in, 0, n * width(t), peer, c});
}
int ncclRecv(void *out, size_t n, int t, int peer, Comm *c, Stream s) {
  return check(out, 0, n, "recv") ?: add((Call){RECV, 0, out, n * width(t), peer, c});
}
// of what all ranks gave: n elements of each rank from `first` on, reduced
static int reduced(Comm *c, const void *in, void *out, size_t given, size_t first, size_t n, int t, int op) {
  int e; char *parts = all(c, in, given * width(t), &e);
  if (!e && out) e = reduce(out, parts + first * width(t), given * width(t), n, t, op, c->n); free(parts); return e;
}
// or copied, bytes from `first` on, one part each `stride` bytes
static int copied(Comm *c, const void *in, void *out, size_t given, size_t first, size_t stride, size_t bytes, int parts) {
  int e; char *found = all(c, in, given, &e);
  for (int r = 0; r < parts && !e; r++) memcpy((char *)out + r * bytes, found + first + r * stride, bytes);
  free(found); return e;
}
int ncclAllReduce(const void *in, void *out, size_t n, int t, int op, Comm *c, Stream s) {
  return check(in, out, n, "all_reduce") ?: reduced(c, in, out, n, 0, n, t, op);
}
int ncclReduceScatter(const void *in, void *out, size_t n, int t, int op, Comm *c, Stream s) {
  return check(in, out, n, "reduce_scatter") ?: reduced(c, in, out, n * c->n, n * c->rank, n, t, op);
}
int ncclReduce(const void *in, void *out, size_t n, int t, int op, int root, Comm *c, Stream s) {
  out = c->rank == root ? out : 0;
  if (c->local) return check(in, out, n, "reduce") ?: add((Call){REDUCE, in, out, n, root, c, t, op});
  return check(in, out, n, "reduce") ?: reduced(c, in, out, n, 0, n, t, op);
}
int ncclBroadcast(const void *in, void *out, size_t n, int t, int root, Comm *c, Stream s) {
  size_t b = n * width(t);
  if (c->local) return check(0, out, n, "broadcast") ?: add((Call){BROADCAST, in ?: out, out, n, root, c, t});
  return check(0, out, n, "broadcast") ?: copied(c, c->rank == root ? in : out, out, b, root * b, 0, b, 1);
}
int ncclBcast(void *p, size_t n, int t, int root, Comm *c, Stream s) { return ncclBroadcast(p, p, n, t, root, c, s); }
int ncclAllGather(const void *in, void *out, size_t n, int t, Comm *c, Stream s) {
  size_t b = n * width(t); return check(in, out, n, "all_gather") ?: copied(c, in, out, b, 0, b, b, c->n);
}
int ncclAlltoAll(const void *in, void *out, size_t n, int t, Comm *c, Stream s) {
  size_t b = n * width(t);
  return check(in, out, n, "all_to_all") ?: copied(c, in, out, b * c->n, b * c->rank, b * c->n, b, c->n);
}

int ncclCommInitRankConfig(Comm **c, int n, Id id, int rank, void *config) {
  int e; nogpu_count("nccl", "communicator"); *c = make(id.b, n, rank); free(all(*c, "", 1, &e)); return e;
}
int ncclCommInitAll(Comm **c, int n, const int *d) {
  Id id; ncclGetUniqueId(&id); for (int i = 0; i < n; i++) { c[i] = make(id.b, n, i); c[i]->local = 1; } return OK;
}
int ncclCommSplit(Comm *c, int color, int key, Comm **out, void *config) {
  int mine[2] = {color, key}, rank = 0, n = 0, e; nogpu_count("nccl", "communicator (split)");
  int(*every)[2] = (void *)all(c, mine, sizeof mine, &e);
  for (int r = 0; r < c->n; r++) {
    if (every[r][0] != color) continue; n++; rank += every[r][1] < key || (every[r][1] == key && r < c->rank);
  }
  free(every); char name[64]; snprintf(name, 60, "%.44s-%d-%d", c->name, ++c->splits, color);
  *out = color < 0 ? 0 : make(name, n, rank); return e;
}
int ncclCommCount(Comm *c, int *n) { *n = c->n; return OK; }
int ncclCommUserRank(Comm *c, int *r) { *r = c->rank; return OK; }
int ncclCommGetAsyncError(Comm *c, int *e) { *e = 0; return OK; }
