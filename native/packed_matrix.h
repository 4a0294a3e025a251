// A weight matrix, packed once at load into the panels that the kernels stream.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "gguf_blocks.h"
#include "types.h"

namespace foreword {

// Zeroed memory that takes no room before it is touched; in large pages, where the system has them, if wanted.
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
    size_t mapped_ = 0;
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Hands out parts of large stretches of memory: a matrix by itself may be too small for large pages, and walking
// through many small pages costs as much as the weights. A stretch lives as long as anything in it.
class Arena {
public:
    struct Part {
        std::shared_ptr<Memory> owner;
        uint8_t* data;
        size_t size;
    };
    Part take(size_t bytes);

private:
    std::mutex mutex_;
    std::shared_ptr<Memory> stretch_;
    size_t used_ = 0;
};

class PackedMatrix {
public:
    // Floats kept as they are.
    static std::shared_ptr<PackedMatrix> keep_floats(Arena& arena, const float* values, int64_t rows, int64_t cols);
    // An adapter's outer factor, of at most 128 columns, rounded to 8 bits with one scale per row.
    static std::shared_ptr<PackedMatrix> round_factor(Arena& arena, const float* values, int64_t rows, int64_t cols);
    // GGUF blocks kept as they are; cols is a multiple of a block's.
    static std::shared_ptr<PackedMatrix> keep_blocks(Arena& arena, Form form, const uint8_t* blocks, int64_t rows,
                                                     int64_t cols, int threads);
    // A matrix of 8-bit weights, all zero until its rows are rounded.
    static std::shared_ptr<PackedMatrix> rounded(Arena& arena, int64_t rows, int64_t cols, Grouping grouping);
    // Round `count` rows from `first` on, a multiple of kPanelRows. `fill` writes a row of `cols` floats; several threads call it.
    using FillRow = std::function<void(int64_t row, float* out)>;
    void round_rows(const FillRow& fill, int64_t first, int64_t count, const KernelTable& kernels, int threads);

    const MatrixView& view() const { return view_; }
    int64_t panels() const { return (view_.rows + kPanelRows - 1) / kPanelRows; }
    size_t bytes() const { return memory_.size; }
    const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }
    void set_bias(const float* values, int64_t count);

private:
    PackedMatrix(Arena& arena, Form form, int64_t rows, int64_t cols, Grouping grouping);
    uint8_t* panel(int64_t row) const { return memory_.data + row / kPanelRows * view_.panel_bytes; }
    void store_group(int64_t row, int64_t g, const BlockGroup& group, const uint8_t* levels);
    void in_stretches(int64_t first, int64_t count, int threads, const std::function<void(int64_t, int64_t)>& pack) const;
    void round_stretch(const FillRow& fill, const KernelTable& kernels, int64_t begin, int64_t end);

    MatrixView view_;
    Arena::Part memory_;
    std::vector<float> bias_;
};

}  // namespace foreword
