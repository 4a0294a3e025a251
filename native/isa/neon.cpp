// ARM NEON without the dot-product extension: every 64-bit ARM.
#include "simd_neon.h"
#include "table.h"

namespace foreword {
extern const KernelTable kNeonKernels;
const KernelTable kNeonKernels = make_table("neon");
}  // namespace foreword
