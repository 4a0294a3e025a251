// Mixtures of experts in a pass. Rows are sorted by expert, so that the weights of each expert are read once.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "stack_pass.h"

namespace foreword {

namespace {

// The (row, expert) pairs of a pass, sorted by expert.
struct ExpertOrder {
    std::vector<int64_t> starts;      // [experts + 1], first sorted index of each expert
    std::vector<int64_t> sorted_of;   // [rows * per token], sorted index of a pair in the order of rows
    std::vector<int64_t> rows;        // [rows * per token], row of a pair by its sorted index
};

ExpertOrder sort_by_expert(const int32_t* chosen, int64_t pairs, int64_t per_token, int64_t count) {
    ExpertOrder order{std::vector<int64_t>(static_cast<size_t>(count + 1)), std::vector<int64_t>(static_cast<size_t>(pairs)),
                      std::vector<int64_t>(static_cast<size_t>(pairs))};
    for (int64_t i = 0; i < pairs; ++i) ++order.starts[static_cast<size_t>(chosen[i] + 1)];
    for (size_t e = 1; e < order.starts.size(); ++e) order.starts[e] += order.starts[e - 1];
    std::vector<int64_t> next(order.starts.begin(), order.starts.end() - 1);
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t sorted = next[static_cast<size_t>(chosen[i])]++;
        order.sorted_of[static_cast<size_t>(i)] = sorted;
        order.rows[static_cast<size_t>(sorted)] = i / per_token;
    }
    return order;
}

}  // namespace

// Sets the input of router and experts from the normed stream, and computes the experts of every row and their weights.
void StackPass::route(const Layer& layer, int thread) {
    const Experts& experts = *layer.experts;
    const PackedMatrix& reader = *experts.gate.front();
    const ActivationView input = linear_input(reader, batch_.rows);
    const int64_t count = experts.count(), per_token = experts.routing.per_token, hidden = shape_.hidden_size;
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        float* normed = input_.f32 + row * hidden;
        kernels_.rms_norm(stream(row), layer.mlp_norm.data(), shape_.rms_norm_eps, hidden, normed);
        set_input_row(reader, normed, row, input);
    });
    run_linears({{experts.router.get(), {scores_, count, nullptr, false}}}, linear_input(*experts.router, batch_.rows), thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        experts.choose(scores_ + row * count, scratch_of(thread), chosen_experts_ + row * per_token, expert_weights_ + row * per_token);
        float logit = 0.0f;   // of the shared experts' gate
        for (size_t i = 0; i < experts.shared_gate.size(); ++i) logit += input_.f32[row * hidden + static_cast<int64_t>(i)] * experts.shared_gate[i];
        shared_weight_[row] = 1.0f / (1.0f + std::exp(-logit));
    });
}

// Divides the panels of all chosen experts among the threads. Calls `piece(expert, panel begin, panel end)`; `starts` is that of
// an ExpertOrder.
template <typename Piece>
void StackPass::share_expert_panels(const std::vector<Matrix>& matrices, const std::vector<int64_t>& starts, Piece&& piece) {
    const int64_t count = static_cast<int64_t>(matrices.size());
    std::vector<int64_t> chosen;
    for (int64_t e = 0; e < count; ++e) {
        if (starts[static_cast<size_t>(e)] < starts[static_cast<size_t>(e + 1)]) chosen.push_back(e);
    }
    share_panels(static_cast<int64_t>(chosen.size()), matrices.front()->panels(), [&](int64_t index, int64_t begin, int64_t end) {
        piece(chosen[static_cast<size_t>(index)], begin, end);
    });
}

void StackPass::run_mixture(const Layer& layer, int thread) {
    const Experts& experts = *layer.experts;
    const int64_t per_token = experts.routing.per_token, pairs = batch_.rows * per_token, width = experts.width();
    const int64_t hidden = shape_.hidden_size;
    route(layer, thread);
    const ExpertOrder order = sort_by_expert(chosen_experts_, pairs, per_token, experts.count());
    gather_rows(*experts.gate.front(), order.rows);
    const auto rows_of = [&](int64_t expert) { return order.starts[static_cast<size_t>(expert + 1)] - order.starts[static_cast<size_t>(expert)]; };
    share_expert_panels(experts.gate, order.starts, [&](int64_t expert, int64_t begin, int64_t end) {
        const Matrix& gate = experts.gate[static_cast<size_t>(expert)];
        const int64_t start = order.starts[static_cast<size_t>(expert)], first = begin * kPanelRows;
        const ActivationView input = expert_input_.view(*gate, start, rows_of(expert));
        float *gates = expert_gate_ + start * width + first, *ups = expert_up_ + start * width + first;
        kernels_.linear(gate->view(), input, begin, end, {gates, width, gate->bias(), false}, byte_scratch_of(thread));
        if (!experts.up.empty()) {
            const Matrix& up = experts.up[static_cast<size_t>(expert)];
            kernels_.linear(up->view(), input, begin, end, {ups, width, up->bias(), false}, byte_scratch_of(thread));
        }
        for (int64_t row = 0; row < input.rows; ++row) {
            float *row_gate = gates + row * width, *row_up = ups + row * width;
            const int64_t count = std::min(end * kPanelRows, width) - first;
            if (experts.limit > 0.0f) {
                kernels_.clamped_mul(row_gate, row_up, experts.limit, experts.slope, count);
            } else {
                activate(layer, row_gate, row_up, count);
            }
        }
    });
    const ActivationView down_input = expert_input_.view(*experts.down.front(), 0, pairs);
    pool_.parallel_for(pairs, 1, [&](int64_t i, int64_t) { set_input_row(*experts.down.front(), expert_gate_ + i * width, i, down_input); });
    share_expert_panels(experts.down, order.starts, [&](int64_t expert, int64_t begin, int64_t end) {
        const Matrix& down = experts.down[static_cast<size_t>(expert)];
        const int64_t start = order.starts[static_cast<size_t>(expert)];
        kernels_.linear(down->view(), expert_input_.view(*down, start, rows_of(expert)), begin, end,
                        {expert_outputs_ + start * hidden + begin * kPanelRows, hidden, down->bias(), false}, byte_scratch_of(thread));
    });
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        float* out = stream(row);
        for (int64_t i = row * per_token; i < (row + 1) * per_token; ++i) {   // in the order of a row's choice, whatever the batch
            const float* output = expert_outputs_ + order.sorted_of[static_cast<size_t>(i)] * hidden;
            const float weight = layer.residual_scale * expert_weights_[i];
            for (int64_t d = 0; d < hidden; ++d) out[d] += weight * output[d];
        }
    });
    if (layer.gate) run_mlp(layer, {}, {}, thread);   // the shared experts
}

// Copies the inputs of these rows, one after the other, to the input buffer that is sorted by expert.
void StackPass::gather_rows(const PackedMatrix& reader, const std::vector<int64_t>& rows) {
    const MatrixView& w = reader.view();
    const ActivationView from = linear_input(reader, batch_.rows), to = expert_input_.view(reader, 0, static_cast<int64_t>(rows.size()));
    const int64_t width = w.groups * w.grouping.group_size;
    pool_.parallel_for(static_cast<int64_t>(rows.size()), 1, [&](int64_t i, int64_t) {
        const int64_t row = rows[static_cast<size_t>(i)];
        if (w.format == WeightFormat::F32) {
            std::copy_n(from.f32 + row * w.cols, w.cols, to.f32 + i * w.cols);
            return;
        }
        std::copy_n(from.q + row * width, width, to.q + i * width);
        std::copy_n(from.scale + row * w.groups, w.groups, to.scale + i * w.groups);
        std::copy_n(from.sum + row * w.groups, w.groups, to.sum + i * w.groups);
    });
}

}  // namespace foreword
