#include "dispatch.h"

#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace foreword {

extern const KernelTable kPortableKernels;
#if defined(__aarch64__)
extern const KernelTable kNeonKernels;
extern const KernelTable kNeonDotprodKernels;
#elif defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512VnniKernels;
#endif

namespace {

std::vector<const KernelTable*> detect() {
    std::vector<const KernelTable*> found;
#if defined(__aarch64__)
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back(&kNeonDotprodKernels);
#elif defined(__APPLE__)
    found.push_back(&kNeonDotprodKernels);
#endif
    found.push_back(&kNeonKernels);
#elif defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vnni")) {
        found.push_back(&kAvx512VnniKernels);
    }
    if (avx2) found.push_back(&kAvx2Kernels);
#endif
    found.push_back(&kPortableKernels);
    return found;
}

}  // namespace

const std::vector<const KernelTable*>& supported_kernels() {
    static const std::vector<const KernelTable*> tables = detect();
    return tables;
}

const KernelTable& kernels_named(const std::string& name) {
    for (const KernelTable* table : supported_kernels()) {
        if (name == table->name) return *table;
    }
    throw std::invalid_argument("this CPU or build has no instruction set named " + name);
}

}  // namespace foreword
