#include "dispatch.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
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

#if defined(__x86_64__)
struct X86Features {
    bool avx2 = false;
    bool avx512_vnni = false;
};

constexpr bool has(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Read by cpuid itself: zig links no table for __builtin_cpu_supports into a shared library.
X86Features x86_features() {
    constexpr unsigned kAvxState = 0x06, kAvx512State = 0xe6;  // registers that the system saves, bits of XCR0
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, bit_OSXSAVE | bit_FMA | bit_F16C)) return {};
    unsigned saved = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
    X86Features found;
    found.avx2 = has(saved, kAvxState) && has(b, bit_AVX2);
    found.avx512_vnni = found.avx2 && has(saved, kAvx512State) && has(c, bit_AVX512VNNI) &&
                        has(b, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL);
    return found;
}
#endif

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
    const X86Features here = x86_features();
    if (here.avx512_vnni) found.push_back(&kAvx512VnniKernels);
    if (here.avx2) found.push_back(&kAvx2Kernels);
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
