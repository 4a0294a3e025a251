#include "state_store.h"

#include <algorithm>

#include "stack.h"

namespace foreword {

void Recurrent::prepare() {
    const RecurrentShape& s = shape;
    require(s.kernel_size > 1 && s.heads > 0 && s.value_dim > 0, "a recurrent layer needs a convolution and heads");
    require(s.value_dim % 8 == 0, "the CPU kernels need heads of a multiple of 8 values in recurrent layers");
    require_norm(conv, s.kernel_size * s.channels(), false, "the convolution has one weight per position and channel");
    require_norm(conv_bias, s.channels(), true, "the convolution has one bias per channel");
    if (s.kind == Recurrence::Convolution) return require(s.heads == 1 && s.key_heads == 0, "a short convolution has one head");
    require(s.key_heads > 0 && s.heads % s.key_heads == 0 && s.key_dim > 0, "key heads must divide the heads");
    const bool is_delta = s.kind == Recurrence::Delta;
    require_norm(norm, is_delta ? s.value_dim : s.value_width(), false, "the norm of values has the wrong size");
    require_norm(log_decay_rates, s.heads, false, "there is one decay rate per head");
    require_norm(time_bias, s.heads, false, "there is one time bias per head");
    require_norm(skip, is_delta ? 0 : s.heads, false, "there is one skip weight per head of Mamba-2");
    require(norm_groups > 0 && s.value_width() % norm_groups == 0, "norm groups must divide the values");
    key_scale.assign(static_cast<size_t>(s.key_dim), 1.0f / __builtin_sqrtf(static_cast<float>(s.key_dim)));
    query_scale.assign(static_cast<size_t>(s.key_dim), 1.0f / static_cast<float>(s.key_dim));
}

StateStore::StateStore(int64_t layers, RecurrentShape shape, int64_t states, int64_t rings)
    : layers_(layers), shape_(shape), states_(states), rings_(rings) {
    require(layers > 0 && states > 0 && rings > 0, "recurrent layers need states and rings");
    const auto memory = [&](int64_t floats) {   // per layer; in small pages, because a large one would become resident at its first write
        return std::make_unique<Memory>(static_cast<size_t>(layers * floats) * sizeof(float), false);
    };
    ring_inputs_ = memory(rings * kRingRows * shape.channels());
    ring_keys_ = memory(rings * kRingRows * shape.key_width());
    ring_updates_ = memory(rings * kRingRows * (shape.key_heads > 0 ? shape.value_width() : 0));
    ring_log_decay_sums_ = memory(rings * kRingRows * shape.heads);
    matrices_ = memory(states * shape.heads * shape.key_dim * shape.value_dim);
    last_inputs_ = memory(states * (shape.kernel_size - 1) * shape.channels());
}

template <typename Visit>
void StateStore::visit_row(int64_t layer, int64_t row, Visit&& visit) const {
    const int64_t ring = row / kRingRows, offset = row % kRingRows;
    visit(ring_inputs(layer, ring) + offset * shape_.channels(), shape_.channels());
    for (int64_t head = 0; head < shape_.key_heads; ++head) visit(ring_keys(layer, ring, head) + offset * shape_.key_dim, shape_.key_dim);
    for (int64_t head = 0; head < shape_.heads && shape_.key_heads > 0; ++head) {
        visit(ring_updates(layer, ring, head) + offset * shape_.value_dim, shape_.value_dim);
        visit(ring_log_decay_sums(layer, ring, head) + offset, 1);
    }
}

void StateStore::copy_rows(int64_t layer, const std::vector<std::pair<int64_t, int64_t>>& copies) const {
    std::vector<float> values;
    for (const auto& copy : copies) {
        visit_row(layer, copy.first, [&](const float* from, int64_t n) { values.insert(values.end(), from, from + n); });
    }
    const float* next = values.data();
    for (const auto& copy : copies) {
        visit_row(layer, copy.second, [&](float* to, int64_t n) {
            std::copy_n(next, n, to);
            next += n;
        });
    }
}

}  // namespace foreword
