#include "packed_matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

#include "half.h"
#include "thread_pool.h"

namespace foreword {

namespace {

constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kStretch = size_t{32} << 20;
constexpr size_t kCacheLine = 64;
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
        case Form::F32:
        case Form::Factor: break;
    }
    return 0;
}

Memory::Memory(size_t bytes, bool large_pages) : mapped_(bytes + kLargePage), size_(bytes) {
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(base_) + kLargePage - 1) / kLargePage * kLargePage;
    data_ = reinterpret_cast<uint8_t*>(aligned);
#ifdef MADV_HUGEPAGE
    if (large_pages && bytes >= kLargePage) madvise(data_, bytes / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() { munmap(base_, mapped_); }

Arena::Part Arena::take(size_t bytes) {
    const size_t size = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stretch_ || stretch_->size() - used_ < size) {
        stretch_ = std::make_shared<Memory>(size > kStretch ? size : kStretch, true);
        used_ = 0;
    }
    uint8_t* data = stretch_->data() + used_;
    used_ += size;
    return {stretch_, data, size};
}

PackedMatrix::PackedMatrix(Arena& arena, Form form, int64_t rows, int64_t cols, Grouping grouping)
    : view_{form, rows, cols, grouping, (cols + grouping.group - 1) / grouping.group, 0, nullptr},
      block_bytes_(form == Form::Factor ? kFactorHeader + kPanelRows * factor_columns_of(cols) : block_size(form, grouping.group)),
      memory_(arena.take(static_cast<size_t>(panels() * view_.groups * block_bytes_ + kStreamSlack))) {
    view_.panel_bytes = view_.groups * block_bytes_;
    view_.data = memory_.data;
}

void PackedMatrix::set_bias(const float* values, int64_t count) {
    if (count != view_.rows) throw std::invalid_argument("a bias must have one value per output row");
    bias_.assign(values, values + count);
}

uint8_t* PackedMatrix::block(int64_t row, int64_t group) const {
    return memory_.data + row / kPanelRows * view_.panel_bytes + group * block_bytes_;
}

// Every form keeps runs of four bytes together: a row's run k goes to place (k * 8 + lane).
void PackedMatrix::interleave(int64_t row, int64_t group, const uint8_t* header, const uint8_t* weights) {
    uint8_t* target = block(row, group);
    const int64_t lane = row % kPanelRows, fields = header_bytes(view_.form) / 16;
    for (int64_t field = 0; field < fields; ++field) {
        std::memcpy(target + 16 * field + kHalfBytes * lane, header + kHalfBytes * field, kHalfBytes);
    }
    target += 16 * fields + 4 * lane;
    const int64_t runs = (block_bytes_ - 16 * fields) / (4 * kPanelRows);
    for (int64_t run = 0; run < runs; ++run) std::memcpy(target + run * 4 * kPanelRows, weights + run * 4, 4);
}

std::shared_ptr<PackedMatrix> PackedMatrix::keep_blocks(Arena& arena, Form form, const uint8_t* blocks, int64_t rows, int64_t cols) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(arena, form, rows, cols, {kBlock, false}));
    const int64_t groups = matrix->view_.groups, bytes = gguf_block_bytes(form);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t g = 0; g < groups; ++g) {
            const uint8_t* source = blocks + (row * groups + g) * bytes;
            matrix->interleave(row, g, source, source + header_bytes(form) / 16 * kHalfBytes);
        }
    }
    return matrix;
}

std::shared_ptr<PackedMatrix> PackedMatrix::keep_floats(Arena& arena, const float* values, int64_t rows, int64_t cols) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(arena, Form::F32, rows, cols, {1, false}));
    for (int64_t row = 0; row < rows; ++row) {
        float* panel = reinterpret_cast<float*>(matrix->block(row, 0)) + row % kPanelRows;
        for (int64_t c = 0; c < cols; ++c) panel[c * kPanelRows] = values[row * cols + c];
    }
    return matrix;
}

std::shared_ptr<PackedMatrix> PackedMatrix::round_factor(Arena& arena, const float* values, int64_t rows, int64_t cols) {
    const Grouping grouping{(cols + kBlock - 1) / kBlock * kBlock, false};
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(arena, Form::Factor, rows, cols, grouping));
    for (int64_t row = 0; row < rows; ++row) {
        const float* source = values + row * cols;
        float top = 0.0f;
        for (int64_t c = 0; c < cols; ++c) top = std::max(top, std::fabs(source[c]));
        uint8_t* panel = matrix->block(row, 0);
        const int64_t lane = row % kPanelRows;
        const float scale = top / 127.0f, inverse = top > 0.0f ? 127.0f / top : 0.0f;
        std::memcpy(panel + lane * 4, &scale, 4);
        int8_t* weights = reinterpret_cast<int8_t*>(panel) + kFactorHeader + 4 * lane;
        for (int64_t c = 0; c < cols; ++c) weights[c / 4 * 4 * kPanelRows + c % 4] = static_cast<int8_t>(std::nearbyint(source[c] * inverse));
    }
    return matrix;
}

void PackedMatrix::round_stretch(const FillRow& fill, const KernelTable& kernels, int64_t begin, int64_t end) {
    const int64_t groups = view_.groups, group = view_.grouping.group;
    std::vector<float> values(static_cast<size_t>(view_.cols)), scale(static_cast<size_t>(groups)), sum(scale.size());
    std::vector<int8_t> q(static_cast<size_t>(groups * group));
    for (int64_t row = begin; row < end; ++row) {
        fill(row, values.data());
        kernels.quantize(values.data(), view_.cols, view_.grouping, q.data(), scale.data(), sum.data());
        for (int64_t g = 0; g < groups; ++g) {
            const uint16_t header[2] = {float_to_half(scale[static_cast<size_t>(g)]), 0};
            const uint8_t* weights = reinterpret_cast<const uint8_t*>(q.data() + g * group);
            interleave(row, g, reinterpret_cast<const uint8_t*>(header), weights);
        }
    }
}

std::shared_ptr<PackedMatrix> PackedMatrix::rounded(Arena& arena, int64_t rows, int64_t cols, Grouping grouping) {
    return std::shared_ptr<PackedMatrix>(new PackedMatrix(arena, Form::Q8, rows, cols, grouping));
}

// Threads take whole panels, so that no two write to the same block.
void PackedMatrix::round_rows(const FillRow& fill, int64_t first, int64_t count, const KernelTable& kernels, int threads) {
    const int64_t panels = (count + kPanelRows - 1) / kPanelRows;
    ThreadPool(threads).run([&](int thread) {
        const int64_t begin = panels * thread / threads * kPanelRows, end = panels * (thread + 1) / threads * kPanelRows;
        round_stretch(fill, kernels, first + begin, first + std::min(end, count));
    });
}

void expand_blocks(Form form, const uint8_t* blocks, int64_t cols, float* out) {
    const int64_t header = header_bytes(form) / 16 * kHalfBytes;
    for (int64_t begin = 0; begin < cols; begin += kBlock, blocks += gguf_block_bytes(form), out += kBlock) {
        uint16_t fields[2] = {0, 0};
        std::memcpy(fields, blocks, static_cast<size_t>(header));
        const float scale = half_to_float(fields[0]);
        const float minimum = form == Form::Q4_0 ? -8.0f * scale : half_to_float(fields[1]);
        const uint8_t* weights = blocks + header;
        if (form == Form::Q8) {
            for (int64_t c = 0; c < kBlock; ++c) out[c] = scale * static_cast<float>(static_cast<int8_t>(weights[c]));
            continue;
        }
        for (int64_t c = 0; c < kBlock / 2; ++c) {
            out[c] = scale * static_cast<float>(weights[c] & 15) + minimum;
            out[c + kBlock / 2] = scale * static_cast<float>(weights[c] >> 4) + minimum;
        }
    }
}

}  // namespace foreword
