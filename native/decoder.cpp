#include "decoder.h"

#include <stdexcept>

#include "pass.h"

namespace foreword {

namespace {

void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

void require_matrix(const Matrix& matrix, int64_t rows, int64_t cols, const char* message) {
    require(matrix && matrix->view().rows == rows && matrix->view().cols == cols, message);
}

bool same_input(const Matrix& a, const Matrix& b) {
    const MatrixView &x = a->view(), &y = b->view();
    return (x.form == Form::F32) == (y.form == Form::F32) && x.grouping.group == y.grouping.group &&
           x.grouping.rotated == y.grouping.rotated;
}

void require_below(const int32_t* values, int64_t count, int64_t bound, const char* message) {
    for (int64_t i = 0; i < count; ++i) require(values[i] >= 0 && values[i] < bound, message);
}

}  // namespace

Decoder::Decoder(DecoderShape shape, const KernelTable& kernels, int threads, std::vector<float> inverse_frequencies)
    : shape_(shape), kernels_(kernels), pool_(threads), inverse_frequencies_(std::move(inverse_frequencies)) {
    require(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "kv heads must divide the heads");
    require(shape.head_dim > 0 && shape.head_dim % 2 == 0, "the head dimension must be even");
    require(static_cast<int64_t>(inverse_frequencies_.size()) == shape.head_dim / 2,
            "there must be one frequency per rotated pair");
}

void Decoder::check_layer(const Layer& layer) const {
    const int64_t hidden = shape_.hidden_size, inner = shape_.intermediate_size;
    require_matrix(layer.query, shape_.query_width(), hidden, "the query projection has the wrong shape");
    require_matrix(layer.key, shape_.kv_width(), hidden, "the key projection has the wrong shape");
    require_matrix(layer.value, shape_.kv_width(), hidden, "the value projection has the wrong shape");
    require_matrix(layer.output, hidden, shape_.query_width(), "the output projection has the wrong shape");
    require_matrix(layer.gate, inner, hidden, "the gate projection has the wrong shape");
    require_matrix(layer.up, inner, hidden, "the up projection has the wrong shape");
    require_matrix(layer.down, hidden, inner, "the down projection has the wrong shape");
    require(same_input(layer.query, layer.key) && same_input(layer.query, layer.value) &&
                same_input(layer.gate, layer.up),
            "projections of one input must be grouped alike");
    const size_t head_dim = static_cast<size_t>(shape_.head_dim);
    require(layer.query_norm.size() == layer.key_norm.size() &&
                (layer.query_norm.empty() || layer.query_norm.size() == head_dim),
            "head norms must have one weight per head dimension");
    require(layer.attention_norm.size() == static_cast<size_t>(hidden) &&
                layer.mlp_norm.size() == static_cast<size_t>(hidden),
            "norms must have one weight per hidden dimension");
}

void Decoder::add_layer(Layer layer) {
    check_layer(layer);
    layers_.push_back(std::move(layer));
}

void Decoder::set_ends(Matrix embedding, Matrix head, std::vector<float> final_norm) {
    require_matrix(embedding, shape_.vocab_size, shape_.hidden_size, "the embedding has the wrong shape");
    require_matrix(head, shape_.vocab_size, shape_.hidden_size, "the head has the wrong shape");
    require(final_norm.size() == static_cast<size_t>(shape_.hidden_size),
            "the final norm must have one weight per hidden dimension");
    embedding_ = std::move(embedding);
    head_ = std::move(head);
    final_norm_ = std::move(final_norm);
}

RowKind Decoder::kv_rows() const {
    return {static_cast<int64_t>(layers_.size()), shape_.num_kv_heads, shape_.head_dim};
}

int64_t Decoder::weight_bytes() const {
    size_t total = embedding_->bytes() + (head_ == embedding_ ? 0 : head_->bytes());
    for (const Layer& layer : layers_) {
        for (const Matrix* m : {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate, &layer.up, &layer.down}) {
            total += (*m)->bytes();
        }
    }
    return static_cast<int64_t>(total);
}

void Decoder::check(const Batch& batch, const KvStore& store) const {
    require(embedding_ && head_, "the decoder has no embedding or head yet");
    require(store.kinds().front() == kv_rows(), "the KV store was made for another decoder");
    const int64_t slots = store.slots();
    require_below(batch.token_ids, batch.rows, shape_.vocab_size, "a token id is outside the vocabulary");
    require_below(batch.slots, batch.rows, slots, "a KV slot is outside the pages");
    require_below(batch.kv_copies, 2 * batch.copies, slots, "a KV copy is outside the pages");
    require_below(batch.logit_rows, batch.wanted, batch.rows, "a logit row is outside the batch");
    require_below(batch.hidden_rows, batch.hidden_wanted, batch.rows, "a hidden row is outside the batch");
    require_below(batch.block_tables, batch.requests * batch.pages, store.pages() > 0 ? store.pages() : 1,
                  "a block table names a page that does not exist");
    require(batch.row_starts[0] == 0 && batch.row_starts[batch.requests] == batch.rows,
            "row_starts must begin with 0 and end with the number of rows");
    const int64_t reach = batch.pages * kPageSize;
    for (int64_t r = 0; r < batch.requests; ++r) {
        require(batch.row_starts[r] <= batch.row_starts[r + 1], "row_starts must not descend");
        for (int64_t row = batch.row_starts[r]; row < batch.row_starts[r + 1]; ++row) {
            const uint64_t mask = static_cast<uint64_t>(batch.ancestor_masks[row]);
            const int64_t last = batch.prefix_lens[row] + (mask ? 64 - __builtin_clzll(mask) : 0);
            require(batch.prefix_lens[row] >= 0 && last <= reach, "a row sees behind its request's block table");
            require(last > 0, "a row must see at least itself");
        }
    }
    const int64_t layers = static_cast<int64_t>(layers_.size());
    for (const Tap& tap : batch.taps) {
        require(tap.layer >= 0 && tap.layer <= layers, "hidden states are wanted of a layer that does not exist");
        require(!tap.normed || tap.layer == layers, "the final norm follows the last layer alone");
    }
}

void Decoder::forward(const Batch& batch, KvStore& store, float* logits, float* hidden) {
    pool_.require_own_process();
    std::lock_guard<std::mutex> lock(one_pass_);
    check(batch, store);
    Pass(*this, batch, store, logits, hidden).run();
}

}  // namespace foreword
