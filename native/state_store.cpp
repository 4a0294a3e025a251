#include "state_store.h"

#include <algorithm>

#include "stack.h"

namespace foreword {

void Recurrent::prepare() {
    const RecurrentShape& s = shape;
    require(s.kernel > 1 && s.heads > 0 && s.value_dim > 0, "a recurrent layer needs a convolution and heads");
    require(s.value_dim % 8 == 0, "the CPU kernels need heads of a multiple of 8 values in recurrent layers");
    require_norm(conv, s.kernel * s.channels(), false, "the convolution has one weight per position and channel");
    require_norm(conv_bias, s.channels(), true, "the convolution has one bias per channel");
    if (s.kind == Recurrence::Convolution) return require(s.heads == 1 && s.key_heads == 0, "a short convolution has one head");
    require(s.key_heads > 0 && s.heads % s.key_heads == 0 && s.key_dim > 0, "key heads must divide the heads");
    const bool is_delta = s.kind == Recurrence::Delta;
    require_norm(norm, is_delta ? s.value_dim : s.value_width(), false, "the norm of values has the wrong size");
    require_norm(rates, s.heads, false, "there is one decay per head");
    require_norm(time_bias, s.heads, false, "there is one time bias per head");
    require_norm(skip, is_delta ? 0 : s.heads, false, "there is one skip weight per head of Mamba-2");
    require(norm_groups > 0 && s.value_width() % norm_groups == 0, "groups must divide the values");
    key_scale.assign(static_cast<size_t>(s.key_dim), 1.0f / __builtin_sqrtf(static_cast<float>(s.key_dim)));
    query_scale.assign(static_cast<size_t>(s.key_dim), 1.0f / static_cast<float>(s.key_dim));
}

StateStore::StateStore(int64_t layers, RecurrentShape shape, int64_t states, int64_t rings)
    : layers_(layers), shape_(shape), states_(states), rings_(rings) {
    require(layers > 0 && states > 0 && rings > 0, "recurrent layers need states and rings");
    const auto memory = [&](int64_t numbers) {   // small pages: a large one would be filled by the first state
        return std::make_unique<Memory>(static_cast<size_t>(layers * numbers) * sizeof(float), false);
    };
    inputs_ = memory(rings * kRingRows * shape.channels());
    keys_ = memory(rings * kRingRows * shape.key_width());
    updates_ = memory(rings * kRingRows * (shape.key_heads > 0 ? shape.value_width() : 0));
    decays_ = memory(rings * kRingRows * shape.heads);
    matrices_ = memory(states * shape.heads * shape.key_dim * shape.value_dim);
    newest_ = memory(states * (shape.kernel - 1) * shape.channels());
}

template <typename Visit>
void StateStore::visit_row(int64_t layer, int64_t row, Visit&& visit) const {
    const int64_t ring = row / kRingRows, offset = row % kRingRows;
    visit(inputs(layer, ring) + offset * shape_.channels(), shape_.channels());
    for (int64_t head = 0; head < shape_.key_heads; ++head) visit(keys(layer, ring, head) + offset * shape_.key_dim, shape_.key_dim);
    for (int64_t head = 0; head < shape_.heads && shape_.key_heads > 0; ++head) {
        visit(updates(layer, ring, head) + offset * shape_.value_dim, shape_.value_dim);
        visit(decays(layer, ring, head) + offset, 1);
    }
}

void StateStore::move(int64_t layer, const std::vector<std::pair<int64_t, int64_t>>& copies) const {
    std::vector<float> kept;
    for (const auto& copy : copies) {
        visit_row(layer, copy.first, [&](const float* p, int64_t n) { kept.insert(kept.end(), p, p + n); });
    }
    const float* next = kept.data();
    for (const auto& copy : copies) {
        visit_row(layer, copy.second, [&](float* p, int64_t n) {
            std::copy_n(next, n, p);
            next += n;
        });
    }
}

}  // namespace foreword
