// Plain C++, for every CPU.
#include "simd_portable.h"
#include "table.h"

namespace foreword {
extern const KernelTable kPortableKernels;
const KernelTable kPortableKernels = make_table("portable");
}  // namespace foreword
