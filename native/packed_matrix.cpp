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

constexpr size_t kLargePage = size_t{2} << 20;     // bytes
constexpr size_t kArenaBlock = size_t{32} << 20;   // bytes
constexpr size_t kCacheLine = 64;
constexpr int64_t kHalfBytes = 2;

int64_t panel_bytes(WeightFormat format, int64_t cols, int64_t groups, int64_t group_size) {
    if (format == WeightFormat::F32) return kPanelRows * static_cast<int64_t>(sizeof(float)) * cols;
    if (format == WeightFormat::Factor) return kFactorHeader + kPanelRows * factor_columns_of(cols);
    const BlockLayout layout = block_layout(format);
    return groups * (layout.header + layout.bytes * group_size / kBlock) + (layout.is_super ? groups / kSuperGroups * kSuperHeader : 0);
}

// Returns four levels, one in each byte.
uint32_t quad_at(const uint8_t* levels, int64_t quad) {
    uint32_t four;
    std::memcpy(&four, levels + 4 * quad, 4);
    return four;
}

// Stores 32 columns of row `lane` of a panel: four bytes of every vector belong to a row (MatrixView has the layout).
void store_levels(int bits, const uint8_t* levels, int64_t lane, uint8_t* weights) {
    const auto put = [&](int64_t vector, uint32_t quad) { std::memcpy(weights + 32 * vector + 4 * lane, &quad, 4); };
    if (bits == 8) {
        for (int64_t quad = 0; quad < 8; ++quad) put(quad, quad_at(levels, quad));
        return;
    }
    uint32_t upper_bits[2] = {0, 0};
    for (int64_t j = 0; j < 4; ++j) {
        const uint32_t low = quad_at(levels, j), high = quad_at(levels, j + 4);
        put(j, (low & 0x0F0F0F0Fu) | (high & 0x0F0F0F0Fu) << 4);
        const uint32_t low_upper = low >> 4 & 0x03030303u, high_upper = high >> 4 & 0x03030303u;
        upper_bits[0] |= bits == 5 ? low_upper << j | high_upper << (j + 4) : low_upper << 2 * j;
        upper_bits[1] |= high_upper << 2 * j;
    }
    for (int64_t vector = 0; vector < bits - 4; ++vector) put(4 + vector, upper_bits[vector]);
}

}  // namespace

Memory::Memory(size_t bytes, bool large_pages) : mapped_bytes_(bytes + kLargePage), size_(bytes) {
    base_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(base_) + kLargePage - 1) / kLargePage * kLargePage;
    data_ = reinterpret_cast<uint8_t*>(aligned);
#ifdef MADV_HUGEPAGE
    if (large_pages && bytes >= kLargePage) madvise(data_, bytes / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
}

Memory::~Memory() { munmap(base_, mapped_bytes_); }

Arena::Allocation Arena::allocate(size_t bytes) {
    const size_t size = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!block_ || block_->size() - used_ < size) {
        block_ = std::make_shared<Memory>(size > kArenaBlock ? size : kArenaBlock, true);
        used_ = 0;
    }
    uint8_t* data = block_->data() + used_;
    used_ += size;
    return {block_, data, size};
}

PackedMatrix::PackedMatrix(Arena& arena, WeightFormat format, int64_t rows, int64_t cols, Grouping grouping)
    : view_{format, rows, cols, grouping, (cols + grouping.group_size - 1) / grouping.group_size, 0, nullptr} {
    view_.panel_bytes = panel_bytes(format, cols, view_.groups, grouping.group_size);
    memory_ = arena.allocate(static_cast<size_t>(panels() * view_.panel_bytes + kStreamSlack));
    view_.data = memory_.data;
}

void PackedMatrix::set_bias(const float* values, int64_t count) {
    if (count != view_.rows) throw std::invalid_argument("a bias must have one value per output row");
    bias_.assign(values, values + count);
}

// Stores the scales, minima and levels of a row's group in the row's panel.
void PackedMatrix::store_group(int64_t row, int64_t g, const BlockGroup& group, const uint8_t* levels) {
    const BlockLayout layout = block_layout(view_.format);
    const int64_t lane = row % kPanelRows, blocks = view_.grouping.group_size / kBlock, weights = layout.bytes * blocks;
    uint8_t* out = panel_of(row) + g * (layout.header + weights);
    if (layout.is_super) {
        uint8_t* header = panel_of(row) + g / kSuperGroups * (kSuperHeader + kSuperGroups * weights);
        uint8_t* factors = header + 32 + 16 * (g % kSuperGroups) + lane;
        out = header + kSuperHeader + g % kSuperGroups * weights;
        factors[0] = static_cast<uint8_t>(group.factors[0]);
        factors[kPanelRows] = static_cast<uint8_t>(layout.scales == 2 ? group.factors[1] : group.minimum_factor);
        std::memcpy(header + kHalfBytes * lane, &group.scale, kHalfBytes);
        std::memcpy(header + 16 + kHalfBytes * lane, &group.minimum, kHalfBytes);
    } else {
        std::memcpy(out + kHalfBytes * lane, &group.scale, kHalfBytes);
        if (layout.has_zeros) out[16 + lane] = static_cast<uint8_t>(group.minimum_factor);
        else if (layout.has_min) std::memcpy(out + 16 + kHalfBytes * lane, &group.minimum, kHalfBytes);
        out += layout.header;
    }
    for (int64_t block = 0; block < blocks; ++block) store_levels(layout.bits, levels + block * kBlock, lane, out + block * layout.bytes);
}

std::shared_ptr<PackedMatrix> PackedMatrix::keep_blocks(Arena& arena, WeightFormat format, const uint8_t* blocks, int64_t rows,
                                                        int64_t cols, int threads) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(arena, format, rows, cols, {kBlock, false}));
    const int64_t row_bytes = cols / gguf_block_columns(format) * gguf_block_bytes(format);
    matrix->pack_in_threads(0, rows, threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t g = 0; g < matrix->view_.groups; ++g) {
                const BlockGroup group = read_group(format, blocks + row * row_bytes, g);
                matrix->store_group(row, g, group, group.levels);
            }
        }
    });
    return matrix;
}

std::shared_ptr<PackedMatrix> PackedMatrix::keep_floats(Arena& arena, const float* values, int64_t rows, int64_t cols) {
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(arena, WeightFormat::F32, rows, cols, {1, false}));
    for (int64_t row = 0; row < rows; ++row) {
        float* panel = reinterpret_cast<float*>(matrix->panel_of(row)) + row % kPanelRows;
        for (int64_t c = 0; c < cols; ++c) panel[c * kPanelRows] = values[row * cols + c];
    }
    return matrix;
}

std::shared_ptr<PackedMatrix> PackedMatrix::round_factor(Arena& arena, const float* values, int64_t rows, int64_t cols) {
    const Grouping grouping{(cols + kBlock - 1) / kBlock * kBlock, false};
    std::shared_ptr<PackedMatrix> matrix(new PackedMatrix(arena, WeightFormat::Factor, rows, cols, grouping));
    for (int64_t row = 0; row < rows; ++row) {
        const float* source = values + row * cols;
        float largest = 0.0f;
        for (int64_t c = 0; c < cols; ++c) largest = std::max(largest, std::fabs(source[c]));
        uint8_t* panel = matrix->panel_of(row);
        const int64_t lane = row % kPanelRows;
        const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        std::memcpy(panel + lane * 4, &scale, 4);
        int8_t* weights = reinterpret_cast<int8_t*>(panel) + kFactorHeader + 4 * lane;
        for (int64_t c = 0; c < cols; ++c) weights[c / 4 * 4 * kPanelRows + c % 4] = static_cast<int8_t>(std::nearbyint(source[c] * inverse));
    }
    return matrix;
}

std::shared_ptr<PackedMatrix> PackedMatrix::zeros_int8(Arena& arena, int64_t rows, int64_t cols, Grouping grouping) {
    return std::shared_ptr<PackedMatrix>(new PackedMatrix(arena, WeightFormat::Q8, rows, cols, grouping));
}

// Each thread gets whole panels, so that no two threads write to the same one.
void PackedMatrix::pack_in_threads(int64_t first, int64_t count, int threads, const std::function<void(int64_t, int64_t)>& pack) const {
    const int64_t panels = (count + kPanelRows - 1) / kPanelRows;
    ThreadPool(threads).run([&](int thread) {
        const int64_t begin = panels * thread / threads * kPanelRows, end = panels * (thread + 1) / threads * kPanelRows;
        pack(first + begin, first + std::min(end, count));
    });
}

void PackedMatrix::round_rows(const FillRow& fill, int64_t first, int64_t count, const KernelTable& kernels, int threads) {
    const int64_t groups = view_.groups, group_size = view_.grouping.group_size;
    pack_in_threads(first, count, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> values(static_cast<size_t>(view_.cols)), scale(static_cast<size_t>(groups)), sum(scale.size());
        std::vector<int8_t> q(static_cast<size_t>(groups * group_size));
        for (int64_t row = begin; row < end; ++row) {
            fill(row, values.data());
            kernels.quantize(values.data(), view_.cols, view_.grouping, q.data(), scale.data(), sum.data());
            for (int64_t g = 0; g < groups; ++g) {
                const BlockGroup group{float_to_half(scale[static_cast<size_t>(g)]), 0, {1, 1}, 1, {}};
                store_group(row, g, group, reinterpret_cast<const uint8_t*>(q.data() + g * group_size));
            }
        }
    });
}

}  // namespace foreword
