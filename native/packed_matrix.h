// A weight matrix, packed at load into the panels that the kernels read (MatrixView).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "gguf_blocks.h"
#include "types.h"

namespace foreword {

// Zeroed memory, whose pages become resident when they are first written. With `large_pages` it asks for pages of 2 MiB.
class Memory {
public:
    Memory(size_t bytes, bool large_pages);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

private:
    void* base_ = nullptr;
    size_t mapped_bytes_ = 0;
    uint8_t* data_ = nullptr;   // in the mapping, aligned to a large page
    size_t size_ = 0;
};

// Allocates matrices in shared blocks of memory with large pages, for which a single matrix may be too small. In small pages, misses
// of the TLB take as much time as reading the weights. A block is freed with the last matrix in it.
class Arena {
public:
    struct Allocation {
        std::shared_ptr<Memory> owner;
        uint8_t* data;
        size_t size;
    };
    Allocation allocate(size_t bytes);

private:
    std::mutex mutex_;
    std::shared_ptr<Memory> block_;
    size_t used_ = 0;   // bytes of the block
};

class PackedMatrix {
public:
    // A float32 matrix.
    static std::shared_ptr<PackedMatrix> keep_floats(Arena& arena, const float* values, int64_t rows, int64_t cols);
    // The outer factor of an adapter, with at most kMaxRank columns, rounded to 8 bits with one scale per row.
    static std::shared_ptr<PackedMatrix> round_factor(Arena& arena, const float* values, int64_t rows, int64_t cols);
    // A matrix of GGUF blocks, whose values do not change; `cols` is a multiple of a block's columns.
    static std::shared_ptr<PackedMatrix> keep_blocks(Arena& arena, WeightFormat format, const uint8_t* blocks, int64_t rows,
                                                     int64_t cols, int threads);
    // A matrix of 8-bit weights. They are zero until `round_rows` sets them.
    static std::shared_ptr<PackedMatrix> zeros_int8(Arena& arena, int64_t rows, int64_t cols, Grouping grouping);
    // Writes row `row` of a matrix, [cols]; several threads call it.
    using FillRow = std::function<void(int64_t row, float* out)>;
    // Sets `count` rows of an 8-bit matrix from the row `first` on, which is a multiple of kPanelRows.
    void round_rows(const FillRow& fill, int64_t first, int64_t count, const KernelTable& kernels, int threads);

    const MatrixView& view() const { return view_; }
    int64_t panels() const { return (view_.rows + kPanelRows - 1) / kPanelRows; }
    size_t bytes() const { return memory_.size; }
    const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }
    void set_bias(const float* values, int64_t count);

private:
    PackedMatrix(Arena& arena, WeightFormat format, int64_t rows, int64_t cols, Grouping grouping);
    uint8_t* panel_of(int64_t row) const { return memory_.data + row / kPanelRows * view_.panel_bytes; }
    void store_group(int64_t row, int64_t g, const BlockGroup& group, const uint8_t* levels);
    // Calls `pack(begin, end)` in several threads for parts of `count` rows from the row `first` on.
    void pack_in_threads(int64_t first, int64_t count, int threads, const std::function<void(int64_t, int64_t)>& pack) const;

    MatrixView view_;
    Arena::Allocation memory_;
    std::vector<float> bias_;
};

}  // namespace foreword
