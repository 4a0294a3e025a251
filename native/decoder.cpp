#include "decoder.h"

#include "pass.h"

namespace foreword {

Decoder::Decoder(int64_t vocab_size, StackShape shape, EndScales scales, const KernelTable& kernels, int threads, Rope rope)
    : Stack(shape, kernels, std::make_shared<Workers>(threads), std::move(rope)), vocab_size_(vocab_size), scales_(scales) {}

void Decoder::add_layer(Layer layer) {
    Stack::add_layer(std::move(layer), shape_.hidden_size);
}

void Decoder::set_embedding_and_output(Matrix embedding, Matrix head, std::vector<float> final_norm) {
    require_matrix(embedding, vocab_size_, shape_.hidden_size, "the embedding has the wrong shape");
    require_matrix(head, vocab_size_, shape_.hidden_size, "the head has the wrong shape");
    require_norm(final_norm, shape_.hidden_size, false, "the final norm must have one weight per hidden dimension");
    embedding_ = std::move(embedding);
    head_ = std::move(head);
    final_norm_ = std::move(final_norm);
}

int64_t Decoder::weight_bytes() const {
    require(embedding_ && head_, "the decoder has no embedding or head yet");
    return layer_bytes() + static_cast<int64_t>(embedding_->bytes() + (head_ == embedding_ ? 0 : head_->bytes()));
}

void Decoder::check(const Batch& batch, const KvStore& store) const {
    require(embedding_ && head_, "the decoder has no embedding or head yet");
    require(store.kinds().front() == kv_row_kind(), "the KV store was made for another decoder");
    check_rows(batch, store, vocab_size_, nullptr);
    const int64_t layers = static_cast<int64_t>(layers_.size());
    for (const Tap& tap : batch.taps) {
        require(tap.layer >= 0 && tap.layer <= layers, "hidden states are requested of a layer that does not exist");
        require(!tap.is_normed || tap.layer == layers, "only the hidden states after the last layer can be read after the final norm");
    }
}

void Decoder::check_adapter(const Adapter& adapter) const {
    require(adapter.layers.size() == layers_.size(), "the adapter is for another number of layers");
    for (size_t index = 0; index < layers_.size(); ++index) {
        for (int site = 0; site < kSites; ++site) {
            const Factor& factor = adapter.layers[index][static_cast<size_t>(site)];
            if (!factor.down) continue;
            const PackedMatrix* matrix = layers_[index].matrix_at(static_cast<Site>(site));
            require(matrix && !(layers_[index].experts && site >= static_cast<int>(Site::Gate)),
                    "an adapter changes experts, or a matrix that the layer does not have");
            const PackedMatrix& base = *matrix;
            const int64_t rank = factor.rank();
            require(rank >= 1 && rank <= kMaxRank, "the rank of an adapter must be in 1 .. 128");
            require_matrix(factor.down, rank, base.view().cols, "a factor of the adapter does not fit its matrix");
            require_matrix(factor.up, base.view().rows, rank, "a factor of the adapter does not fit its matrix");
            require(share_input_format(*factor.down, base), "the inner factor of an adapter must be grouped like its matrix");
            const WeightFormat format = factor.up->view().format;
            require(format == WeightFormat::F32 || format == WeightFormat::Factor,
                    "the outer factor of an adapter must be float32 or made by round_factor");
        }
    }
}

void Decoder::set_adapter(int64_t slot, std::shared_ptr<const Adapter> adapter) {
    require(slot >= 1 && slot < (int64_t{1} << 20), "slots of adapters begin with 1");
    if (adapter) check_adapter(*adapter);
    std::lock_guard<std::mutex> lock(workers_->pass_mutex);
    if (adapters_.size() <= static_cast<size_t>(slot)) adapters_.resize(static_cast<size_t>(slot) + 1);
    adapters_[static_cast<size_t>(slot)] = std::move(adapter);
}

std::vector<AdaptedRows> Decoder::adapted_rows(const Batch& batch) const {
    std::vector<AdaptedRows> rows;
    if (batch.adapters.empty()) return rows;
    require(batch.adapters.size() == static_cast<size_t>(batch.requests), "there must be one adapter per request");
    for (int64_t request = 0; request < batch.requests; ++request) {
        const int32_t slot = batch.adapters[static_cast<size_t>(request)];
        if (slot == 0) continue;
        const bool is_filled = slot > 0 && static_cast<size_t>(slot) < adapters_.size() && adapters_[static_cast<size_t>(slot)];
        require(is_filled, "a request names an adapter slot that has no adapter");
        rows.push_back({adapters_[static_cast<size_t>(slot)].get(), batch.row_starts[request], batch.row_starts[request + 1]});
    }
    return rows;
}

void Decoder::forward(const Batch& batch, KvStore& store, StateStore* states, float* logits, float* hidden, float* shares,
                      int64_t share_parts) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->pass_mutex);
    check(batch, store);
    check_recurrent_states(batch, states);
    for (int64_t request = 0; shares && request < batch.requests; ++request) {
        require(batch.row_starts[request + 1] == request + 1, "shares of attention are returned only for passes with one row per request");
        require(batch.kv_lens[request] <= share_parts * kSharePart, "there is no room for the shares of all parts");
    }
    Pass(*this, {batch, store, 0, nullptr, 0, states, shares, share_parts}, adapted_rows(batch), logits, hidden).run();
}

void Decoder::check_exit(const ExitRows& rows, const KvStore& store, size_t kind) const {
    require(embedding_ && head_, "the decoder has no embedding or head yet");
    require(kind > 0 && kind < store.kinds().size(), "there are no such KV rows");
    require(attention_layers() == static_cast<int64_t>(layers_.size()) && !latent(), "an exit has attention over keys and values in every layer");
    const RowKind exit_rows{1, shape_.num_kv_heads, shape_.head_dim, false};
    const RowKind& target_rows = store.kinds().front();
    require(store.kinds()[kind] == exit_rows, "an exit keeps the rows of one layer");
    require(target_rows.kv_heads == exit_rows.kv_heads && target_rows.key_dim == exit_rows.key_dim && !target_rows.is_latent &&
                target_rows.layers >= static_cast<int64_t>(layers_.size()) - 1,
            "the KV store was made for another decoder");
    check_rows(rows.batch, store, vocab_size_, rows.starts);
    require(rows.batch.copies == 0 && rows.batch.taps.empty(), "a pass of an exit cannot copy KV rows or return hidden states");
    require(!rows.states || rows.batch.logit_count == 0, "a pass that only stores KV rows has no logits");
}

void Decoder::exit(const ExitRows& rows, KvStore& store, size_t kind, float* logits) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->pass_mutex);
    check_exit(rows, store, kind);
    const int64_t shared_layers = static_cast<int64_t>(layers_.size()) - 1;
    Pass pass(*this, {rows.batch, store, kind, rows.starts, shared_layers}, {}, logits, nullptr);
    if (rows.states) pass.store_last_layer_kv(rows.states);
    else pass.run();
}

}  // namespace foreword
