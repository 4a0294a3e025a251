#include "stack_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace foreword {

namespace {

constexpr int64_t kAlign = 16;           // floats

// Cuts a workspace into aligned arrays; a first round with no memory only counts.
class Cutter {
public:
    explicit Cutter(float* base) : base_(base) {}
    float* floats(int64_t count) {
        float* part = base_ ? base_ + used_ : nullptr;
        used_ += (count + kAlign - 1) / kAlign * kAlign;
        return part;
    }
    int64_t used() const { return used_; }

private:
    float* base_;
    int64_t used_ = 0;
};

// Panels that a thread takes at a time: pairs, which some kernels compute side by side. Where adapters are added, more
// of them: each adapter's own stream of weights begins anew with every take.
int64_t panels_at_a_time(int64_t panels, int threads, bool adapted) {
    const int64_t grain = panels / (threads * (adapted ? 2 : 8));
    return std::max<int64_t>(2, grain + grain % 2);
}

}  // namespace

StackPass::StackPass(Stack& stack, const PassRows& rows, int64_t widest, std::vector<AdaptedRows> adapted)
    : stack_(stack), batch_(rows.batch), store_(rows.store), state_store_(rows.states), shape_(stack.shape_), kernels_(stack.kernels_),
      pool_(stack.workers_->pool), kind_(rows.kind), lent_(rows.lent),
      widest_(std::max({widest, shape_.hidden_size, shape_.query_width(), shape_.intermediate_size, stack.mixtures_.size,
                        stack.mixtures_.count})),
      adapted_(std::move(adapted)) {
    for (const Layer& layer : stack.layers_) {
        int64_t width = 0;
        for (const Matrix& input : layer.inputs) width += input->view().rows;
        heads_width_ = std::max(heads_width_, width);
        if (layer.output) widest_ = std::max(widest_, layer.output->view().cols);
    }
    if (!adapted_.empty()) adapted_of_row_.assign(static_cast<size_t>(batch_.rows), -1);
    for (size_t place = 0; place < adapted_.size(); ++place) {
        for (int64_t row = adapted_[place].begin; row < adapted_[place].end; ++row) {
            adapted_of_row_[static_cast<size_t>(row)] = static_cast<int32_t>(place);
        }
    }
    lay_out();
    plan_attention(rows.starts);
    plan_states();
}

void StackPass::lay_out() {
    const int64_t rows = batch_.rows, inputs = std::max(batch_.rows, batch_.wanted);
    const int64_t padded = (widest_ + kMaxGroup - 1) / kMaxGroup * kMaxGroup, groups = padded / kBlock;
    const int64_t group_heads = shape_.num_heads / shape_.num_kv_heads;
    scratch_each_ = std::max(attention_scratch(store_.kinds()[kind_].padded_dim(), kAttentionRows, group_heads),
                             (linear_scratch(widest_) + 3) / 4) + widest_ + kAlign;
    RecurrentShape recurrent{};
    if (stack_.recurrent()) recurrent = stack_.recurrent()->shape;
    // A state on its way from chunk to chunk, and what folding it needs.
    scratch_each_ = std::max(scratch_each_, recurrent.key_dim * (recurrent.value_dim + kStateChunk) + kAlign);
    for (int round = 0; round < 2; ++round) {
        std::vector<float>& space = stack_.workspace_;
        Cutter cut(round == 0 ? nullptr : space.data());
        stream_ = cut.floats(rows * shape_.hidden_size);
        heads_ = cut.floats(rows * heads_width_);
        attended_ = cut.floats(rows * std::max(shape_.query_width(), recurrent.value_width()));
        gates_ = cut.floats(heads_width_ > shape_.query_width() + 2 * shape_.kv_width() ? rows * shape_.query_width() : 0);
        convolved_ = cut.floats(rows * recurrent.channels());
        updates_ = cut.floats(rows * recurrent.value_width());
        decays_ = cut.floats(rows * recurrent.heads);
        strength_ = cut.floats(rows * recurrent.heads);
        gate_ = cut.floats(rows * shape_.intermediate_size);
        up_ = cut.floats(rows * shape_.intermediate_size);
        added_ = cut.floats(stack_.adds_as_it_is_ ? 0 : rows * shape_.hidden_size);
        const int64_t pairs = shape_.head_dim / 2 * static_cast<int64_t>(stack_.ropes_.size());
        cos_ = cut.floats(rows * pairs);
        sin_ = cut.floats(rows * pairs);
        input_f32_ = cut.floats(inputs * widest_);
        input_scale_ = cut.floats(inputs * groups);
        input_sum_ = cut.floats(inputs * groups);
        input_q_ = reinterpret_cast<int8_t*>(cut.floats(inputs * padded / 4));
        lay_out_mixtures(cut);
        thread_scratch_ = cut.floats(scratch_each_ * pool_.size());
        const int64_t shrunk = adapted_.empty() ? 0 : kSitesOfOneInput * rows;
        shrunk_ = cut.floats(shrunk * kMaxRank);
        shrunk_q_ = reinterpret_cast<int8_t*>(cut.floats(shrunk * kMaxRank / 4));
        shrunk_scale_ = cut.floats(shrunk);
        shrunk_sum_ = cut.floats(shrunk);
        if (round == 0 && space.size() < static_cast<size_t>(cut.used())) space.assign(static_cast<size_t>(cut.used()), 0.0f);
    }
}

template <typename Cut>
void StackPass::lay_out_mixtures(Cut& cut) {
    const MixtureSizes& most = stack_.mixtures_;
    const int64_t rows = batch_.rows, taken = rows * most.per_token, wide = std::max(shape_.hidden_size, most.size);
    const int64_t padded = (wide + kMaxGroup - 1) / kMaxGroup * kMaxGroup;
    scores_ = cut.floats(rows * most.count);
    share_ = cut.floats(taken);
    shared_ = cut.floats(most.count ? rows : 0);
    chosen_ = reinterpret_cast<int32_t*>(cut.floats(taken));
    routed_gate_ = cut.floats(taken * most.size);
    routed_up_ = cut.floats(taken * most.size);
    said_ = cut.floats(taken * shape_.hidden_size);
    routed_f32_ = cut.floats(taken * wide);
    routed_scale_ = cut.floats(taken * padded / kBlock);
    routed_sum_ = cut.floats(taken * padded / kBlock);
    routed_q_ = reinterpret_cast<int8_t*>(cut.floats(taken * padded / 4));
}

void StackPass::read_stream(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    if (layer.inputs.empty()) return;
    norm_rows(layer.attention_norm, *layer.inputs.front(), {index, Site::Input, static_cast<int>(layer.inputs.size())}, thread);
}

void StackPass::layer(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    if (!layer.inputs.empty()) mix(index, thread);
    if (layer.experts) return mixture(layer, thread);
    if (!layer.gate) return;
    const Readers inner{index, Site::Gate, layer.up ? 2 : 1};
    norm_rows(layer.mlp_norm, *layer.gate, inner, thread);
    dense(layer, inner, {index, Site::Down, 1}, thread);
}

void StackPass::mix(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    std::vector<Job> jobs;
    int64_t width = 0;
    for (const Matrix& input : layer.inputs) {
        jobs.push_back({input.get(), {heads_ + width, heads_width_, nullptr, false}});
        width += input->view().rows;
    }
    linears(jobs, activations(*layer.inputs.front(), batch_.rows), thread, {index, Site::Input, static_cast<int>(jobs.size())});
    const Readers output{index, Site::Output, 1};
    if (layer.recurrent) {
        recur(index, thread);
        quantize_rows(heads_ + layer.recurrent->shape.channels(), heads_width_, *layer.output, output, thread);
    } else {
        place_heads(index, true);
        attend(index, thread);
        open_gates(layer);
        quantize_rows(attended_, shape_.query_width(), *layer.output, output, thread);
    }
    add_said(layer, *layer.output, layer.after_attention, output, thread);
}

void StackPass::keep_rows(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    const int64_t query = layer.inputs[0]->view().rows, kv = shape_.kv_width();
    linears({{layer.inputs[1].get(), {heads_ + query, heads_width_, nullptr, false}},
             {layer.inputs[2].get(), {heads_ + query + kv, heads_width_, nullptr, false}}},
            activations(*layer.inputs[1], batch_.rows), thread, {index, Site::Key, 2});
    place_heads(index, false);
}

// The MLP that all rows share, whose input is there.
void StackPass::dense(const Layer& layer, const Readers& inner, const Readers& down, int thread) {
    gate_and_up(layer, inner, thread);
    quantize_rows(gate_, layer.gate->view().rows, *layer.down, down, thread);
    add_said(layer, *layer.down, layer.after_mlp, down, thread);
}

void StackPass::add_said(const Layer& layer, const PackedMatrix& matrix, const std::vector<float>& norm, const Readers& readers,
                         int thread) {
    const int64_t hidden = shape_.hidden_size;
    const bool as_it_is = layer.adds_as_it_is();
    linears({{&matrix, {as_it_is ? stream_ : added_, hidden, nullptr, as_it_is}}}, activations(matrix, batch_.rows), thread, readers);
    if (as_it_is) return;
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        float *said = added_ + row * hidden, *out = stream(row);
        if (!norm.empty()) kernels_.rms_norm(said, norm.data(), shape_.rms_norm_eps, hidden, said);
        for (int64_t d = 0; d < hidden; ++d) out[d] += layer.residual_scale * said[d];
    });
}

ActivationView StackPass::activations(const PackedMatrix& reader, int64_t rows) const {
    const MatrixView& w = reader.view();
    return {rows, w.cols, w.groups, input_q_, input_scale_, input_sum_, input_f32_};
}

// Row `row` of a linear map's input, from `values` (which may be the plain input itself).
void StackPass::fill_row(const PackedMatrix& matrix, const float* values, int64_t row, const ActivationView& into) const {
    const MatrixView& reader = matrix.view();
    if (reader.form == Form::F32) {
        float* plain = into.f32 + row * into.cols;
        if (plain != values) std::memcpy(plain, values, static_cast<size_t>(into.cols) * sizeof(float));
        return;
    }
    kernels_.quantize(values, into.cols, reader.grouping, into.q + row * into.groups * reader.grouping.group,
                      into.scale + row * into.groups, into.sum + row * into.groups);
}

void StackPass::norm_rows(const std::vector<float>& weight, const PackedMatrix& reader, const Readers& readers, int thread) {
    if (weight.empty()) return quantize_rows(stream_, shape_.hidden_size, reader, readers, thread);
    const ActivationView into = activations(reader, batch_.rows);
    float* normed = floats_of(thread);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        kernels_.rms_norm(stream(row), weight.data(), shape_.rms_norm_eps, shape_.hidden_size, normed);
        fill_row(reader, normed, row, into);
        shrink_row(reader, row, readers, thread);
    });
}

void StackPass::quantize_rows(const float* values, int64_t stride, const PackedMatrix& reader, const Readers& readers, int thread) {
    const ActivationView into = activations(reader, batch_.rows);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        fill_row(reader, values + row * stride, row, into);
        shrink_row(reader, row, readers, thread);
    });
}

void StackPass::shrink_row(const PackedMatrix& reader, int64_t row, const Readers& readers, int thread) {
    if (adapted_of_row_.empty() || adapted_of_row_[static_cast<size_t>(row)] < 0) return;
    const AdaptedRows& rows = adapted_[static_cast<size_t>(adapted_of_row_[static_cast<size_t>(row)])];
    const ActivationView all = activations(reader, batch_.rows);
    const int64_t groups = all.groups;
    const ActivationView one{1, all.cols, groups, all.q + row * groups * reader.view().grouping.group, all.scale + row * groups,
                             all.sum + row * groups, all.f32 + row * all.cols};
    for (int place = 0; place < readers.count; ++place) {
        const size_t site = static_cast<size_t>(readers.first) + static_cast<size_t>(place);
        const Factor& factor = rows.adapter->layers[static_cast<size_t>(readers.layer)][site];
        if (!factor.down) continue;
        const ActivationView into = shrunk(rows, factor, place);
        const int64_t rank = factor.rank(), here = row - rows.begin;
        float* out = into.f32 + here * rank;
        kernels_.linear(factor.down->view(), one, 0, factor.down->panels(), {out, rank, nullptr, false}, bytes_of(thread));
        fill_row(*factor.up, out, here, into);
    }
}

ActivationView StackPass::shrunk(const AdaptedRows& rows, const Factor& factor, int place) const {
    const int64_t first = place * batch_.rows + rows.begin;
    return {rows.end - rows.begin, factor.rank(), factor.up->view().groups, shrunk_q_ + first * kMaxRank, shrunk_scale_ + first,
            shrunk_sum_ + first, shrunk_ + first * kMaxRank};
}

void StackPass::expand(const Readers& readers, int place, int64_t panel_begin, int64_t panel_end, const LinearOutput& target,
                       int thread) {
    if (place >= readers.count) return;
    const size_t site = static_cast<size_t>(readers.first) + static_cast<size_t>(place);
    for (const AdaptedRows& rows : adapted_) {
        const Factor& factor = rows.adapter->layers[static_cast<size_t>(readers.layer)][site];
        if (!factor.up) continue;
        kernels_.linear(factor.up->view(), shrunk(rows, factor, place), panel_begin, panel_end,
                        {target.out + rows.begin * target.stride, target.stride, nullptr, true}, bytes_of(thread));
    }
}

void StackPass::linears(const std::vector<Job>& jobs, const ActivationView& input, int thread, const Readers& readers) {
    int64_t panels = 0;
    for (const Job& job : jobs) panels += job.matrix->panels();
    const int64_t grain = panels_at_a_time(panels, pool_.size(), !adapted_.empty());
    pool_.share(panels, grain, [&](int64_t begin, int64_t end) {
        int place = 0;
        for (const Job& job : jobs) {
            const int64_t here = job.matrix->panels();
            const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, here);
            if (first < last) {
                LinearOutput target = job.target;
                target.out += first * kPanelRows;
                target.bias = job.matrix->bias();
                kernels_.linear(job.matrix->view(), input, first, last, target, bytes_of(thread));
                expand(readers, place, first, last, target, thread);
            }
            begin -= here;
            end -= here;
            ++place;
        }
    });
}

void StackPass::activate(const Layer& layer, float* gate, const float* up, int64_t n) const {
    switch (layer.activation) {
        case Activation::Silu: return kernels_.silu_mul(gate, up, n);
        case Activation::Gelu: return kernels_.gelu_mul(gate, up, n);
        case Activation::SquaredRelu: return kernels_.squared_relu(gate, n);
    }
}

void StackPass::gate_and_up(const Layer& layer, const Readers& readers, int thread) {
    const int64_t width = layer.gate->view().rows, panels = layer.gate->panels();
    const bool weighed = layer.experts && !layer.experts->shared_gate.empty();
    const ActivationView input = activations(*layer.gate, batch_.rows);
    const int64_t grain = panels_at_a_time(panels, pool_.size(), !adapted_.empty());
    pool_.share(panels, grain, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * kPanelRows, count = std::min(end * kPanelRows, width) - first;
        const LinearOutput gate{gate_ + first, width, layer.gate->bias(), false};
        kernels_.linear(layer.gate->view(), input, begin, end, gate, bytes_of(thread));
        expand(readers, 0, begin, end, gate, thread);
        if (layer.up) {
            const LinearOutput up{up_ + first, width, layer.up->bias(), false};
            kernels_.linear(layer.up->view(), input, begin, end, up, bytes_of(thread));
            expand(readers, 1, begin, end, up, thread);
        }
        for (int64_t row = 0; row < batch_.rows; ++row) {
            float* gate = gate_ + row * width + first;
            activate(layer, gate, up_ + row * width + first, count);
            for (int64_t i = 0; weighed && i < count; ++i) gate[i] *= shared_[row];
        }
    });
}

}  // namespace foreword
