// Reads blocks of GGUF files, and Q4_Z blocks (made from packed safetensors), in groups of 32 weights.
#pragma once

#include <cstdint>

#include "types.h"

namespace foreword {

// A group of 32 weights. Weight = scale * factor * (level - bias) + minimum * minimum_factor, with the bias of the format
// (BlockLayout). Factors are 1 in formats without factors.
struct BlockGroup {
    uint16_t scale, minimum;    // halves
    int8_t factors[2];          // of the scale; with two scales for 16 weights each, else the first one
    int8_t minimum_factor;
    uint8_t levels[kBlock];     // unsigned; Q8_0: signed bytes
};

// Columns and bytes of a block.
int64_t gguf_block_columns(WeightFormat format);
int64_t gguf_block_bytes(WeightFormat format);

// Reads group `group` of a row of blocks.
BlockGroup read_group(WeightFormat format, const uint8_t* row, int64_t group);

// Writes a row of blocks as floats.
void expand_blocks(WeightFormat format, const uint8_t* row, int64_t cols, float* out);

}  // namespace foreword
