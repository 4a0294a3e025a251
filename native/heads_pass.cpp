// Heads in a pass: turned, kept, attended over.
#include <algorithm>
#include <cmath>

#include "stack_pass.h"

namespace foreword {

namespace {

// Tasks for every thread from which on it does not matter that some threads have one more than others.
constexpr int64_t kManyTasks = 4;

// Adds at most `count` parts of a task, by rows, or by heads where these are too few.
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

// The same tasks serve every layer. Reading keys and values takes longer than a few rows' sums over them, so rows and heads that
// read the same ones stay together. Only what is left when every thread has as many of these as the others is split further.
void StackPass::plan_attention(const int32_t* starts) {
    const int64_t group = shape_.num_heads / shape_.num_kv_heads;
    std::vector<AttentionTask> units;
    for (int64_t request = 0; request < batch_.requests; ++request) {
        const int64_t first = batch_.row_starts[request], last = batch_.row_starts[request + 1];
        for (int64_t row = first; row < last; row += kAttentionRows) {
            for (int64_t head = 0; head < shape_.num_heads; head += group) {
                units.push_back({batch_.block_tables + request * batch_.pages, batch_.prefix_lens, batch_.ancestor_masks,
                                 heads_, attended_, heads_width_, shape_.query_width(), row, std::min(row + kAttentionRows, last),
                                 head / group, head, head + group, starts ? starts[request] : 0, 0,
                                 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)), 0.0f, nullptr, nullptr});
            }
        }
    }
    const int64_t threads = pool_.size(), count = static_cast<int64_t>(units.size());
    const int64_t rest = count < kManyTasks * threads ? count % threads : 0;
    std::vector<AttentionTask> parts;
    for (int64_t unit = count - rest; unit < count; ++unit) split_task(units[static_cast<size_t>(unit)], threads / rest, parts);
    // Every thread begins with a stretch of its own of the list.
    for (int64_t thread = 0; thread < threads; ++thread) {
        const auto take = [&](const std::vector<AttentionTask>& from, int64_t size) {
            tasks_.insert(tasks_.end(), from.begin() + size * thread / threads, from.begin() + size * (thread + 1) / threads);
        };
        take(units, count - rest);
        take(parts, static_cast<int64_t>(parts.size()));
    }
}

void StackPass::turn_row(int64_t row) {
    for (size_t number = 0; number < stack_.ropes_.size(); ++number) {
        const Rope& rope = stack_.ropes_[number];
        const int64_t first = turns_at(number, row);
        for (size_t i = 0; i < rope.inverse_frequencies.size(); ++i) {
            const float angle = static_cast<float>(batch_.positions[row]) * rope.inverse_frequencies[i];
            cos_[first + static_cast<int64_t>(i)] = rope.magnitude * std::cos(angle);
            sin_[first + static_cast<int64_t>(i)] = rope.magnitude * std::sin(angle);
        }
    }
}

// Norms and rotates queries in place; rotated keys and values go to their slots.
void StackPass::place_heads(int64_t index, bool with_queries) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    const KvView rows = kv(index);
    const int64_t dim = shape_.head_dim, half = static_cast<int64_t>(stack_.ropes_[layer.rope].inverse_frequencies.size());
    const bool together = layer.query_norm.size() > static_cast<size_t>(dim);
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        float *heads = heads_ + row * heads_width_, *keys = heads + layer.inputs[0]->view().rows;
        const int64_t turns = turns_at(layer.rope, row);
        if (with_queries) take_gates(layer, row);
        if (together) {
            if (with_queries) kernels_.rms_norm(heads, layer.query_norm.data(), shape_.rms_norm_eps, shape_.query_width(), heads);
            kernels_.rms_norm(keys, layer.key_norm.data(), shape_.rms_norm_eps, shape_.kv_width(), keys);
        }
        for (int64_t head = with_queries ? 0 : shape_.num_heads; head < shape_.num_heads + shape_.num_kv_heads; ++head) {
            const bool is_query = head < shape_.num_heads;
            float* one = is_query ? heads + head * dim : keys + (head - shape_.num_heads) * dim;
            const std::vector<float>& norm = is_query ? layer.query_norm : layer.key_norm;
            if (!norm.empty() && !together) kernels_.rms_norm(one, norm.data(), shape_.rms_norm_eps, dim, one);
            if (layer.rotated) kernels_.rotate(one, cos_ + turns, sin_ + turns, 2 * half);
        }
        for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
            kernels_.store_kv(rows, batch_.slots[row], head, keys + head * dim, keys + shape_.kv_width() + head * dim);
        }
    });
}

void StackPass::take_gates(const Layer& layer, int64_t row) {
    const int64_t dim = shape_.head_dim, width = shape_.query_width();
    if (layer.inputs[0]->view().rows == width) return;
    float *heads = heads_ + row * heads_width_, *gates = gates_ + row * width;
    for (int64_t head = 0; head < shape_.num_heads; ++head) {
        std::copy_n(heads + (2 * head + 1) * dim, dim, gates + head * dim);
        std::copy_n(heads + 2 * head * dim, dim, heads + head * dim);   // over gates that are taken, and its own place
    }
}

void StackPass::open_gates(const Layer& layer) {
    const int64_t width = shape_.query_width();
    if (layer.inputs[0]->view().rows == width) return;
    pool_.share(batch_.rows, 1, [&](int64_t row, int64_t) {
        kernels_.sigmoid_mul(attended_ + row * width, gates_ + row * width, width);
    });
}

void StackPass::attend(int64_t index, int thread) {
    const KvView rows = kv(index);
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    pool_.share(static_cast<int64_t>(tasks_.size()), 1, [&](int64_t number, int64_t) {
        AttentionTask task = tasks_[static_cast<size_t>(number)];
        if (index < lent_) task.first = 0;
        task.window = layer.window;
        task.softcap = layer.softcap;
        if (!layer.sinks.empty()) task.sinks = layer.sinks.data();
        if (layer.score_scale > 0.0f) task.scale = layer.score_scale;
        task.scratch = floats_of(thread);
        kernels_.attention(rows, task);
    });
}

}  // namespace foreword
