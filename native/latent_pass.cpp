// Latent attention in a pass, in the absorbed form. Every head has two matrices: its query is multiplied with the first one before
// the attention over latent rows, and its result with the second one afterwards.
#include <algorithm>

#include "stack_pass.h"

namespace foreword {

void StackPass::multiply_heads(const std::vector<Matrix>& matrices, float* out, int64_t head_stride, int thread) {
    const int64_t panels = matrices.front()->panels(), heads = static_cast<int64_t>(matrices.size());
    share_panels(heads, panels, [&](int64_t head, int64_t begin, int64_t end) {
        const PackedMatrix& matrix = *matrices[static_cast<size_t>(head)];
        kernels_.linear(matrix.view(), head_input(matrix, head), begin, end,
                        {out + head * head_stride + begin * kPanelRows, heads * head_stride, nullptr, false}, byte_scratch_of(thread));
    });
}

void StackPass::expand_queries(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    const PackedMatrix& expansion = *layer.latent->query;
    const ActivationView input = linear_input(expansion, batch_.rows);
    float* normed = scratch_of(thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) {
        kernels_.rms_norm(projected_ + row * projected_width_, layer.query_norm.data(), layer.latent->eps, input.cols, normed);
        set_input_row(expansion, normed, row, input);
    });
    run_linears({{&expansion, {expanded_queries_, shape_.query_width(), nullptr, false}}}, input, thread);
}

// Rotates a row's queries, sets the inputs of the heads' first matrices, and stores the latent row.
void StackPass::store_latent_row(const Layer& layer, const KvView& layer_kv, int64_t row) {
    const Latent& latent = *layer.latent;
    const LatentShape& shape = latent.shape;
    const int64_t angles = rope_offset(layer.rope_index, row);
    const auto rotate = [&](float* numbers) {
        if (layer.has_rope) kernels_.rotate(numbers, cos_ + angles, sin_ + angles, shape.rope_dim);
    };
    float* projected = projected_ + row * projected_width_;
    float* queries = latent.query ? expanded_queries_ + row * shape_.query_width() : projected;
    for (int64_t head = 0; head < shape_.num_heads; ++head) {
        float* query = queries + head * shape.head_dim();
        set_input_row(*latent.keys[static_cast<size_t>(head)], query, row, head_input(*latent.keys[static_cast<size_t>(head)], head));
        rotate(query + shape.nope_dim);
        float* latent_query = latent_queries_ + (row * shape_.num_heads + head) * shape.row_dim();
        std::copy_n(query + shape.nope_dim, shape.rope_dim, latent_query + shape.kv_rank);
    }
    float* stored = projected + layer.input_projections[0]->view().rows;
    kernels_.rms_norm(stored, layer.key_norm.data(), latent.eps, shape.kv_rank, stored);
    rotate(stored + shape.kv_rank);
    kernels_.store_kv(layer_kv, batch_.slots[row], 0, stored, nullptr);
}

void StackPass::attend_to_latent_rows(int64_t index, int thread) {
    const Layer& layer = stack_.layers_[static_cast<size_t>(index)];
    const Latent& latent = *layer.latent;
    const KvView layer_kv = kv(index);
    if (latent.query) expand_queries(index, thread);
    pool_.parallel_for(batch_.rows, 1, [&](int64_t row, int64_t) { store_latent_row(layer, layer_kv, row); });
    multiply_heads(latent.keys, latent_queries_, latent.shape.row_dim(), thread);
    attend(index, thread);
    pool_.parallel_for(batch_.rows * shape_.num_heads, 1, [&](int64_t i, int64_t) {
        const int64_t row = i / shape_.num_heads, head = i % shape_.num_heads;
        const PackedMatrix& matrix = *latent.values[static_cast<size_t>(head)];
        set_input_row(matrix, latent_outputs_ + i * latent.shape.kv_rank, row, head_input(matrix, head));
    });
    multiply_heads(latent.values, head_outputs_, latent.shape.value_dim, thread);
}

}  // namespace foreword
