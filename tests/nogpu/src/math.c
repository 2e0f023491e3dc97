// What the default "succeeds and does nothing" would get wrong in cuBLAS, cuDNN and others: handles and numbers to fill.
#include <stdlib.h>
#include <string.h>
#include "nogpu.h"
#ifdef LIB_cublas
int cublasCreate_v2(void **h) { *h = calloc(1, 64); return 0; }
int cublasGetMathMode(void *h, int *m) { *m = ((int *)h)[1]; return 0; }
int cublasSetMathMode(void *h, int m) { ((int *)h)[1] = m; return 0; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = ((int *)h)[2]; return 0; }
int cublasSetPointerMode_v2(void *h, int m) { ((int *)h)[2] = m; return 0; }
int cublasSetStream_v2(void *h, void *s) { ((void **)h)[2] = s; return 0; }
#endif
#ifdef LIB_cublasLt
size_t cublasLtGetVersion(void) { return 130002; }
int cublasLtMatmulDescCreate(void **d, int c, int s) { *d = calloc(1, 512); return 0; }
int cublasLtMatmulDescDestroy(void *d) { free(d); return 0; }
int cublasLtMatrixLayoutCreate(void **d) { *d = calloc(1, 256); return 0; }
int cublasLtMatrixLayoutDestroy(void *d) { free(d); return 0; }
int cublasLtMatmulPreferenceCreate(void **d) { *d = calloc(1, 256); return 0; }
int cublasLtMatmulPreferenceDestroy(void *d) { free(d); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int asked,
                                   void *results, int *found) {
  memset(results, 0, 96 * asked); *found = asked > 0; return 0;
}
int cublasLtMatmul(void) { nogpu_count("matmul", "cublasLtMatmul"); return 0; }
#endif
#ifdef LIB_cudnn
// NOGPU_CUDNN=91002: the cuDNN 9.10.2 that an LD_LIBRARY_PATH may bring; 9.19.0 is what torch 2.11 was built with
size_t cudnnGetVersion(void) { const char *given = getenv("NOGPU_CUDNN"); return given ? atol(given) : 91900; }
int cudnnGetProperty(int part, int *value) {
  size_t version = cudnnGetVersion();
  *value = part == 0 ? version / 10000 : part == 1 ? version / 100 % 100 : version % 100;
  return 0;
}
int cudnnCreate(void **h) { *h = calloc(1, 64); return 0; }
int cudnnSetStream(void *h, void *s) { ((void **)h)[1] = s; return 0; }
int cudnnGetStream(void *h, void **s) { *s = ((void **)h)[1]; return 0; }
const char *cudnnGetErrorString(int e) { return "a GPU that is not there has no cuDNN graphs"; }
void cudnnGetLastErrorString(char *b, size_t n) { strncpy(b, "a GPU that is not there has no cuDNN graphs", n); }
// the graph API: every descriptor is made, every query finds one answer, plans need no workspace
int cudnnBackendCreateDescriptor(int t, void **d) { *d = calloc(1, 64); return 0; }
int cudnnBackendDestroyDescriptor(void *d) { free(d); return 0; }
int cudnnBackendGetAttribute(void *d, int name, int type, long asked, long *found, void *out) {
  enum { INT64 = 3, DESCRIPTOR = 15 }; if (found) *found = 1;
  if (out && asked > 0 && type != DESCRIPTOR) memset(out, 0, type == INT64 ? 8 : 4); return 0;
}
int cudnnBackendExecute(void *h, void *p, void *v) { nogpu_count("attention", "cudnn"); return 0; }
#endif
