// Mixtures of experts in a pass: rows are sorted by expert, so that each expert is read once, by the rows that take it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "stack_pass.h"

namespace foreword {

namespace {

// Where every taken expert's row stands, expert by expert.
struct Sorted {
    std::vector<int64_t> starts;   // [experts + 1]
    std::vector<int64_t> places;   // [rows * per token], by row
    std::vector<int64_t> rows;     // by place
};

Sorted sorted_by_expert(const int32_t* chosen, int64_t taken, int64_t per_token, int64_t count) {
    Sorted sorted{std::vector<int64_t>(static_cast<size_t>(count + 1)), std::vector<int64_t>(static_cast<size_t>(taken)),
                  std::vector<int64_t>(static_cast<size_t>(taken))};
    for (int64_t i = 0; i < taken; ++i) ++sorted.starts[static_cast<size_t>(chosen[i] + 1)];
    for (size_t e = 1; e < sorted.starts.size(); ++e) sorted.starts[e] += sorted.starts[e - 1];
    std::vector<int64_t> next(sorted.starts.begin(), sorted.starts.end() - 1);
    for (int64_t i = 0; i < taken; ++i) {
        const int64_t place = next[static_cast<size_t>(chosen[i])]++;
        sorted.places[static_cast<size_t>(i)] = place;
        sorted.rows[static_cast<size_t>(place)] = i / per_token;
    }
    return sorted;
}

}  // namespace

// Norms the stream for the router and for the experts, and writes down which ones every row takes.
void StackPass::route(const Layer& layer, int thread) {
    const Experts& experts = *layer.experts;
    const PackedMatrix& reader = *experts.gate.front();
    const ActivationView into = activations(reader, batch_.rows);
    const int64_t count = experts.count(), taken = experts.routing.per_token, hidden = shape_.hidden_size;
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        float* normed = input_f32_ + row * hidden;
        kernels_.rms_norm(stream(row), layer.mlp_norm.data(), shape_.rms_norm_eps, hidden, normed);
        fill_row(reader, normed, row, into);
    });
    linears({{experts.router.get(), {scores_, count, nullptr, false}}}, activations(*experts.router, batch_.rows), thread);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        experts.choose(scores_ + row * count, floats_of(thread), chosen_ + row * taken, share_ + row * taken);
        float said = 0.0f;
        for (size_t i = 0; i < experts.shared_gate.size(); ++i) said += input_f32_[row * hidden + static_cast<int64_t>(i)] * experts.shared_gate[i];
        shared_[row] = 1.0f / (1.0f + std::exp(-said));
    });
}

ActivationView StackPass::routed(const PackedMatrix& reader, int64_t first, int64_t rows) const {
    const MatrixView& w = reader.view();
    return {rows, w.cols, w.groups, routed_q_ + first * w.groups * w.grouping.group, routed_scale_ + first * w.groups,
            routed_sum_ + first * w.groups, routed_f32_ + first * w.cols};
}

// The panels of all experts that are taken, as if they were one matrix; `piece` gets an expert and some of its panels.
template <typename Piece>
void StackPass::share_experts(const std::vector<Matrix>& matrices, const std::vector<int64_t>& starts, Piece&& piece) {
    const int64_t each = matrices.front()->panels(), count = static_cast<int64_t>(matrices.size());
    std::vector<int64_t> hit;
    for (int64_t e = 0; e < count; ++e) {
        if (starts[static_cast<size_t>(e)] < starts[static_cast<size_t>(e + 1)]) hit.push_back(e);
    }
    const int64_t panels = each * static_cast<int64_t>(hit.size());
    pool_.share(panels, std::max<int64_t>(1, panels / (pool_.size() * 8)), [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t expert = hit[static_cast<size_t>(begin / each)], stop = std::min(end, (begin / each + 1) * each);
            piece(expert, begin % each, stop - begin / each * each);
            begin = stop;
        }
    });
}

void StackPass::mixture(const Layer& layer, int thread) {
    const Experts& experts = *layer.experts;
    const int64_t per_token = experts.routing.per_token, taken = batch_.rows * per_token, size = experts.size();
    const int64_t hidden = shape_.hidden_size;
    route(layer, thread);
    const Sorted sorted = sorted_by_expert(chosen_, taken, per_token, experts.count());
    gather_rows(*experts.gate.front(), sorted.rows);
    const auto rows_of = [&](int64_t expert) { return sorted.starts[static_cast<size_t>(expert + 1)] - sorted.starts[static_cast<size_t>(expert)]; };
    share_experts(experts.gate, sorted.starts, [&](int64_t expert, int64_t begin, int64_t end) {
        const Matrix& gate = experts.gate[static_cast<size_t>(expert)];
        const int64_t start = sorted.starts[static_cast<size_t>(expert)], first = begin * kPanelRows;
        const ActivationView input = routed(*gate, start, rows_of(expert));
        float *gates = routed_gate_ + start * size + first, *ups = routed_up_ + start * size + first;
        kernels_.linear(gate->view(), input, begin, end, {gates, size, gate->bias(), false}, bytes_of(thread));
        if (!experts.up.empty()) {
            const Matrix& up = experts.up[static_cast<size_t>(expert)];
            kernels_.linear(up->view(), input, begin, end, {ups, size, up->bias(), false}, bytes_of(thread));
        }
        for (int64_t row = 0; row < input.rows; ++row) {
            float *own = gates + row * size, *other = ups + row * size;
            const int64_t count = std::min(end * kPanelRows, size) - first;
            if (experts.limit > 0.0f) {
                kernels_.clamped_mul(own, other, experts.limit, experts.slope, count);
            } else {
                activate(layer, own, other, count);
            }
        }
    });
    const ActivationView into = routed(*experts.down.front(), 0, taken);
    pool_.share(taken, 1, [&](int64_t place, int64_t) { fill_row(*experts.down.front(), routed_gate_ + place * size, place, into); });
    share_experts(experts.down, sorted.starts, [&](int64_t expert, int64_t begin, int64_t end) {
        const Matrix& down = experts.down[static_cast<size_t>(expert)];
        const int64_t start = sorted.starts[static_cast<size_t>(expert)];
        kernels_.linear(down->view(), routed(*down, start, rows_of(expert)), begin, end,
                        {said_ + start * hidden + begin * kPanelRows, hidden, down->bias(), false}, bytes_of(thread));
    });
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        float* out = stream(row);
        for (int64_t i = row * per_token; i < (row + 1) * per_token; ++i) {   // in the order of a row's own choice
            const float* said = said_ + sorted.places[static_cast<size_t>(i)] * hidden;
            const float share = layer.residual_scale * share_[i];
            for (int64_t d = 0; d < hidden; ++d) out[d] += share * said[d];
        }
    });
    if (layer.gate) dense(layer, {}, {}, thread);
}

// Copies the input of every row to the places of the experts that it takes.
void StackPass::gather_rows(const PackedMatrix& reader, const std::vector<int64_t>& rows) {
    const MatrixView& w = reader.view();
    const ActivationView from = activations(reader, batch_.rows), into = routed(reader, 0, static_cast<int64_t>(rows.size()));
    const int64_t width = w.groups * w.grouping.group;
    pool_.share(static_cast<int64_t>(rows.size()), 1, [&](int64_t place, int64_t) {
        const int64_t row = rows[static_cast<size_t>(place)];
        if (w.form == Form::F32) {
            std::copy_n(from.f32 + row * w.cols, w.cols, into.f32 + place * w.cols);
            return;
        }
        std::copy_n(from.q + row * width, width, into.q + place * width);
        std::copy_n(from.scale + row * w.groups, w.groups, into.scale + place * w.groups);
        std::copy_n(from.sum + row * w.groups, w.groups, into.sum + place * w.groups);
    });
}

}  // namespace foreword
