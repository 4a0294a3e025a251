// Memory of recurrent layers: a state per committed chunk, and rings with a row for every token of the current one.
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
    // State 0 is the one before the first token: zeros, never written.
    StateStore(int64_t layers, RecurrentShape shape, int64_t states, int64_t rings);
    StateStore(const StateStore&) = delete;
    StateStore& operator=(const StateStore&) = delete;

    const RecurrentShape& shape() const { return shape_; }
    int64_t layers() const { return layers_; }
    int64_t states() const { return states_; }
    int64_t rings() const { return rings_; }

    // Rows of a ring: [kRingRows, channels], and of one head [kRingRows, key dim], [kRingRows, value dim], [kRingRows].
    float* inputs(int64_t layer, int64_t ring) const { return at(inputs_, (layer * rings_ + ring) * kRingRows * shape_.channels()); }
    float* keys(int64_t layer, int64_t ring, int64_t key_head) const {
        return at(keys_, ((layer * rings_ + ring) * shape_.key_heads + key_head) * kRingRows * shape_.key_dim);
    }
    float* updates(int64_t layer, int64_t ring, int64_t head) const {
        return at(updates_, ((layer * rings_ + ring) * shape_.heads + head) * kRingRows * shape_.value_dim);
    }
    float* decays(int64_t layer, int64_t ring, int64_t head) const {
        return at(decays_, ((layer * rings_ + ring) * shape_.heads + head) * kRingRows);
    }
    // Parts of a state: [key dim, value dim] of one head, and the convolution's newest inputs [kernel - 1, channels].
    float* matrix(int64_t layer, int64_t state, int64_t head) const {
        return at(matrices_, ((layer * states_ + state) * shape_.heads + head) * shape_.key_dim * shape_.value_dim);
    }
    float* newest(int64_t layer, int64_t state) const {
        return at(newest_, (layer * states_ + state) * (shape_.kernel - 1) * shape_.channels());
    }

    // Copies rows (from, to) of rings in one layer. All are read before any is written: a committed path may overlap itself.
    void move(int64_t layer, const std::vector<std::pair<int64_t, int64_t>>& copies) const;

private:
    using Part = std::unique_ptr<Memory>;
    static float* at(const Part& part, int64_t place) { return reinterpret_cast<float*>(part->data()) + place; }
    // Calls `visit(first number, count)` for every part of a ring's row.
    template <typename Visit>
    void visit_row(int64_t layer, int64_t row, Visit&& visit) const;

    int64_t layers_;
    RecurrentShape shape_;
    int64_t states_, rings_;
    Part inputs_, keys_, updates_, decays_, matrices_, newest_;
};

}  // namespace foreword
