// AMX: products of up to 32 tokens with four panels. A tile register holds the sums of 16 outputs for up to 16 tokens, and one
// instruction adds the products of up to 64 columns. The integer sums are exact, and floats are added as in wide_avx512.h, group by
// group, so all bits equal those of avx512-vnni.
#pragma once

#include "../types.h"
#include "wide_avx512.h"

namespace {

using namespace foreword;

constexpr int64_t kTileRows = 16;                // most rows of a tile register
constexpr int64_t kPairOutputs = 2 * kPanelRows;
constexpr int64_t kTileOutputs = 2 * kPairOutputs;   // of four panels

// Columns of a group, of which one instruction multiplies `Step`.
template <int Step, int Steps>
struct GroupShape {
    static constexpr int kStep = Step, kSteps = Steps;
    static constexpr int64_t kColumns = int64_t{Step} * Steps;
    static constexpr int64_t kWeightBytes = kWideHeader + kColumns * kPairOutputs;   // of a pair of panels, unpacked
};

// What LDTILECFG loads.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tile registers: sums [tokens][pair], levels of tokens [2], levels of weights [pair].
constexpr int kSumTile = 0, kLevelTile = 4, kWeightTile = 6;

// Prepares tiles of `first_rows` and of `second_rows` tokens (0: none).
inline void configure_tiles(int64_t first_rows, int64_t second_rows, int step) {
    TileConfig config;
    const auto set = [&](int tile, int64_t rows, int64_t bytes) {
        if (rows > 0) config.rows[tile] = static_cast<uint8_t>(rows), config.row_bytes[tile] = static_cast<uint16_t>(bytes);
    };
    for (int i = 0; i < 2; ++i) {
        const int64_t rows = i == 0 ? first_rows : second_rows;
        set(kSumTile + 2 * i, rows, kWideVector), set(kSumTile + 2 * i + 1, rows, kWideVector);
        set(kLevelTile + i, rows, step);
        set(kWeightTile + i, step / 4, kWideVector);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

// gcc's intrinsics take only literal register numbers. A load does not tell the compiler that it reads memory: nothing that it
// reads is written in the same function.
template <int Tile>
FOREWORD_INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile));
}
template <int Tile>
FOREWORD_INLINE void store_tile(int32_t* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(kWideVector), "i"(Tile) : "memory");
}
template <int Tile>
FOREWORD_INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tokens, int Pair>
FOREWORD_INLINE void multiply_tiles() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSumTile + 2 * Tokens + Pair), "i"(kLevelTile + Tokens), "i"(kWeightTile + Pair));
}

// Tokens in parts of equally many, up to 32, of which the last two may overlap. `q`, `scale` and `sum` begin at the first group of
// a chunk.
struct TokenParts {
    const int8_t* q;
    const float *scale, *sum;
    int64_t stride, groups;    // levels and groups of a token
    int64_t tokens, rows;      // all tokens, tokens of a part
    int64_t first_of(int64_t part) const { return part * rows < tokens - rows ? part * rows : tokens - rows; }
    int64_t count() const { return (tokens + rows - 1) / rows; }
    int64_t tiles() const { return rows > kTileRows ? 2 : 1; }
    int64_t first_rows() const { return (rows + tiles() - 1) / tiles(); }   // tokens in the first tile of a part
};

// Integer sums of a group.
struct GroupSums {
    alignas(64) int32_t pairs[2][2 * kTileRows][kPairOutputs];   // [pair][token][output]
};

// Levels of a group: of a part's tokens, and of one or two pairs of panels.
struct GroupLevels {
    const int8_t* q;
    int64_t stride, first_rows;
    const uint8_t *left, *right;
};

// Computes the sums of a group. After every step it calls `between` with the step's number.
template <int Tiles, int Pairs, typename Shape, typename Between>
FOREWORD_INLINE void multiply_group(const GroupLevels levels, GroupSums& sums, Between between) {
    constexpr int64_t Step = Shape::kStep;
    const int8_t* second = levels.q + levels.first_rows * levels.stride;
    clear_tile<kSumTile>();
    if constexpr (Pairs == 2) clear_tile<kSumTile + 1>();
    if constexpr (Tiles == 2) clear_tile<kSumTile + 2>();
    if constexpr (Tiles == 2 && Pairs == 2) clear_tile<kSumTile + 3>();
#pragma GCC unroll 4
    for (int k = 0; k < Shape::kSteps; ++k) {
        load_tile<kWeightTile>(levels.left + k * Step * kPairOutputs, kWideVector);
        load_tile<kLevelTile>(levels.q + k * Step, levels.stride);
        multiply_tiles<0, 0>();
        if constexpr (Pairs == 2) load_tile<kWeightTile + 1>(levels.right + k * Step * kPairOutputs, kWideVector), multiply_tiles<0, 1>();
        if constexpr (Tiles == 2) load_tile<kLevelTile + 1>(second + k * Step, levels.stride), multiply_tiles<1, 0>();
        if constexpr (Tiles == 2 && Pairs == 2) multiply_tiles<1, 1>();
        between(k);
    }
    store_tile<kSumTile>(sums.pairs[0][0]);
    if constexpr (Pairs == 2) store_tile<kSumTile + 1>(sums.pairs[1][0]);
    if constexpr (Tiles == 2) store_tile<kSumTile + 2>(sums.pairs[0][levels.first_rows]);
    if constexpr (Tiles == 2 && Pairs == 2) store_tile<kSumTile + 3>(sums.pairs[1][levels.first_rows]);
}

// A group whose sums were computed and are not yet added to the outputs [token, 32].
struct PendingGroup {
    const float *scale, *sum;         // of the first token
    const uint8_t *left, *right;      // headers of the weights
    float* out;
};

// Adds a group's sums to the outputs of the tokens [begin, end), in the order of run_wide_tile.
template <int Pairs, bool HasMin>
FOREWORD_INLINE void add_group(const PendingGroup group, int64_t groups, int64_t begin, int64_t end, const GroupSums& sums) {
    const uint8_t* const headers[2] = {group.left, group.right};
    __m512 scales[Pairs], minima[Pairs];
#pragma GCC unroll 2
    for (int p = 0; p < Pairs; ++p) {
        scales[p] = _mm512_loadu_ps(headers[p]);
        minima[p] = HasMin ? _mm512_loadu_ps(headers[p] + kWideHeader / 2) : _mm512_setzero_ps();
    }
#pragma GCC unroll 4
    for (int64_t t = begin; t < end; ++t) {
        const __m512 token_scale = _mm512_set1_ps(group.scale[t * groups]);
        const __m512 token_sum = _mm512_set1_ps(HasMin ? group.sum[t * groups] : 0.0f);
#pragma GCC unroll 2
        for (int p = 0; p < Pairs; ++p) {
            float* out = group.out + t * kTileOutputs + p * kPairOutputs;
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.pairs[p][t]));
            __m512 total = _mm512_fmadd_ps(sum, _mm512_mul_ps(scales[p], token_scale), _mm512_loadu_ps(out));
            if constexpr (HasMin) total = _mm512_fmadd_ps(minima[p], token_sum, total);
            _mm512_storeu_ps(out, total);
        }
    }
}

// The same chunk of the next panels, which is fetched while this one is multiplied. After the last panel it is whatever follows the
// matrix in memory, usually the next matrix.
struct FetchAhead {
    const uint8_t* panels[4];
    int64_t bytes;   // of each panel
    int count;       // of panels
    FOREWORD_INLINE void fetch(int64_t part, int64_t parts) const {
        for (int64_t at = bytes * part / parts; at < bytes * (part + 1) / parts; at += kCacheLine) {
            for (int i = 0; i < count; ++i) __builtin_prefetch(panels[i] + at);
        }
    }
};

// Adds the products of a chunk of `groups` groups to the outputs [token, 32]. `left` and `right` have the unpacked groups of one or
// two pairs. The sums of a group are added while the next group is multiplied.
template <int Tiles, int Pairs, typename Shape, bool HasMin>
__attribute__((noinline)) void run_chunk(const TokenParts parts, const uint8_t* left, const uint8_t* right, int64_t groups, const FetchAhead ahead, float* out) {
    constexpr int Steps = Shape::kSteps;
    GroupSums sums[2];
    PendingGroup pending{};
    int64_t index = 0;   // of the group among those of all parts
    const auto add_step = [&](int64_t step) FOREWORD_INLINE_LAMBDA {
        if (index < groups) ahead.fetch(index * Steps + step, groups * Steps);
        if (index == 0) return;
        add_group<Pairs, HasMin>(pending, parts.groups, parts.rows * step / Steps, parts.rows * (step + 1) / Steps, sums[(index - 1) % 2]);
    };
    for (int64_t part = 0; part < parts.count(); ++part) {
        const int64_t first = parts.first_of(part);
        for (int64_t g = 0; g < groups; ++g, ++index) {
            const int64_t at = g * Shape::kWeightBytes;
            const GroupLevels levels{parts.q + first * parts.stride + g * Shape::kColumns, parts.stride, parts.first_rows(),
                                     left + at + kWideHeader, right + at + kWideHeader};
            multiply_group<Tiles, Pairs, Shape>(levels, sums[index % 2], add_step);
            const int64_t factor = first * parts.groups + g;
            pending = {parts.scale + factor, parts.sum + factor, left + at, right + at, out + part * parts.rows * kTileOutputs};
        }
    }
    for (int step = 0; step < Steps; ++step) add_step(step);
}

}  // namespace
