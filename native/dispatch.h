// Selects the kernels of an instruction set that this build has and this CPU supports.
#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace foreword {

// Returns the kernels that this CPU supports, the fastest first; the last are always the portable ones.
const std::vector<const KernelTable*>& supported_kernels();

// Returns the kernels with this name; throws std::invalid_argument if it is unknown or the CPU does not support them.
const KernelTable& kernels_named(const std::string& name);

}  // namespace foreword
