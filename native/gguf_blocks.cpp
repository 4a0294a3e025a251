#include "gguf_blocks.h"

#include <cstring>

#include "half.h"

namespace foreword {

namespace {

constexpr int64_t kHalfBytes = 2;

uint16_t half_at(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, kHalfBytes);
    return half;
}

// Reads a block of Q4_0, Q4_1, Q5_0, Q5_1 or Q4_Z: scale; minimum (Q4_1, Q5_1) or zero point (Q4_Z); with 5 bits the fifth
// bits in one word; 16 bytes of nibbles.
void read_small(const BlockLayout& layout, const uint8_t* block, BlockGroup& out) {
    out.scale = half_at(block);
    block += kHalfBytes;
    if (layout.has_zeros) out.minimum = out.scale, out.minimum_factor = static_cast<int8_t>(-*block++);
    else if (layout.has_min) out.minimum = half_at(block), block += kHalfBytes;
    uint32_t fifth_bits = 0;
    if (layout.bits == 5) std::memcpy(&fifth_bits, block, 4), block += 4;
    for (int c = 0; c < 16; ++c) {
        out.levels[c] = static_cast<uint8_t>((block[c] & 15) | (fifth_bits >> c & 1) << 4);
        out.levels[c + 16] = static_cast<uint8_t>(block[c] >> 4 | (fifth_bits >> (c + 16) & 1) << 4);
    }
}

// Reads group `g` of a block of Q4_K or Q5_K: scale, minimum, 12 bytes of 6-bit factors; with 5 bits the fifth bits (bit g of
// byte c is that of group g, column c); nibbles, of which 32 bytes have those of two groups.
void read_k(const BlockLayout& layout, const uint8_t* block, int64_t g, BlockGroup& out) {
    const uint8_t *factors = block + 2 * kHalfBytes, *fifth_bits = factors + 12;
    const uint8_t* nibbles = fifth_bits + (layout.bits == 5 ? 32 : 0) + g / 2 * 32;
    out.scale = half_at(block);
    out.minimum = half_at(block + kHalfBytes) ^ 0x8000u;   // the file's minimum is subtracted
    if (g < 4) {
        out.factors[0] = static_cast<int8_t>(factors[g] & 63);
        out.minimum_factor = static_cast<int8_t>(factors[g + 4] & 63);
    } else {
        out.factors[0] = static_cast<int8_t>((factors[g + 4] & 15) | factors[g - 4] >> 6 << 4);
        out.minimum_factor = static_cast<int8_t>(factors[g + 4] >> 4 | factors[g] >> 6 << 4);
    }
    for (int c = 0; c < kBlock; ++c) {
        const int nibble = g % 2 ? nibbles[c] >> 4 : nibbles[c] & 15;
        const int fifth_bit = layout.bits == 5 ? (fifth_bits[c] >> g & 1) << 4 : 0;
        out.levels[c] = static_cast<uint8_t>(nibble | fifth_bit);
    }
}

// Reads group `g` of a block of Q6_K: 128 bytes of nibbles, 64 bytes with the upper two bits, 16 factors of the scale, the
// scale. Each half of the block has 4 groups.
void read_q6_k(const uint8_t* block, int64_t g, BlockGroup& out) {
    const int64_t half = g / 4, group_in_half = g % 4;
    const uint8_t *nibbles = block + 64 * half + group_in_half % 2 * 32, *upper_bits = block + 128 + 32 * half, *factors = block + 192;
    out.scale = half_at(factors + 16);
    std::memcpy(out.factors, factors + 2 * g, 2);
    for (int c = 0; c < kBlock; ++c) {
        const int nibble = group_in_half < 2 ? nibbles[c] & 15 : nibbles[c] >> 4;
        out.levels[c] = static_cast<uint8_t>(nibble | (upper_bits[c] >> 2 * group_in_half & 3) << 4);
    }
}

}  // namespace

int64_t gguf_block_columns(WeightFormat format) { return block_layout(format).is_super ? kSuperGroups * kBlock : kBlock; }

int64_t gguf_block_bytes(WeightFormat format) {
    switch (format) {
        case WeightFormat::Q8: return 34;
        case WeightFormat::Q4_0: return 18;
        case WeightFormat::Q4_1: return 20;
        case WeightFormat::Q4_Z: return 19;
        case WeightFormat::Q5_0: return 22;
        case WeightFormat::Q5_1: return 24;
        case WeightFormat::Q4_K: return 144;
        case WeightFormat::Q5_K: return 176;
        case WeightFormat::Q6_K: return 210;
        case WeightFormat::F32:
        case WeightFormat::Factor: break;
    }
    return 0;
}

BlockGroup read_group(WeightFormat format, const uint8_t* row, int64_t group) {
    const BlockLayout layout = block_layout(format);
    const int64_t groups = gguf_block_columns(format) / kBlock;
    const uint8_t* block = row + group / groups * gguf_block_bytes(format);
    BlockGroup out{0, 0, {1, 1}, 1, {}};
    if (format == WeightFormat::Q8) {
        out.scale = half_at(block);
        std::memcpy(out.levels, block + kHalfBytes, kBlock);
    } else if (format == WeightFormat::Q6_K) {
        read_q6_k(block, group % groups, out);
    } else if (layout.is_super) {
        read_k(layout, block, group % groups, out);
    } else {
        read_small(layout, block, out);
    }
    return out;
}

void expand_blocks(WeightFormat format, const uint8_t* row, int64_t cols, float* out) {
    const BlockLayout layout = block_layout(format);
    for (int64_t g = 0; g * kBlock < cols; ++g, out += kBlock) {
        const BlockGroup group = read_group(format, row, g);
        const float minimum = half_to_float(group.minimum) * static_cast<float>(group.minimum_factor);
        for (int half = 0; half < 2; ++half) {
            const float scale = half_to_float(group.scale) * static_cast<float>(group.factors[half * (layout.scales - 1)]);
            const uint8_t* levels = group.levels + half * kBlock / 2;
            for (int64_t c = 0; c < kBlock / 2; ++c) {
                const int level = layout.bits == 8 ? static_cast<int8_t>(levels[c]) : levels[c] - layout.bias;
                out[half * kBlock / 2 + c] = scale * static_cast<float>(level) + minimum;
            }
        }
    }
}

}  // namespace foreword
