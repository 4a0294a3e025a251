// Memory of recurrent layers: a state per committed chunk, and rings with a row for every token of the current chunk.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "packed_matrix.h"
#include "recurrent.h"
#include "types.h"

namespace foreword {

class StateStore {
public:
    // State 0 is the state before the first token: it is zero and never written.
    StateStore(int64_t layers, RecurrentShape shape, int64_t states, int64_t rings);
    StateStore(const StateStore&) = delete;
    StateStore& operator=(const StateStore&) = delete;

    const RecurrentShape& shape() const { return shape_; }
    int64_t layers() const { return layers_; }
    int64_t states() const { return states_; }
    int64_t rings() const { return rings_; }

    // The arrays of a ring: convolution inputs [kRingRows, channels].
    float* ring_inputs(int64_t layer, int64_t ring) const {
        return at(ring_inputs_, (layer * rings_ + ring) * kRingRows * shape_.channels());
    }
    // Keys of one key head, [kRingRows, key dim].
    float* ring_keys(int64_t layer, int64_t ring, int64_t key_head) const {
        return at(ring_keys_, ((layer * rings_ + ring) * shape_.key_heads + key_head) * kRingRows * shape_.key_dim);
    }
    // Updates of one head, [kRingRows, value dim].
    float* ring_updates(int64_t layer, int64_t ring, int64_t head) const {
        return at(ring_updates_, ((layer * rings_ + ring) * shape_.heads + head) * kRingRows * shape_.value_dim);
    }
    // Sums of one head's log decays since the start of the chunk, [kRingRows].
    float* ring_log_decay_sums(int64_t layer, int64_t ring, int64_t head) const {
        return at(ring_log_decay_sums_, ((layer * rings_ + ring) * shape_.heads + head) * kRingRows);
    }

    // The arrays of a state: the matrix of one head, [key dim, value dim].
    float* matrix(int64_t layer, int64_t state, int64_t head) const {
        return at(matrices_, ((layer * states_ + state) * shape_.heads + head) * shape_.key_dim * shape_.value_dim);
    }
    // The last inputs of the convolution, oldest first, [kernel size - 1, channels].
    float* last_inputs(int64_t layer, int64_t state) const {
        return at(last_inputs_, (layer * states_ + state) * (shape_.kernel_size - 1) * shape_.channels());
    }

    // Copies rows (from, to) of rings in one layer; a row number is ring * kRingRows + row. All rows are read before any is
    // written, because the rows of a committed path may overlap.
    void copy_rows(int64_t layer, const std::vector<std::pair<int64_t, int64_t>>& copies) const;

private:
    using Buffer = std::unique_ptr<Memory>;
    static float* at(const Buffer& buffer, int64_t offset) { return reinterpret_cast<float*>(buffer->data()) + offset; }
    // Calls `visit(pointer, count)` for each of the arrays that a ring's row consists of.
    template <typename Visit>
    void visit_row(int64_t layer, int64_t row, Visit&& visit) const;

    int64_t layers_;
    RecurrentShape shape_;
    int64_t states_, rings_;
    Buffer ring_inputs_, ring_keys_, ring_updates_, ring_log_decay_sums_, matrices_, last_inputs_;
};

}  // namespace foreword
