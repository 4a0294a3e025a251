#include "head.h"

#include "head_pass.h"

namespace foreword {

Head::Head(const Stack& decoder, HeadShape head, StackShape shape, std::vector<float> inverse_frequencies)
    : Stack(shape, decoder.kernels(), decoder.workers(), std::move(inverse_frequencies)), head_(head) {
    require(!head.fused || head.feature_width == shape.hidden_size, "fused features must be as wide as the head");
}

void Head::set_inputs(HeadInputs inputs) {
    const int64_t hidden = shape_.hidden_size, width = head_.feature_width;
    if (head_.fused) require_matrix(inputs.fc, hidden, 2 * hidden, "fc has the wrong shape");
    else if (inputs.fc) require_matrix(inputs.fc, hidden, width, "fc has the wrong shape");
    else require(width == hidden, "features without fc must be as wide as the head");
    const int64_t parts = static_cast<int64_t>(inputs.feature_norms.size());
    require(parts == 0 || (!head_.fused && inputs.fc && width % parts == 0), "features cannot be normed in these parts");
    for (const std::vector<float>& norm : inputs.feature_norms) {
        require_norm(norm, width / parts, false, "a norm of features has the wrong size");
    }
    require_norm(inputs.embedding_norm, hidden, true, "norms must have one weight per hidden dimension");
    require_norm(inputs.hidden_norm, hidden, true, "norms must have one weight per hidden dimension");
    inputs_ = std::move(inputs);
}

void Head::add_layer(Layer layer) {
    const bool side_by_side = layers_.empty() && !head_.fused;
    require(!side_by_side || layer.attention_norm.empty(), "the first layer's input has norms of its own");
    Stack::add_layer(std::move(layer), (side_by_side ? 2 : 1) * shape_.hidden_size);
}

void Head::set_ends(Matrix embedding, Matrix output, std::vector<float> final_norm) {
    require(embedding && embedding->view().cols == shape_.hidden_size, "the embedding has the wrong shape");
    require_matrix(output, head_.draft_vocab_size, shape_.hidden_size, "the output matrix has the wrong shape");
    require_norm(final_norm, shape_.hidden_size, true, "the final norm must have one weight per hidden dimension");
    embedding_ = std::move(embedding);
    output_ = std::move(output);
    final_norm_ = std::move(final_norm);
}

void Head::check(const Batch& batch, const KvStore& store, size_t kind, const int32_t* starts) const {
    require(embedding_ && output_, "the head has no embedding or output matrix yet");
    require(kind < store.kinds().size() && store.kinds()[kind] == kv_rows(), "the KV store has no rows for this head");
    require(batch.copies == 0, "rows are moved by the target's passes");
    check_rows(batch, store, embedding_->view().rows, starts);
}

void Head::forward(const Batch& batch, KvStore& store, size_t kind, const int32_t* starts, const float* features, bool are_own,
                   float* logits, float* states) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->one_pass);
    check(batch, store, kind, starts);
    HeadPass(*this, {batch, store, kind, starts}, features, are_own, logits, states).run();
}

}  // namespace foreword
