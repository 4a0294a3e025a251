#include "decoder.h"

#include "pass.h"

namespace foreword {

Decoder::Decoder(int64_t vocab_size, StackShape shape, const KernelTable& kernels, int threads,
                 std::vector<float> inverse_frequencies)
    : Stack(shape, kernels, std::make_shared<Workers>(threads), std::move(inverse_frequencies)), vocab_size_(vocab_size) {}

void Decoder::add_layer(Layer layer) {
    require_norm(layer.attention_norm, shape_.hidden_size, false, "norms must have one weight per hidden dimension");
    Stack::add_layer(std::move(layer), shape_.hidden_size);
}

void Decoder::set_ends(Matrix embedding, Matrix head, std::vector<float> final_norm) {
    require_matrix(embedding, vocab_size_, shape_.hidden_size, "the embedding has the wrong shape");
    require_matrix(head, vocab_size_, shape_.hidden_size, "the head has the wrong shape");
    require_norm(final_norm, shape_.hidden_size, false, "the final norm must have one weight per hidden dimension");
    embedding_ = std::move(embedding);
    head_ = std::move(head);
    final_norm_ = std::move(final_norm);
}

int64_t Decoder::weight_bytes() const {
    return layer_bytes() + static_cast<int64_t>(embedding_->bytes() + (head_ == embedding_ ? 0 : head_->bytes()));
}

void Decoder::check(const Batch& batch, const KvStore& store) const {
    require(embedding_ && head_, "the decoder has no embedding or head yet");
    require(store.kinds().front() == kv_rows(), "the KV store was made for another decoder");
    check_rows(batch, store, vocab_size_, nullptr);
    const int64_t layers = static_cast<int64_t>(layers_.size());
    for (const Tap& tap : batch.taps) {
        require(tap.layer >= 0 && tap.layer <= layers, "hidden states are wanted of a layer that does not exist");
        require(!tap.normed || tap.layer == layers, "the final norm follows the last layer alone");
    }
}

void Decoder::forward(const Batch& batch, KvStore& store, float* logits, float* hidden) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->one_pass);
    check(batch, store);
    Pass(*this, batch, store, logits, hidden).run();
}

}  // namespace foreword
