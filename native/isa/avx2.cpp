// x86 with AVX2, FMA and F16C.
#include "simd_avx2.h"
#include "table.h"

namespace foreword {
extern const KernelTable kAvx2Kernels;
const KernelTable kAvx2Kernels = make_table("avx2");
}  // namespace foreword
