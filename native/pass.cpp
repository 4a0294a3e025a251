#include "pass.h"

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

// Row `row` of a linear map's input, from `values` (which may be the plain input itself).
void fill_row(const KernelTable& kernels, const MatrixView& reader, const float* values, int64_t row,
                     const ActivationView& into) {
    if (reader.form == Form::F32) {
        float* plain = into.f32 + row * into.cols;
        if (plain != values) std::memcpy(plain, values, static_cast<size_t>(into.cols) * sizeof(float));
        return;
    }
    kernels.quantize(values, into.cols, reader.grouping, into.q + row * into.groups * reader.grouping.group,
                     into.scale + row * into.groups, into.sum + row * into.groups);
}

// Panels that a thread takes at a time. With many rows they are taken in pairs, which some kernels compute side by side.
int64_t panels_at_a_time(int64_t panels, int64_t rows, int threads) {
    const int64_t grain = std::max<int64_t>(1, panels / (threads * 8));
    return rows >= kManyRows ? grain + grain % 2 : grain;
}

}  // namespace

Pass::Pass(Decoder& decoder, const Batch& batch, KvStore& store, float* logits, float* hidden)
    : decoder_(decoder), batch_(batch), store_(store), shape_(decoder.shape_), kernels_(decoder.kernels_), pool_(decoder.pool_),
      logits_(logits), hidden_(hidden), heads_width_(shape_.query_width() + 2 * shape_.kv_width()) {
    lay_out();
    plan_attention();
}

void Pass::lay_out() {
    const int64_t rows = batch_.rows, inputs = std::max(batch_.rows, batch_.wanted);
    const int64_t widest = std::max({shape_.hidden_size, shape_.query_width(), shape_.intermediate_size});
    const int64_t padded = (widest + kMaxGroup - 1) / kMaxGroup * kMaxGroup, groups = padded / kBlock;
    const int64_t group_heads = shape_.num_heads / shape_.num_kv_heads;
    scratch_each_ = std::max(attention_scratch(store_.kinds().front().padded_dim(), kAttentionRows, group_heads),
                             (linear_scratch(widest) + 3) / 4) + widest + kAlign;
    for (int round = 0; round < 2; ++round) {
        std::vector<float>& space = decoder_.workspace_;
        Cutter cut(round == 0 ? nullptr : space.data());
        stream_ = cut.floats(rows * shape_.hidden_size);
        heads_ = cut.floats(rows * heads_width_);
        attended_ = cut.floats(rows * shape_.query_width());
        gate_ = cut.floats(rows * shape_.intermediate_size);
        up_ = cut.floats(rows * shape_.intermediate_size);
        cos_ = cut.floats(rows * shape_.head_dim / 2);
        sin_ = cut.floats(rows * shape_.head_dim / 2);
        input_f32_ = cut.floats(inputs * widest);
        input_scale_ = cut.floats(inputs * groups);
        input_sum_ = cut.floats(inputs * groups);
        input_q_ = reinterpret_cast<int8_t*>(cut.floats(inputs * padded / 4));
        thread_scratch_ = cut.floats(scratch_each_ * pool_.size());
        if (round == 0 && space.size() < static_cast<size_t>(cut.used())) space.assign(static_cast<size_t>(cut.used()), 0.0f);
    }
}

// The same tasks serve every layer. Small batches are split by query head, so that all threads have work.
void Pass::plan_attention() {
    const int64_t group = shape_.num_heads / shape_.num_kv_heads;
    const int64_t split = batch_.rows * shape_.num_kv_heads < 4 * pool_.size() ? std::min<int64_t>(2, group) : group;
    for (int64_t request = 0; request < batch_.requests; ++request) {
        const int64_t first = batch_.row_starts[request], last = batch_.row_starts[request + 1];
        const int64_t share = (last - first + 2 * pool_.size() - 1) / (2 * pool_.size());
        const int64_t step = std::min(kAttentionRows, std::max<int64_t>(share, 1));
        for (int64_t row = first; row < last; row += step) {
            for (int64_t head = 0; head < shape_.num_heads; head = tasks_.back().head_end) {
                tasks_.push_back({batch_.block_tables + request * batch_.pages, batch_.prefix_lens, batch_.ancestor_masks,
                                  heads_, attended_, heads_width_, shape_.query_width(), row, std::min(row + step, last),
                                  head / group, head, std::min(head + split, (head / group + 1) * group),
                                  1.0f / std::sqrt(static_cast<float>(shape_.head_dim)), nullptr});
            }
        }
    }
}

void Pass::run() {
    pool_.run([this](int thread) { work(thread); });
}

void Pass::work(int thread) {
    move_kv_rows();
    embed();
    const int64_t layers = static_cast<int64_t>(decoder_.layers_.size());
    for (int64_t index = 0; index < layers; ++index) {
        keep_hidden(index);
        layer(index, thread);
    }
    keep_hidden(layers);
    logits_of_wanted_rows(thread);
}

void Pass::move_kv_rows() {
    if (batch_.copies == 0) return;
    pool_.share(store_.layers(), 1, [&](int64_t layer, int64_t) { store_.move(layer, batch_.kv_copies, batch_.copies); });
}

void Pass::embed() {
    const int64_t half = shape_.head_dim / 2;
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        kernels_.dequantize_row(decoder_.embedding_->view(), batch_.token_ids[row], stream_ + row * shape_.hidden_size);
        for (int64_t i = 0; i < half; ++i) {
            const float angle = static_cast<float>(batch_.positions[row]) * decoder_.inverse_frequencies_[static_cast<size_t>(i)];
            cos_[row * half + i] = std::cos(angle);
            sin_[row * half + i] = std::sin(angle);
        }
    });
}

void Pass::layer(int64_t index, int thread) {
    const Layer& layer = decoder_.layers_[static_cast<size_t>(index)];
    const int64_t rows = batch_.rows, hidden = shape_.hidden_size, query = shape_.query_width(), kv = shape_.kv_width();
    norm_rows(layer.attention_norm.data(), *layer.query, thread);
    linears({{layer.query.get(), {heads_, heads_width_, nullptr, false}},
             {layer.key.get(), {heads_ + query, heads_width_, nullptr, false}},
             {layer.value.get(), {heads_ + query + kv, heads_width_, nullptr, false}}},
            activations(*layer.query, rows), thread);
    place_heads(index);
    attend(index, thread);
    quantize_rows(attended_, query, *layer.output, activations(*layer.output, rows));
    linears({{layer.output.get(), {stream_, hidden, nullptr, true}}}, activations(*layer.output, rows), thread);
    norm_rows(layer.mlp_norm.data(), *layer.gate, thread);
    gate_and_up(layer, thread);
    quantize_rows(gate_, shape_.intermediate_size, *layer.down, activations(*layer.down, rows));
    linears({{layer.down.get(), {stream_, hidden, nullptr, true}}}, activations(*layer.down, rows), thread);
}

ActivationView Pass::activations(const PackedMatrix& reader, int64_t rows) const {
    const MatrixView& w = reader.view();
    return {rows, w.cols, w.groups, input_q_, input_scale_, input_sum_, input_f32_};
}

void Pass::norm_rows(const float* weight, const PackedMatrix& reader, int thread) {
    const ActivationView into = activations(reader, batch_.rows);
    float* normed = floats_of(thread);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        kernels_.rms_norm(stream_ + row * shape_.hidden_size, weight, shape_.rms_norm_eps, shape_.hidden_size, normed);
        fill_row(kernels_, reader.view(), normed, row, into);
    });
}

void Pass::quantize_rows(const float* values, int64_t width, const PackedMatrix& reader, const ActivationView& into) {
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        fill_row(kernels_, reader.view(), values + row * width, row, into);
    });
}

// Norms and rotates queries in place; rotated keys and values go to their slots.
void Pass::place_heads(int64_t index) {
    const Layer& layer = decoder_.layers_[static_cast<size_t>(index)];
    const KvView rows = kv(index);
    const int64_t dim = shape_.head_dim, half = dim / 2;
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        float* heads = heads_ + row * heads_width_;
        for (int64_t head = 0; head < shape_.num_heads + shape_.num_kv_heads; ++head) {
            float* one = heads + head * dim;
            const std::vector<float>& norm = head < shape_.num_heads ? layer.query_norm : layer.key_norm;
            if (!norm.empty()) kernels_.rms_norm(one, norm.data(), shape_.rms_norm_eps, dim, one);
            kernels_.rotate(one, cos_ + row * half, sin_ + row * half, dim);
        }
        const float* keys = heads + shape_.query_width();
        for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
            kernels_.store_kv(rows, batch_.slots[row], head, keys + head * dim, keys + shape_.kv_width() + head * dim);
        }
    });
}

void Pass::attend(int64_t index, int thread) {
    const KvView rows = kv(index);
    pool_.share(static_cast<int64_t>(tasks_.size()), 1, [&](int64_t number, int64_t) {
        AttentionTask task = tasks_[static_cast<size_t>(number)];
        task.scratch = floats_of(thread);
        kernels_.attention(rows, task);
    });
}

void Pass::linears(const std::vector<Job>& jobs, const ActivationView& input, int thread) {
    int64_t panels = 0;
    for (const Job& job : jobs) panels += job.matrix->panels();
    const int64_t grain = panels_at_a_time(panels, input.rows, pool_.size());
    pool_.share(panels, grain, [&](int64_t begin, int64_t end) {
        for (const Job& job : jobs) {
            const int64_t here = job.matrix->panels();
            const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, here);
            if (first < last) {
                LinearOutput target = job.target;
                target.out += first * kPanelRows;
                target.bias = job.matrix->bias();
                kernels_.linear(job.matrix->view(), input, first, last, target, bytes_of(thread));
            }
            begin -= here;
            end -= here;
        }
    });
}

void Pass::gate_and_up(const Layer& layer, int thread) {
    const int64_t width = shape_.intermediate_size, panels = layer.gate->panels();
    const ActivationView input = activations(*layer.gate, batch_.rows);
    const int64_t grain = panels_at_a_time(panels, input.rows, pool_.size());
    pool_.share(panels, grain, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * kPanelRows, count = std::min(end * kPanelRows, width) - first;
        kernels_.linear(layer.gate->view(), input, begin, end, {gate_ + first, width, layer.gate->bias(), false}, bytes_of(thread));
        kernels_.linear(layer.up->view(), input, begin, end, {up_ + first, width, layer.up->bias(), false}, bytes_of(thread));
        for (int64_t row = 0; row < batch_.rows; ++row) {
            kernels_.silu_mul(gate_ + row * width + first, up_ + row * width + first, count);
        }
    });
}

void Pass::keep_hidden(int64_t index) {
    const int64_t width = shape_.hidden_size;
    for (size_t place = 0; place < batch_.taps.size(); ++place) {
        const Tap& tap = batch_.taps[place];
        if (tap.layer != index) continue;
        float* out = hidden_ + static_cast<int64_t>(place) * batch_.hidden_wanted * width;
        pool_.share(batch_.hidden_wanted, 1, [&](int64_t i, int64_t) {
            const float* row = stream_ + batch_.hidden_rows[i] * width;
            if (tap.normed) final_norm(row, out + i * width);
            else std::copy_n(row, width, out + i * width);
        });
    }
}

void Pass::final_norm(const float* row, float* out) const {
    kernels_.rms_norm(row, decoder_.final_norm_.data(), shape_.rms_norm_eps, shape_.hidden_size, out);
}

void Pass::logits_of_wanted_rows(int thread) {
    if (batch_.wanted == 0) return;
    const PackedMatrix& head = *decoder_.head_;
    ActivationView into = activations(head, batch_.wanted);
    std::vector<float> normed(static_cast<size_t>(shape_.hidden_size));
    pool_.share(batch_.wanted, 1, [&](int64_t i, int64_t) {
        final_norm(stream_ + batch_.logit_rows[i] * shape_.hidden_size, normed.data());
        fill_row(kernels_, head.view(), normed.data(), i, into);
    });
    linears({{&head, {logits_, shape_.vocab_size, nullptr, false}}}, into, thread);
}

}  // namespace foreword
