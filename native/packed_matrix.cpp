#include "packed_matrix.h"

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <new>

#include "half.h"

namespace foreword {

namespace {

constexpr size_t kLargePage = size_t{2} << 20;
constexpr int64_t kHalfBytes = 2;

int64_t header_bytes(Form form) { return form == Form::Q4_1 ? 32 : 16; }

int64_t block_size(Form form, int64_t group) {
    if (form == Form::F32) return kPanelRows * static_cast<int64_t>(sizeof(float)) * group;
    return header_bytes(form) + kPanelRows * group / (form == Form::Q8 ? 1 : 2);
}

}  // namespace

int64_t gguf_block_bytes(Form form) {
    switch (form) {
        case Form::Q8: return 34;
        case Form::Q4_0: return 18;
        case Form::Q4_1: return 20;
        case Form::F32: break;
    }
    return 0;
}

Memory::Memory(size_t bytes) : mapped_(bytes + kLargePage), size_(bytes) {
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(base_) + kLargePage - 1) / kLargePage * kLargePage;
    data_ = reinterpret_cast<uint8_t*>(aligned);
#ifdef MADV_HUGEPAGE
    if (bytes >= kLargePage) madvise(data_, bytes / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() { munmap(base_, mapped_); }

PackedMatrix::PackedMatrix(Form form, int64_t rows, int64_t cols, int64_t group)
    : view_{form, rows, cols, group, (cols + group - 1) / group, 0, nullptr},
      block_bytes_(block_size(form, group)),
      memory_(static_cast<size_t>(panels() * view_.groups * block_bytes_ + kStreamSlack)) {
    view_.panel_bytes = view_.groups * block_bytes_;
    view_.data = memory_.data();
}

uint8_t* PackedMatrix::block(int64_t row, int64_t group) const {
    return memory_.data() + row / kPanelRows * view_.panel_bytes + group * block_bytes_;
}

// Both layouts keep runs of four bytes together: a row's run k goes to place (k * 8 + lane).
void PackedMatrix::pack_block(int64_t row, int64_t group, const uint8_t* source) {
    uint8_t* target = block(row, group);
    const int64_t lane = row % kPanelRows, header = header_bytes(view_.form);
    for (int64_t field = 0; field < header / 16; ++field, source += kHalfBytes) {
        std::memcpy(target + 16 * field + kHalfBytes * lane, source, kHalfBytes);
    }
    const int64_t runs = (block_bytes_ - header) / (4 * kPanelRows);
    for (int64_t run = 0; run < runs; ++run) {
        std::memcpy(target + header + (run * kPanelRows + lane) * 4, source + run * 4, 4);
    }
}

void PackedMatrix::quantize_block(int64_t row, int64_t group, const float* values, int64_t count) {
    float largest = 0.0f;
    for (int64_t i = 0; i < count; ++i) largest = std::fmax(largest, std::fabs(values[i]));
    uint8_t* target = block(row, group);
    const int64_t lane = row % kPanelRows;
    const uint16_t scale = float_to_half(largest / 127.0f);
    const float step = half_to_float(scale);
    std::memcpy(target + kHalfBytes * lane, &scale, kHalfBytes);
    for (int64_t i = 0; i < count; ++i) {
        const float level = step > 0.0f ? std::nearbyint(values[i] / step) : 0.0f;
        const int8_t q = static_cast<int8_t>(std::fmax(-127.0f, std::fmin(127.0f, level)));
        target[16 + (i / 4 * kPanelRows + lane) * 4 + i % 4] = static_cast<uint8_t>(q);
    }
}

std::shared_ptr<PackedMatrix> PackedMatrix::from_blocks(Form form, const uint8_t* blocks, int64_t rows,
                                                        int64_t cols) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(form, rows, cols, kGroup));
    const int64_t groups = matrix->view_.groups, bytes = gguf_block_bytes(form);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t g = 0; g < groups; ++g) matrix->pack_block(row, g, blocks + (row * groups + g) * bytes);
    }
    return matrix;
}

std::shared_ptr<PackedMatrix> PackedMatrix::from_floats(const float* values, int64_t rows, int64_t cols) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(Form::F32, rows, cols, 1));
    for (int64_t row = 0; row < rows; ++row) {
        float* panel = reinterpret_cast<float*>(matrix->block(row, 0)) + row % kPanelRows;
        for (int64_t c = 0; c < cols; ++c) panel[c * kPanelRows] = values[row * cols + c];
    }
    return matrix;
}

std::shared_ptr<PackedMatrix> PackedMatrix::quantized(const float* values, int64_t rows, int64_t cols,
                                                      int64_t group) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(Form::Q8, rows, cols, group));
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t g = 0; g < matrix->view_.groups; ++g) {
            const int64_t begin = g * group, count = cols - begin < group ? cols - begin : group;
            matrix->quantize_block(row, g, values + row * cols + begin, count);
        }
    }
    return matrix;
}

}  // namespace foreword
