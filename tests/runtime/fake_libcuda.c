/* A libcuda.so.1 without a GPU: what reaches the driver's own functions, as cuda.h declares them, is written down.

Memory is the host's; handles are numbers. Each call is a line of `fake_log`: the symbol, then its arguments. Compiled
against NVIDIA's header, so that symbols, widths and layouts are those of the driver and not those of the caller. */

#include <cuda.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char fake_log[1 << 20];
int fake_code;            /* what every function answers from now on, but for those that a test needs to look on */
int fake_pointers[4096];  /* how many pointers a kernel takes, by the number of its handle */
int fake_maps[4096];      /* and how many tensor maps behind them */

static size_t used;
static size_t next_handle = 16;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* threads call without Python's lock */

static CUresult say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&lock);
    used += vsnprintf(fake_log + used, sizeof fake_log - used, format, arguments);
    if (used > sizeof fake_log - 4096) abort();
    pthread_mutex_unlock(&lock);
    va_end(arguments);
    return (CUresult)fake_code;
}

void fake_clear(void) {
    used = 0;
    fake_log[0] = 0;
}

static void *handle(void) { return (void *)__atomic_fetch_add(&next_handle, 1, __ATOMIC_SEQ_CST); }

#define LL(x) ((unsigned long long)(x))

CUresult cuGetErrorName(CUresult error, const char **text) {
    if (error == CUDA_ERROR_OUT_OF_MEMORY) *text = "CUDA_ERROR_OUT_OF_MEMORY";
    else if (error == CUDA_ERROR_INVALID_VALUE) *text = "CUDA_ERROR_INVALID_VALUE";
    else {
        *text = NULL;
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) { return say("cuInit %u\n", flags); }
CUresult cuDriverGetVersion(int *version) { *version = 12030; return say("cuDriverGetVersion\n"); }
CUresult cuDeviceGetCount(int *count) { *count = 3; return say("cuDeviceGetCount\n"); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal + 40; return say("cuDeviceGet %d\n", ordinal); }

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    snprintf(name, size, "Fake GPU");
    return say("cuDeviceGetName %d %d\n", size, device);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
             : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT  ? 132
             : attribute == CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE          ? 50 << 20
                                                                       : 0;
    return say("cuDeviceGetAttribute %d %d\n", attribute, device);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)0x7fffdeadbeef0010;
    return say("cuDevicePrimaryCtxRetain %d\n", device);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return say("cuDevicePrimaryCtxRelease_v2 %d\n", device); }
CUresult cuCtxSynchronize(void) { return say("cuCtxSynchronize\n"); }
CUresult cuCtxSetCurrent(CUcontext context) { return say("cuCtxSetCurrent %p\n", context); }
CUresult cuCtxPushCurrent(CUcontext context) { return say("cuCtxPushCurrent_v2 %p\n", context); }
CUresult cuCtxPopCurrent(CUcontext *context) { *context = (CUcontext)0x7fffdeadbeef0010; return say("cuCtxPopCurrent_v2\n"); }

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) { *stream = handle(); return say("cuStreamCreate %u\n", flags); }
CUresult cuStreamDestroy(CUstream stream) { return say("cuStreamDestroy_v2 %p\n", stream); }
CUresult cuStreamSynchronize(CUstream stream) { return say("cuStreamSynchronize %p\n", stream); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    return say("cuStreamWaitEvent %p %p %u\n", stream, event, flags);
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) { *event = handle(); return say("cuEventCreate %u\n", flags); }
CUresult cuEventDestroy(CUevent event) { return say("cuEventDestroy_v2 %p\n", event); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return say("cuEventRecord %p %p\n", event, stream); }
CUresult cuEventSynchronize(CUevent event) { return say("cuEventSynchronize %p\n", event); }

#undef cuEventElapsedTime /* CUDA 13 maps it to a form that older drivers lack */
CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end) {
    *milliseconds = 0.75f;
    return say("cuEventElapsedTime %p %p\n", begin, end);
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = (size_t)5 << 32;
    *total = (size_t)6 << 32;
    return say("cuMemGetInfo_v2\n");
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
    void *block = NULL;
    if (!fake_code && size < (size_t)1 << 32 && posix_memalign(&block, 256, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = block ? (CUdeviceptr)block : 0xfedcba9876543200;
    return say("cuMemAlloc_v2 %zu -> %llx\n", size, LL(*address));
}

CUresult cuMemFree(CUdeviceptr address) {
    if (address != 0xfedcba9876543200) free((void *)address);
    return say("cuMemFree_v2 %llx\n", LL(address));
}

CUresult cuMemHostAlloc(void **block, size_t size, unsigned int flags) {
    *block = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return say("cuMemHostAlloc %zu %u\n", size, flags);
}

CUresult cuMemFreeHost(void *block) { free(block); return say("cuMemFreeHost\n"); }

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream stream) {
    if (size < (size_t)1 << 32) memset((void *)address, value, size);
    return say("cuMemsetD8Async %llx %u %zu %p\n", LL(address), value, size, stream);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    if (size < (size_t)1 << 32) memcpy((void *)to, from, size);
    return say("cuMemcpyHtoDAsync_v2 %llx %p %zu %p\n", LL(to), from, size, stream);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    if (size < (size_t)1 << 32) memcpy(to, (void *)from, size);
    return say("cuMemcpyDtoHAsync_v2 %p %llx %zu %p\n", to, LL(from), size, stream);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = handle();
    return say("cuModuleLoadData %02x%02x%02x%02x%02x\n", ((unsigned char *)image)[0], ((unsigned char *)image)[1],
               ((unsigned char *)image)[2], ((unsigned char *)image)[3], ((unsigned char *)image)[4]);
}

CUresult cuModuleUnload(CUmodule module) { return say("cuModuleUnload %p\n", module); }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = handle();
    return say("cuModuleGetFunction %p %s -> %p\n", module, name, *function);
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    return say("cuFuncSetAttribute %p %d %d\n", function, attribute, value);
}

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags) { *graph = handle(); return say("cuGraphCreate %u\n", flags); }
CUresult cuGraphDestroy(CUgraph graph) { return say("cuGraphDestroy %p\n", graph); }

CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *before, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS *p) {
    char text[1 << 14];
    char *at = text;
    size_t number = (size_t)p->func;
    int pointers = number < 4096 ? fake_pointers[number] : 0, maps = number < 4096 ? fake_maps[number] : 0;
    for (int n = 0; n < pointers; n++) at += sprintf(at, " %llx", *(unsigned long long *)p->kernelParams[n]);
    for (int n = 0; n < maps; n++) {
        const CUtensorMap *map = p->kernelParams[pointers + n];
        if ((size_t)map % 64) return CUDA_ERROR_INVALID_VALUE;
        for (int word = 0; word < 16; word++) at += sprintf(at, " %c%llx", word ? ',' : '[', LL(map->opaque[word]));
        at += sprintf(at, "]");
    }
    *at = 0;
    *node = handle();
    return say("cuGraphAddKernelNode_v2 %p %p %zu: %p grid %u %u %u block %u %u %u shared %u rest %p %p %p with%s -> %p\n",
               graph, before, count, p->func, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ,
               p->sharedMemBytes, p->extra, p->kern, p->ctx, text, *node);
}

CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edges,
                                   size_t count) {
    static const unsigned char zero[5];
    char *text = malloc(100 * count + 1), *at = text;
    *at = 0;
    for (const CUgraphEdgeData *e = edges; e < edges + count; e++, from++, to++)
        at += sprintf(at, " %p-%p:%u,%u,%u,%d", *from, *to, e->from_port, e->to_port, e->type, memcmp(e->reserved, zero, 5));
    CUresult result = say("cuGraphAddDependencies_v2 %p%s\n", graph, text);
    free(text);
    return result;
}

CUresult cuGraphInstantiate(CUgraphExec *executable, CUgraph graph, unsigned long long flags) {
    *executable = handle();
    return say("cuGraphInstantiateWithFlags %p %llu\n", graph, flags);
}

CUresult cuGraphUpload(CUgraphExec executable, CUstream stream) { return say("cuGraphUpload %p %p\n", executable, stream); }
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) { return say("cuGraphLaunch %p %p\n", executable, stream); }
CUresult cuGraphExecDestroy(CUgraphExec executable) { return say("cuGraphExecDestroy %p\n", executable); }

#ifndef WITHOUT_TENSOR_MAPS
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    if ((size_t)map % 64) return CUDA_ERROR_INVALID_VALUE;
    char text[512], *at = text;
    for (unsigned n = 0; n < rank; n++)
        at += sprintf(at, " %llu/%llu/%u/%u", LL(sizes[n]), n + 1 < rank ? LL(strides[n]) : 0, box[n], steps[n]);
    for (int word = 0; word < 16; word++) map->opaque[word] = 0x1000 * (size_t)address + word;
    return say("cuTensorMapEncodeTiled %d %u %p%s modes %d %d %d %d\n", type, rank, address, text, interleave, swizzle,
               promotion, fill);
}
#endif
