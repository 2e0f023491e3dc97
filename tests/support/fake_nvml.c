/* A driver library for machines without one: two GPUs joined by four NVLink lanes, or NVML_GPUS of them.
 * The real pynvml loads it as libnvidia-ml.so.1. Functions named in NVML_REFUSE (commas between) answer "not
 * supported"; the GPU NVML_LOST has fallen off the bus; GPUs from NVML_OWN on belong to other jobs; a function that is not here is "not found" to pynvml, as with an old driver. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, BROKEN = 999 };
typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem; char id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute; } Process;
typedef struct { unsigned field, scope; long long timestamp, latency; int type, result; unsigned long long value; } Field;

static int refused(const char *name) {
    const char *list = getenv("NVML_REFUSE"), *at = list ? strstr(list, name) : NULL;
    return at && (at[strlen(name)] == ',' || at[strlen(name)] == 0);
}
static long number(const char *name, long otherwise) { return getenv(name) ? atol(getenv(name)) : otherwise; }
#define ASK if (refused(__func__)) return NOT_SUPPORTED
#define CONSTANT(name, type, value) int name(void *gpu, type *out) { ASK; (void)gpu; *out = (value); return SUCCESS; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return getenv("NVML_BROKEN") ? BROKEN : SUCCESS; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *out) { ASK; *out = number("NVML_GPUS", 2); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) {
    ASK; if ((long)i >= number("NVML_GPUS", 2)) return INVALID; if ((long)i == number("NVML_LOST", -1)) return 15; if ((long)i >= number("NVML_OWN", 99)) return 4; *out = (void *)(uintptr_t)(i + 1); return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    ASK; int i = 0; if (sscanf(uuid, "GPU-%d", &i) != 1 || i < 1 || i > number("NVML_GPUS", 2)) return INVALID; *out = (void *)(uintptr_t)i; return SUCCESS;
}
int nvmlDeviceGetIndex(void *gpu, unsigned *out) { ASK; *out = (unsigned)(uintptr_t)gpu - 1; return SUCCESS; }
int nvmlDeviceGetUUID(void *gpu, char *out, unsigned size) { ASK; snprintf(out, size, "GPU-%08d", (int)(uintptr_t)gpu); return SUCCESS; }
int nvmlDeviceGetName(void *gpu, char *out, unsigned size) {
    ASK; (void)gpu; snprintf(out, size, "%s", getenv("NVML_NAME") ? getenv("NVML_NAME") : "NVIDIA H100 80GB HBM3"); return SUCCESS;
}
static void pci(int index, Pci *out) { memset(out, 0, sizeof *out); out->bus = index; snprintf(out->id, 32, "00000000:%02d:00.0", index); }
int nvmlDeviceGetPciInfo_v3(void *gpu, Pci *out) { ASK; pci((int)(uintptr_t)gpu, out); return SUCCESS; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { ASK; snprintf(out, size, "580.65.06"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *out) { ASK; *out = number("NVML_CUDA", 13000); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) { ASK; (void)gpu; *major = 9; *minor = 0; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(void *gpu, Memory *out) { ASK; (void)gpu; *out = (Memory){80ULL << 30, 70ULL << 30, 10ULL << 30}; return SUCCESS; }
int nvmlDeviceGetUtilizationRates(void *gpu, Utilization *out) { ASK; *out = (Utilization){number((uintptr_t)gpu == 1 && getenv("NVML_UTILIZATION_FIRST") ? "NVML_UTILIZATION_FIRST" : "NVML_UTILIZATION", 97), 40}; return SUCCESS; }
static unsigned power(void *gpu) {  /* NVML_MILLIWATTS_OTHER: of all but the first GPU; _LATER: of each GPU when asked again */
    static long asked[64];
    if (asked[(uintptr_t)gpu % 64]++ && getenv("NVML_MILLIWATTS_LATER")) return number("NVML_MILLIWATTS_LATER", 0);
    return number((uintptr_t)gpu != 1 && getenv("NVML_MILLIWATTS_OTHER") ? "NVML_MILLIWATTS_OTHER" : "NVML_MILLIWATTS", 612000);
}
CONSTANT(nvmlDeviceGetPowerUsage, unsigned, power(gpu))
CONSTANT(nvmlDeviceGetEnforcedPowerLimit, unsigned, 700000)
CONSTANT(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 5)
CONSTANT(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
CONSTANT(nvmlDeviceGetCurrPcieLinkWidth, unsigned, number("NVML_PCIE_WIDTH", 16))
CONSTANT(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
static unsigned long long throttle(void *gpu) {  /* NVML_THROTTLE_OTHER: every other answer about a GPU */
    static long asked[64];
    return number(asked[(uintptr_t)gpu % 64]++ % 2 && getenv("NVML_THROTTLE_OTHER") ? "NVML_THROTTLE_OTHER" : "NVML_THROTTLE", 0);
}
CONSTANT(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, throttle(gpu))
CONSTANT(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, throttle(gpu))
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *out) { ASK; (void)gpu; (void)sensor; *out = 61; return SUCCESS; }
int nvmlDeviceGetClockInfo(void *gpu, int clock, unsigned *out) { ASK; (void)gpu; *out = clock == 2 ? 2619 : 1755; return SUCCESS; }
int nvmlDeviceGetMaxClockInfo(void *gpu, int clock, unsigned *out) { ASK; (void)gpu; *out = clock == 2 ? 2619 : 1980; return SUCCESS; }
int nvmlDeviceGetPcieThroughput(void *gpu, int counter, unsigned *out) { ASK; (void)gpu; *out = counter ? 2000 : 1000; return SUCCESS; }
int nvmlDeviceGetEccMode(void *gpu, int *now, int *pending) { ASK; (void)gpu; *now = *pending = 1; return SUCCESS; }
int nvmlDeviceGetMigMode(void *gpu, unsigned *now, unsigned *pending) { ASK; (void)gpu; *now = *pending = 0; return SUCCESS; }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *out) { ASK; (void)gpu; if (link >= 4) return INVALID; *out = 1; return SUCCESS; }
int nvmlDeviceGetNvLinkVersion(void *gpu, unsigned link, unsigned *out) { ASK; (void)gpu; (void)link; *out = 6; return SUCCESS; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *gpu, unsigned link, Pci *out) { ASK; (void)link; pci(number("NVML_SWITCH", gpu == (void *)1 ? 2 : 1), out); return SUCCESS; }
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *out) { ASK; (void)a; (void)b; *out = number("NVML_TOPOLOGY", 40); return SUCCESS; }
int nvmlDeviceGetFieldValues(void *gpu, int count, Field *fields) {
    ASK;
    static long asked[64][2];  /* NVML_NVLINK_STEP: by how many KiB a lane counter has grown each time it is read */
    for (int i = 0; i < count; i++) {
        long *times = &asked[(uintptr_t)gpu % 64][fields[i].field % 2];
        fields[i].result = SUCCESS; fields[i].value = fields[i].field + number("NVML_NVLINK_STEP", 0) * (*times)++;
    }
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(void *gpu, unsigned *count, void *out) {  /* torch's, of an older form */
    (void)gpu; (void)out; *count = 0; return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, Process *out) {
    ASK; (void)gpu;
    if (!out) { *count = 1; return 7; }  /* 7: the array is too small, this is how many there are */
    *count = 1; *out = (Process){(unsigned)number("NVML_PID", getpid()), 9ULL << 30, 0xFFFFFFFF, 0xFFFFFFFF};
    return SUCCESS;
}
