// A weight matrix, packed once at load into the panels that the kernels stream.
#pragma once

#include <cstddef>
#include <memory>

#include "types.h"

namespace foreword {

// Zeroed memory in large pages where the system has them.
class Memory {
public:
    explicit Memory(size_t bytes);
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

class PackedMatrix {
public:
    // Blocks of GGUF's Q8_0, Q4_0 or Q4_1, `row_bytes` per row; cols is a multiple of 32.
    static std::shared_ptr<PackedMatrix> from_blocks(Form form, const uint8_t* blocks, int64_t rows, int64_t cols);
    // Floats kept as they are.
    static std::shared_ptr<PackedMatrix> from_floats(const float* values, int64_t rows, int64_t cols);
    // Floats rounded to 8 bits with one scale per `group` columns.
    static std::shared_ptr<PackedMatrix> quantized(const float* values, int64_t rows, int64_t cols, int64_t group);

    const MatrixView& view() const { return view_; }
    int64_t panels() const { return (view_.rows + kPanelRows - 1) / kPanelRows; }
    size_t bytes() const { return memory_.size(); }

private:
    PackedMatrix(Form form, int64_t rows, int64_t cols, int64_t group);
    uint8_t* block(int64_t row, int64_t group) const;
    void pack_block(int64_t row, int64_t group, const uint8_t* source);
    void quantize_block(int64_t row, int64_t group, const float* values, int64_t count);

    MatrixView view_;
    int64_t block_bytes_;
    Memory memory_;
};

// Bytes of one GGUF block of 32 weights.
int64_t gguf_block_bytes(Form form);

}  // namespace foreword
