// Which instruction sets this build has and this CPU runs.
#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace foreword {

// Tables that this CPU can run, the fastest first; the last is always the portable one.
const std::vector<const KernelTable*>& supported_kernels();

// The table of that name; throws std::invalid_argument if it is unknown or the CPU cannot run it.
const KernelTable& kernels_named(const std::string& name);

}  // namespace foreword
