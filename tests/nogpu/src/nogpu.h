// Shared by the parts of the no-op GPU. State lives in libcuda.so.1.
#pragma once
#include <stddef.h>
enum { DEVICE = 1, PINNED };  // kinds of memory
int nogpu_devices(void);
int nogpu_device(void);                 // the calling thread's current device
void nogpu_set_device(int);
void *nogpu_alloc(size_t, int kind);    // NULL: out of memory
void *nogpu_resolve(const void *, int *kind, int *device, size_t *size);  // start of the allocation that holds it
int nogpu_free(void *);
void nogpu_memory(size_t *free_, size_t *total);
void nogpu_count(const char *what, const char *name);  // one call of what (kernel, copy ...), for NOGPU_REPORT
void nogpu_say(const char *fmt, ...);
int nogpu_default(const char *name, int answer);       // an unwritten function was called
int nogpu_attribute(int);
int nogpu_launchable(const char *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, size_t shared);
#define NOGPU_NAME "NVIDIA H100 80GB HBM3"
size_t nogpu_total(void);  // bytes of a GPU: $NOGPU_MEMORY, or those of an H100
