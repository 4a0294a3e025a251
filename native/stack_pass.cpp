#include "stack_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace foreword {

namespace {

constexpr int64_t kAlign = 16;   // floats

// Allocates aligned arrays one after the other from `base`. If `base` is null it only counts.
class WorkspaceAllocator {
public:
    explicit WorkspaceAllocator(float* base) : base_(base) {}
    float* floats(int64_t count) {
        float* array = base_ ? base_ + used_ : nullptr;
        used_ += (count + kAlign - 1) / kAlign * kAlign;
        return array;
    }
    int64_t used() const { return used_; }

private:
    float* base_;
    int64_t used_ = 0;
};

// Panels that a thread takes at a time: an even number, because some kernels compute two together. With adapters a thread
// takes more, because each piece interrupts the stream of every adapter's weights.
int64_t panels_at_a_time(int64_t panels, int threads, bool has_adapters) {
    const int64_t grain = panels / (threads * (has_adapters ? 2 : 8));
    return std::max<int64_t>(2, grain + grain % 2);
}

}  // namespace

template <typename Allocator>
void InputBuffer::allocate(Allocator& workspace, int64_t rows, int64_t width) {
    const int64_t padded_width = (width + kMaxGroup - 1) / kMaxGroup * kMaxGroup;
    f32 = workspace.floats(rows * width);
    scale = workspace.floats(rows * padded_width / kBlock);
    sum = workspace.floats(rows * padded_width / kBlock);
    q = reinterpret_cast<int8_t*>(workspace.floats(rows * padded_width / 4));
}

StackPass::StackPass(Stack& stack, const PassRows& rows, int64_t widest_input, std::vector<AdaptedRows> adapted_rows)
    : stack_(stack), batch_(rows.batch), store_(rows.store), state_store_(rows.states), shape_(stack.shape_), kernels_(stack.kernels_),
      pool_(stack.workers_->pool), kind_(rows.kind), shared_layers_(rows.shared_layers),
      widest_input_(std::max({widest_input, shape_.hidden_size, shape_.query_width(), shape_.intermediate_size,
                              stack.mixtures_.expert_width, stack.mixtures_.experts})),
      shares_(rows.shares), share_parts_(rows.share_parts),
      adapted_rows_(std::move(adapted_rows)) {
    for (const Layer& layer : stack.layers_) {
        int64_t width = 0;
        for (const Matrix& projection : layer.input_projections) width += projection->view().rows;
        projected_width_ = std::max(projected_width_, width);
        if (layer.output_projection) widest_input_ = std::max(widest_input_, layer.output_projection->view().cols);
        if (layer.latent) widest_input_ = std::max({widest_input_, layer.latent->shape.nope_dim, layer.latent->shape.kv_rank, projected_width_});
    }
    if (!adapted_rows_.empty()) adapter_index_of_row_.assign(static_cast<size_t>(batch_.rows), -1);
    for (size_t index = 0; index < adapted_rows_.size(); ++index) {
        for (int64_t row = adapted_rows_[index].begin; row < adapted_rows_[index].end; ++row) {
            adapter_index_of_row_[static_cast<size_t>(row)] = static_cast<int32_t>(index);
        }
    }
    lay_out_workspace();
    plan_attention(rows.starts);
    plan_states();
}

void StackPass::lay_out_workspace() {
    const int64_t rows = batch_.rows, input_rows = std::max(batch_.rows, batch_.logit_count);
    const RowKind& kv_rows = store_.kinds()[kind_];
    const int64_t heads = std::min(shape_.num_heads / kv_rows.kv_heads, kAttentionHeads);   // of a task
    scratch_per_thread_ = std::max(attention_scratch_floats(padded_dim_of(kv_rows.key_dim), kv_rows.is_latent, kAttentionRows, heads),
                                   (linear_scratch_bytes(widest_input_) + 3) / 4) + widest_input_ + kAlign;
    RecurrentShape recurrent{};
    if (stack_.first_recurrent()) recurrent = stack_.first_recurrent()->shape;
    // A state that is not stored, and the scratch of `update_state`.
    scratch_per_thread_ = std::max(scratch_per_thread_, recurrent.key_dim * (recurrent.value_dim + kStateChunk) + kAlign);
    for (int round = 0; round < 2; ++round) {   // the first round counts, the second sets the pointers
        std::vector<float>& space = stack_.workspace_;
        WorkspaceAllocator workspace(round == 0 ? nullptr : space.data());
        stream_ = workspace.floats(rows * shape_.hidden_size);
        projected_ = workspace.floats(rows * projected_width_);
        head_outputs_ = workspace.floats(rows * std::max({shape_.query_width(), recurrent.value_width(), stack_.attention_width()}));
        attention_gates_ = workspace.floats(projected_width_ > shape_.query_width() + 2 * shape_.kv_width() ? rows * shape_.query_width() : 0);
        recurrent_convolved_ = workspace.floats(rows * recurrent.channels());
        updates_ = workspace.floats(rows * recurrent.value_width());
        log_decay_sums_ = workspace.floats(rows * recurrent.heads);
        betas_ = workspace.floats(rows * recurrent.heads);
        mlp_gate_ = workspace.floats(rows * shape_.intermediate_size);
        mlp_up_ = workspace.floats(rows * shape_.intermediate_size);
        sublayer_output_ = workspace.floats(stack_.adds_directly_ ? 0 : rows * shape_.hidden_size);
        const bool convolves = stack_.convolution_width_ > 0;
        block_input_ = workspace.floats(convolves ? rows * shape_.hidden_size : 0);
        block_weights_ = workspace.floats(rows * stack_.convolution_width_);
        const int64_t pairs = shape_.head_dim / 2 * static_cast<int64_t>(stack_.ropes_.size());
        cos_ = workspace.floats(rows * pairs);
        sin_ = workspace.floats(rows * pairs);
        input_.allocate(workspace, input_rows, widest_input_);
        lay_out_mixtures(workspace);
        lay_out_latent(workspace);
        thread_scratch_ = workspace.floats(scratch_per_thread_ * pool_.size());
        const int64_t low_rank_rows = adapted_rows_.empty() ? 0 : kSitesOfOneInput * rows;
        low_rank_ = workspace.floats(low_rank_rows * kMaxRank);
        low_rank_q_ = reinterpret_cast<int8_t*>(workspace.floats(low_rank_rows * kMaxRank / 4));
        low_rank_scale_ = workspace.floats(low_rank_rows);
        low_rank_sum_ = workspace.floats(low_rank_rows);
        if (round == 0 && space.size() < static_cast<size_t>(workspace.used())) space.assign(static_cast<size_t>(workspace.used()), 0.0f);
    }
}

template <typename Allocator>
void StackPass::lay_out_mixtures(Allocator& workspace) {
    const MixtureSizes& sizes = stack_.mixtures_;
    const int64_t rows = batch_.rows, expert_rows = rows * sizes.experts_per_token;
    scores_ = workspace.floats(rows * sizes.experts);
    expert_weights_ = workspace.floats(expert_rows);
    shared_weight_ = workspace.floats(sizes.experts ? rows : 0);
    chosen_experts_ = reinterpret_cast<int32_t*>(workspace.floats(expert_rows));
    expert_gate_ = workspace.floats(expert_rows * sizes.expert_width);
    expert_up_ = workspace.floats(expert_rows * sizes.expert_width);
    expert_outputs_ = workspace.floats(expert_rows * shape_.hidden_size);
    expert_input_.allocate(workspace, expert_rows, std::max(shape_.hidden_size, sizes.expert_width));
}

template <typename Allocator>
void StackPass::lay_out_latent(Allocator& workspace) {
    const Latent* latent = stack_.latent();
    if (!latent) return;
    const int64_t rows = batch_.rows, head_rows = rows * shape_.num_heads;
    expanded_queries_ = workspace.floats(latent->query ? rows * shape_.query_width() : 0);
    latent_queries_ = workspace.floats(head_rows * latent->shape.row_dim());
    latent_outputs_ = workspace.floats(head_rows * latent->shape.kv_rank);
    head_input_.allocate(workspace, head_rows, std::max(latent->shape.nope_dim, latent->shape.kv_rank));
}
void StackPass::norm_layer_input(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    if (layer.input_projections.empty()) return;
    const SiteRange sites{index, Site::Input, static_cast<int>(layer.input_projections.size())};
    set_sublayer_input(layer.attention_norm, layer.attention_convolution.get(), *layer.input_projections.front(), sites, thread);
}

void StackPass::run_layer(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    if (!layer.input_projections.empty()) mix_positions(index, thread);
    if (layer.experts) return run_mixture(layer, thread);
    if (!layer.gate) return;
    const SiteRange gate_and_up{index, Site::Gate, layer.up ? 2 : 1};
    set_sublayer_input(layer.mlp_norm, layer.mlp_convolution.get(), *layer.gate, gate_and_up, thread);
    run_mlp(layer, gate_and_up, {index, Site::Down, 1}, thread);
}

void StackPass::mix_positions(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    std::vector<LinearJob> jobs;
    int64_t width = 0;
    for (const Matrix& projection : layer.input_projections) {
        jobs.push_back({projection.get(), {projected_ + width, projected_width_, nullptr, false}});
        width += projection->view().rows;
    }
    run_linears(jobs, linear_input(*layer.input_projections.front(), batch_.rows), thread, {index, Site::Input, static_cast<int>(jobs.size())});
    const SiteRange output{index, Site::Output, 1};
    if (layer.recurrent) {
        run_recurrence(index, thread);
        set_input_rows(projected_ + layer.recurrent->shape.channels(), projected_width_, *layer.output_projection, output, thread);
    } else if (layer.latent) {
        attend_to_latent_rows(index, thread);
        set_input_rows(head_outputs_, stack_.attention_width(), *layer.output_projection, output, thread);
    } else {
        rotate_and_store_heads(index, true);
        attend(index, thread);
        apply_gates(layer);
        set_input_rows(head_outputs_, shape_.query_width(), *layer.output_projection, output, thread);
    }
    add_to_stream(layer, *layer.output_projection, layer.post_attention_norm, layer.attention_convolution.get(), output, thread);
}

void StackPass::store_kv_rows(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    const int64_t query = layer.input_projections[0]->view().rows, kv = shape_.kv_width();
    run_linears({{layer.input_projections[1].get(), {projected_ + query, projected_width_, nullptr, false}},
                 {layer.input_projections[2].get(), {projected_ + query + kv, projected_width_, nullptr, false}}},
                linear_input(*layer.input_projections[1], batch_.rows), thread, {index, Site::Key, 2});
    rotate_and_store_heads(index, false);
}

void StackPass::run_mlp(const Layer& layer, const SiteRange& gate_and_up, const SiteRange& down, int thread) {
    run_gate_and_up(layer, gate_and_up, thread);
    set_input_rows(mlp_gate_, layer.gate->view().rows, *layer.down, down, thread);
    add_to_stream(layer, *layer.down, layer.post_mlp_norm, layer.mlp_convolution.get(), down, thread);
}

void StackPass::add_to_stream(const Layer& layer, const PackedMatrix& matrix, const std::vector<float>& norm,
                              const BlockConvolution* convolution, const SiteRange& sites, int thread) {
    const int64_t hidden = shape_.hidden_size;
    const bool is_direct = layer.adds_directly();
    run_linears({{&matrix, {is_direct ? stream_ : sublayer_output_, hidden, nullptr, is_direct}}}, linear_input(matrix, batch_.rows), thread, sites);
    if (is_direct) return;
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        float *addend = sublayer_output_ + row * hidden, *out = stream(row);
        if (!norm.empty()) kernels_.rms_norm(addend, norm.data(), shape_.rms_norm_eps, hidden, addend);
        if (convolution) {   // it reads other rows of `sublayer_output_`, which therefore stay as they are
            addend = scratch_of(thread);
            convolve_block_row(*convolution, 1, sublayer_output_, row, addend);
        }
        for (int64_t d = 0; d < hidden; ++d) out[d] += layer.residual_scale * addend[d];
    });
}

void StackPass::set_input_row(const PackedMatrix& reader, const float* values, int64_t row, const ActivationView& input) const {
    const MatrixView& w = reader.view();
    if (w.format == WeightFormat::F32) {
        float* input_row = input.f32 + row * input.cols;
        if (input_row != values) std::memcpy(input_row, values, static_cast<size_t>(input.cols) * sizeof(float));
        return;
    }
    kernels_.quantize(values, input.cols, w.grouping, input.q + row * input.groups * w.grouping.group_size,
                      input.scale + row * input.groups, input.sum + row * input.groups);
}

void StackPass::norm_rows(const std::vector<float>& weight, const PackedMatrix& reader, const SiteRange& sites, int thread) {
    if (weight.empty()) return set_input_rows(stream_, shape_.hidden_size, reader, sites, thread);
    const ActivationView input = linear_input(reader, batch_.rows);
    float* normed = scratch_of(thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        kernels_.rms_norm(stream(row), weight.data(), shape_.rms_norm_eps, shape_.hidden_size, normed);
        set_input_row(reader, normed, row, input);
        project_low_rank(reader, row, sites, thread);
    });
}

void StackPass::set_input_rows(const float* values, int64_t stride, const PackedMatrix& reader, const SiteRange& sites, int thread) {
    const ActivationView input = linear_input(reader, batch_.rows);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        set_input_row(reader, values + row * stride, row, input);
        project_low_rank(reader, row, sites, thread);
    });
}

void StackPass::project_low_rank(const PackedMatrix& reader, int64_t row, const SiteRange& sites, int thread) {
    if (adapter_index_of_row_.empty() || adapter_index_of_row_[static_cast<size_t>(row)] < 0) return;
    const AdaptedRows& rows = adapted_rows_[static_cast<size_t>(adapter_index_of_row_[static_cast<size_t>(row)])];
    const ActivationView input = linear_input(reader, batch_.rows);
    const int64_t groups = input.groups;
    const ActivationView input_row{1, input.cols, groups, input.q + row * groups * reader.view().grouping.group_size,
                                   input.scale + row * groups, input.sum + row * groups, input.f32 + row * input.cols};
    for (int offset = 0; offset < sites.count; ++offset) {
        const size_t site = static_cast<size_t>(sites.first) + static_cast<size_t>(offset);
        const Factor& factor = rows.adapter->layers[static_cast<size_t>(sites.layer)][site];
        if (!factor.down) continue;
        const ActivationView low_rank = low_rank_input(rows, factor, offset);
        const int64_t rank = factor.rank(), row_in_request = row - rows.begin;
        float* out = low_rank.f32 + row_in_request * rank;
        kernels_.linear(factor.down->view(), input_row, 0, factor.down->panels(), {out, rank, nullptr, false}, byte_scratch_of(thread));
        set_input_row(*factor.up, out, row_in_request, low_rank);
    }
}

ActivationView StackPass::low_rank_input(const AdaptedRows& rows, const Factor& factor, int offset) const {
    const int64_t first = offset * batch_.rows + rows.begin;
    return {rows.end - rows.begin, factor.rank(), factor.up->view().groups, low_rank_q_ + first * kMaxRank, low_rank_scale_ + first,
            low_rank_sum_ + first, low_rank_ + first * kMaxRank};
}

void StackPass::add_adapters(const SiteRange& sites, int offset, int64_t panel_begin, int64_t panel_end, const LinearOutput& target,
                             int thread) {
    if (offset >= sites.count) return;
    const size_t site = static_cast<size_t>(sites.first) + static_cast<size_t>(offset);
    for (const AdaptedRows& rows : adapted_rows_) {
        const Factor& factor = rows.adapter->layers[static_cast<size_t>(sites.layer)][site];
        if (!factor.up) continue;
        kernels_.linear(factor.up->view(), low_rank_input(rows, factor, offset), panel_begin, panel_end,
                        {target.out + rows.begin * target.stride, target.stride, nullptr, true}, byte_scratch_of(thread));
    }
}

void StackPass::run_linears(const std::vector<LinearJob>& jobs, const ActivationView& input, int thread, const SiteRange& sites) {
    int64_t panels = 0;
    for (const LinearJob& job : jobs) panels += job.matrix->panels();
    const int64_t grain = panels_at_a_time(panels, pool_.size(), !adapted_rows_.empty());
    pool_.parallel_for(panels, grain, [&](int64_t begin, int64_t end) {
        int offset = 0;   // of the job's site
        for (const LinearJob& job : jobs) {   // [begin, end) is relative to the job's first panel
            const int64_t job_panels = job.matrix->panels();
            const int64_t panel_begin = std::max<int64_t>(begin, 0), panel_end = std::min(end, job_panels);
            if (panel_begin < panel_end) {
                LinearOutput target = job.target;
                target.out += panel_begin * kPanelRows;
                target.bias = job.matrix->bias();
                kernels_.linear(job.matrix->view(), input, panel_begin, panel_end, target, byte_scratch_of(thread));
                add_adapters(sites, offset, panel_begin, panel_end, target, thread);
            }
            begin -= job_panels;
            end -= job_panels;
            ++offset;
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

void StackPass::run_gate_and_up(const Layer& layer, const SiteRange& sites, int thread) {
    const int64_t width = layer.gate->view().rows, panels = layer.gate->panels();
    const bool has_shared_weight = layer.experts && !layer.experts->shared_gate.empty();
    const ActivationView input = linear_input(*layer.gate, batch_.rows);
    const int64_t grain = panels_at_a_time(panels, pool_.size(), !adapted_rows_.empty());
    pool_.parallel_for(panels, grain, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * kPanelRows, count = std::min(end * kPanelRows, width) - first;
        const LinearOutput gate{mlp_gate_ + first, width, layer.gate->bias(), false};
        kernels_.linear(layer.gate->view(), input, begin, end, gate, byte_scratch_of(thread));
        add_adapters(sites, 0, begin, end, gate, thread);
        if (layer.up) {
            const LinearOutput up{mlp_up_ + first, width, layer.up->bias(), false};
            kernels_.linear(layer.up->view(), input, begin, end, up, byte_scratch_of(thread));
            add_adapters(sites, 1, begin, end, up, thread);
        }
        for (int64_t row = 0; row < batch_.rows; ++row) {
            float* gate = mlp_gate_ + row * width + first;
            activate(layer, gate, mlp_up_ + row * width + first, count);
            for (int64_t i = 0; has_shared_weight && i < count; ++i) gate[i] *= shared_weight_[row];
        }
    });
}

}  // namespace foreword
