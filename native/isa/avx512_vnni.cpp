// x86 with AVX-512 VL, BW and VNNI, with matrix products on 512-bit and everything else on 256-bit vectors.
#include "simd_avx2.h"
#include "table.h"

namespace foreword {
extern const KernelTable kAvx512VnniKernels;
const KernelTable kAvx512VnniKernels = make_table("avx512-vnni");
}  // namespace foreword
