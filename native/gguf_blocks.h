// The blocks of GGUF files, and Q4_Z's (packed safetensors as blocks), taken apart into groups of 32 weights.
#pragma once

#include <cstdint>

#include "types.h"

namespace foreword {

// A group of 32 weights: scale * level + minimum, where a K form multiplies both numbers by a factor of the group's own.
struct BlockGroup {
    uint16_t scale, minimum;    // halves; the minimum has the sign with which it is added
    int8_t factors[2];          // of the scale, for 16 weights each
    int8_t minimum_factor;
    uint8_t levels[kBlock];     // unsigned, before the form's bias is subtracted; Q8_0: signed bytes
};

// Columns and bytes of a block.
int64_t gguf_block_columns(Form form);
int64_t gguf_block_bytes(Form form);

// Group `group` of a row of blocks.
BlockGroup read_group(Form form, const uint8_t* row, int64_t group);

// A row of blocks as floats.
void expand_blocks(Form form, const uint8_t* row, int64_t cols, float* out);

}  // namespace foreword
