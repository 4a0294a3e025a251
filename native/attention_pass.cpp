// Attention in a pass: rotary embedding, storing keys and values, and the tasks of the attention kernel.
#include <algorithm>
#include <cmath>

#include "stack_pass.h"

namespace foreword {

namespace {

// From this many tasks per thread on, it does not matter that some threads have one task more than others.
constexpr int64_t kManyTasks = 4;

// Splits a task by rows, and by heads if it has few rows, and appends the parts, at most `count`.
void split_task(const AttentionTask& task, int64_t count, std::vector<AttentionTask>& parts) {
    const int64_t rows = task.row_end - task.row_begin, heads = task.head_end - task.head_begin;
    const int64_t by_rows = std::min(rows, count), by_heads = std::min(heads, count / by_rows);
    for (int64_t r = 0; r < by_rows; ++r) {
        for (int64_t h = 0; h < by_heads; ++h) {
            AttentionTask part = task;
            part.row_begin = task.row_begin + rows * r / by_rows;
            part.row_end = task.row_begin + rows * (r + 1) / by_rows;
            part.head_begin = task.head_begin + heads * h / by_heads;
            part.head_end = task.head_begin + heads * (h + 1) / by_heads;
            parts.push_back(part);
        }
    }
}

}  // namespace

// Makes the list of attention tasks, which all layers use. A task has rows and heads that read the same keys and values,
// because reading them takes longer than the sums of a few rows. If the tasks cannot be divided evenly among the threads,
// the remaining ones are split.
void StackPass::plan_attention(const int32_t* starts) {
    const Latent* latent = stack_.latent();
    const int64_t heads_per_kv_head = latent ? shape_.num_heads : shape_.num_heads / shape_.num_kv_heads;
    const float *queries = latent ? latent_queries_ : projected_;
    float* out = latent ? latent_outputs_ : head_outputs_;
    const int64_t query_stride = latent ? shape_.num_heads * latent->shape.row_dim() : projected_width_;
    const int64_t out_stride = latent ? shape_.num_heads * latent->shape.kv_rank : shape_.query_width();
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    std::vector<AttentionTask> whole_tasks;
    for (int64_t request = 0; request < batch_.requests; ++request) {
        const int64_t begin = batch_.row_starts[request], end = batch_.row_starts[request + 1];
        for (int64_t row = begin; row < end; row += kAttentionRows) {
            for (int64_t head = 0, next = 0; head < shape_.num_heads; head = next) {
                const int64_t kv_head = head / heads_per_kv_head;
                next = std::min(head + kAttentionHeads, (kv_head + 1) * heads_per_kv_head);
                whole_tasks.push_back({batch_.block_tables + request * batch_.pages, batch_.prefix_lens, batch_.ancestor_masks,
                                       queries, out, query_stride, out_stride, row, std::min(row + kAttentionRows, end), kv_head, head, next,
                                       starts ? starts[request] : 0, 0, scale, 0.0f, nullptr, nullptr});
            }
        }
    }
    const int64_t threads = pool_.size(), count = static_cast<int64_t>(whole_tasks.size());
    const int64_t remainder = count < kManyTasks * threads ? count % threads : 0;
    std::vector<AttentionTask> parts;
    for (int64_t i = count - remainder; i < count; ++i) split_task(whole_tasks[static_cast<size_t>(i)], threads / remainder, parts);
    // `parallel_for` lets each thread begin with its own section of the list, so each section has whole tasks and parts.
    for (int64_t thread = 0; thread < threads; ++thread) {
        const auto append = [&](const std::vector<AttentionTask>& from, int64_t size) {
            tasks_.insert(tasks_.end(), from.begin() + size * thread / threads, from.begin() + size * (thread + 1) / threads);
        };
        append(whole_tasks, count - remainder);
        append(parts, static_cast<int64_t>(parts.size()));
    }
}

void StackPass::compute_rope_angles(int64_t row) {
    for (size_t rope_index = 0; rope_index < stack_.ropes_.size(); ++rope_index) {
        const Rope& rope = stack_.ropes_[rope_index];
        const int64_t first = rope_offset(rope_index, row);
        for (size_t i = 0; i < rope.inverse_frequencies.size(); ++i) {
            const float angle = static_cast<float>(batch_.positions[row]) * rope.inverse_frequencies[i];
            cos_[first + static_cast<int64_t>(i)] = rope.magnitude * std::cos(angle);
            sin_[first + static_cast<int64_t>(i)] = rope.magnitude * std::sin(angle);
        }
    }
}

void StackPass::rotate_and_store_heads(int64_t index, bool with_queries) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    const KvView layer_kv = kv(index);
    const int64_t dim = shape_.head_dim, half = static_cast<int64_t>(stack_.ropes_[layer.rope_index].inverse_frequencies.size());
    const bool norms_all_heads = layer.query_norm.size() > static_cast<size_t>(dim);   // together, not each by itself
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        float *queries = projected_ + row * projected_width_, *keys = queries + layer.input_projections[0]->view().rows;
        const int64_t angles = rope_offset(layer.rope_index, row);
        if (with_queries) split_gates(layer, row);
        if (norms_all_heads) {
            if (with_queries) kernels_.rms_norm(queries, layer.query_norm.data(), shape_.rms_norm_eps, shape_.query_width(), queries);
            kernels_.rms_norm(keys, layer.key_norm.data(), shape_.rms_norm_eps, shape_.kv_width(), keys);
        }
        // Query heads, then key heads.
        for (int64_t i = with_queries ? 0 : shape_.num_heads; i < shape_.num_heads + shape_.num_kv_heads; ++i) {
            const bool is_query = i < shape_.num_heads;
            float* head = is_query ? queries + i * dim : keys + (i - shape_.num_heads) * dim;
            const std::vector<float>& norm = is_query ? layer.query_norm : layer.key_norm;
            if (!norm.empty() && !norms_all_heads) kernels_.rms_norm(head, norm.data(), shape_.rms_norm_eps, dim, head);
            if (layer.has_rope) kernels_.rotate(head, cos_ + angles, sin_ + angles, 2 * half);
        }
        for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
            kernels_.store_kv(layer_kv, batch_.slots[row], head, keys + head * dim, keys + shape_.kv_width() + head * dim);
        }
    });
}

void StackPass::split_gates(const Layer& layer, int64_t row) {
    const int64_t dim = shape_.head_dim, width = shape_.query_width();
    if (layer.input_projections[0]->view().rows == width) return;
    float *queries = projected_ + row * projected_width_, *gates = attention_gates_ + row * width;
    for (int64_t head = 0; head < shape_.num_heads; ++head) {   // each head has its query, then its gate
        std::copy_n(queries + (2 * head + 1) * dim, dim, gates + head * dim);
        std::copy_n(queries + 2 * head * dim, dim, queries + head * dim);   // overwrites only what was copied before
    }
}

void StackPass::apply_gates(const Layer& layer) {
    const int64_t width = shape_.query_width();
    if (layer.input_projections[0]->view().rows == width) return;
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        kernels_.sigmoid_mul(head_outputs_ + row * width, attention_gates_ + row * width, width);
    });
}

void StackPass::attend(int64_t index, int thread) {
    const KvView layer_kv = kv(index);
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    pool_.parallel_for(static_cast<int64_t>(tasks_.size()), 1, [&](int64_t i, int64_t) {
        AttentionTask task = tasks_[static_cast<size_t>(i)];
        if (index < shared_layers_) task.start = 0;
        task.window = layer.window;
        task.softcap = layer.softcap;
        if (!layer.sinks.empty()) task.sinks = layer.sinks.data();
        if (layer.score_scale > 0.0f) task.scale = layer.score_scale;
        task.scratch = scratch_of(thread);
        task.share_parts = share_parts_;
        if (shares_ && layer.window == 0) task.shares = shares_ + task.row_begin * shape_.num_heads * 2 * share_parts_;
        kernels_.attention(layer_kv, task);
    });
}

}  // namespace foreword
