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

// Bytes of a panel of block forms, floats or a factor.
int64_t bytes_of_panel(Form form, int64_t cols, int64_t groups, int64_t group) {
    if (form == Form::F32) return kPanelRows * static_cast<int64_t>(sizeof(float)) * cols;
    if (form == Form::Factor) return kFactorHeader + kPanelRows * factor_columns_of(cols);
    const BlockLayout layout = block_layout(form);
    return groups * (layout.header + layout.bytes * group / kBlock) + (layout.is_super ? groups / kSuperGroups * kSuperHeader : 0);
}

// Four levels, one in each byte.
uint32_t quad_at(const uint8_t* levels, int64_t quad) {
    uint32_t four;
    std::memcpy(&four, levels + 4 * quad, 4);
    return four;
}

// 32 columns of one of a panel's rows: every fourth group of four bytes is this row's (types.h has the layout).
void store_levels(int bits, const uint8_t* levels, int64_t lane, uint8_t* weights) {
    const auto put = [&](int64_t vector, uint32_t four) { std::memcpy(weights + 32 * vector + 4 * lane, &four, 4); };
    if (bits == 8) {
        for (int64_t quad = 0; quad < 8; ++quad) put(quad, quad_at(levels, quad));
        return;
    }
    uint32_t above[2] = {0, 0};
    for (int64_t j = 0; j < 4; ++j) {
        const uint32_t low = quad_at(levels, j), high = quad_at(levels, j + 4);
        put(j, (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4);
        const uint32_t of_low = low >> 4 & 0x03030303u, of_high = high >> 4 & 0x03030303u;
        above[0] |= bits == 5 ? of_low << j | of_high << (j + 4) : of_low << 2 * j;
        above[1] |= of_high << 2 * j;
    }
    for (int64_t plane = 0; plane < bits - 4; ++plane) put(4 + plane, above[plane]);
}

}  // namespace

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
    : view_{form, rows, cols, grouping, (cols + grouping.group - 1) / grouping.group, 0, nullptr} {
    view_.panel_bytes = bytes_of_panel(form, cols, view_.groups, grouping.group);
    memory_ = arena.take(static_cast<size_t>(panels() * view_.panel_bytes + kStreamSlack));
    view_.data = memory_.data;
}

void PackedMatrix::set_bias(const float* values, int64_t count) {
    if (count != view_.rows) throw std::invalid_argument("a bias must have one value per output row");
    bias_.assign(values, values + count);
}

// A group's scales and minima, and its levels, into the panel of the row.
void PackedMatrix::store_group(int64_t row, int64_t g, const BlockGroup& group, const uint8_t* levels) {
    const BlockLayout layout = block_layout(view_.form);
    const int64_t lane = row % kPanelRows, blocks = view_.grouping.group / kBlock, weights = layout.bytes * blocks;
    uint8_t* place = panel(row) + g * (layout.header + weights);
    if (layout.is_super) {
        uint8_t* header = panel(row) + g / kSuperGroups * (kSuperHeader + kSuperGroups * weights);
        uint8_t* factors = header + 32 + 16 * (g % kSuperGroups) + lane;
        place = header + kSuperHeader + g % kSuperGroups * weights;
        factors[0] = static_cast<uint8_t>(group.factors[0]);
        factors[kPanelRows] = static_cast<uint8_t>(layout.scales == 2 ? group.factors[1] : group.minimum_factor);
        std::memcpy(header + kHalfBytes * lane, &group.scale, kHalfBytes);
        std::memcpy(header + 16 + kHalfBytes * lane, &group.minimum, kHalfBytes);
    } else {
        std::memcpy(place + kHalfBytes * lane, &group.scale, kHalfBytes);
        if (layout.has_zeros) place[16 + lane] = static_cast<uint8_t>(group.minimum_factor);
        else if (layout.has_min) std::memcpy(place + 16 + kHalfBytes * lane, &group.minimum, kHalfBytes);
        place += layout.header;
    }
    for (int64_t block = 0; block < blocks; ++block) store_levels(layout.bits, levels + block * kBlock, lane, place + block * layout.bytes);
}

std::shared_ptr<PackedMatrix> PackedMatrix::keep_blocks(Arena& arena, Form form, const uint8_t* blocks, int64_t rows, int64_t cols, int threads) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(arena, form, rows, cols, {kBlock, false}));
    const int64_t row_bytes = cols / gguf_block_columns(form) * gguf_block_bytes(form);
    matrix->in_stretches(0, rows, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t g = 0; g < matrix->view_.groups; ++g) {
                const BlockGroup group = read_group(form, blocks + row * row_bytes, g);
                matrix->store_group(row, g, group, group.levels);
            }
        }
    });
    return matrix;
}

std::shared_ptr<PackedMatrix> PackedMatrix::keep_floats(Arena& arena, const float* values, int64_t rows, int64_t cols) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(arena, Form::F32, rows, cols, {1, false}));
    for (int64_t row = 0; row < rows; ++row) {
        float* panel = reinterpret_cast<float*>(matrix->panel(row)) + row % kPanelRows;
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
        uint8_t* panel = matrix->panel(row);
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
            const BlockGroup numbers{float_to_half(scale[static_cast<size_t>(g)]), 0, {1, 1}, 1, {}};
            store_group(row, g, numbers, reinterpret_cast<const uint8_t*>(q.data() + g * group));
        }
    }
}

std::shared_ptr<PackedMatrix> PackedMatrix::rounded(Arena& arena, int64_t rows, int64_t cols, Grouping grouping) {
    return std::shared_ptr<PackedMatrix>(new PackedMatrix(arena, Form::Q8, rows, cols, grouping));
}

// Threads take whole panels, so that no two write to the same block.
void PackedMatrix::in_stretches(int64_t first, int64_t count, int threads, const std::function<void(int64_t, int64_t)>& pack) const {
    const int64_t panels = (count + kPanelRows - 1) / kPanelRows;
    ThreadPool(threads).run([&](int thread) {
        const int64_t begin = panels * thread / threads * kPanelRows, end = panels * (thread + 1) / threads * kPanelRows;
        pack(first + begin, first + std::min(end, count));
    });
}

void PackedMatrix::round_rows(const FillRow& fill, int64_t first, int64_t count, const KernelTable& kernels, int threads) {
    in_stretches(first, count, threads, [&](int64_t begin, int64_t end) { round_stretch(fill, kernels, begin, end); });
}

}  // namespace foreword
