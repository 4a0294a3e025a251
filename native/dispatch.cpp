#include "dispatch.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(FOREWORD_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
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
#if defined(FOREWORD_HAS_AMX)
KernelTable avx512_amx_kernels();
#endif

namespace {

#if defined(__x86_64__)
struct X86Features {
    bool avx2 = false;
    bool avx512_vnni = false;
    bool amx = false;
};

constexpr bool has_bits(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Uses cpuid, because zig does not link the data of __builtin_cpu_supports into a shared library.
X86Features x86_features() {
    constexpr unsigned kAvxState = 0x06, kAvx512State = 0xe6, kTileState = 0x60000;  // bits of XCR0: registers that the operating system saves
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bits(c, bit_OSXSAVE | bit_FMA | bit_F16C)) return {};
    unsigned saved_registers = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved_registers), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
    X86Features features;
    features.avx2 = has_bits(saved_registers, kAvxState) && has_bits(b, bit_AVX2);
    features.avx512_vnni = features.avx2 && has_bits(saved_registers, kAvx512State) && has_bits(c, bit_AVX512VNNI) &&
                           has_bits(b, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL);
    constexpr unsigned kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
    features.amx = features.avx512_vnni && has_bits(saved_registers, kTileState) && has_bits(d, kAmxTile | kAmxInt8);
    return features;
}
#endif

#if defined(FOREWORD_HAS_AMX)
// Asks Linux to let this process, with all its threads and forked children, use tile registers. Returns whether it does.
bool request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;   // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<const KernelTable*> detect() {
    std::vector<const KernelTable*> tables;
#if defined(__aarch64__)
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) tables.push_back(&kNeonDotprodKernels);
#elif defined(__APPLE__)
    tables.push_back(&kNeonDotprodKernels);
#endif
    tables.push_back(&kNeonKernels);
#elif defined(__x86_64__)
    const X86Features features = x86_features();
#if defined(FOREWORD_HAS_AMX)
    static const KernelTable kAvx512AmxKernels = avx512_amx_kernels();
    if (features.amx && request_tiles()) tables.push_back(&kAvx512AmxKernels);
#endif
    if (features.avx512_vnni) tables.push_back(&kAvx512VnniKernels);
    if (features.avx2) tables.push_back(&kAvx2Kernels);
#endif
    tables.push_back(&kPortableKernels);
    return tables;
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
