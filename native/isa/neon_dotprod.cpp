// ARM NEON with the dot-product extension (ARMv8.2 and later).
#include "simd_neon.h"
#include "table.h"

namespace foreword {
extern const KernelTable kNeonDotprodKernels;
const KernelTable kNeonDotprodKernels = make_table("neon-dotprod");
}  // namespace foreword
