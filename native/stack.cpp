#include "stack.h"

#include <algorithm>
#include <stdexcept>

namespace foreword {

bool same_input(const PackedMatrix& a, const PackedMatrix& b) {
    const MatrixView &x = a.view(), &y = b.view();
    return (x.form == Form::F32) == (y.form == Form::F32) && x.grouping.group == y.grouping.group &&
           x.grouping.rotated == y.grouping.rotated;
}

const PackedMatrix* Layer::at(Site site) const {
    switch (site) {
        case Site::Output: return output.get();
        case Site::Gate: return gate.get();
        case Site::Up: return up.get();
        case Site::Down: return down.get();
        default: break;
    }
    const size_t place = static_cast<size_t>(site);
    return place < inputs.size() ? inputs[place].get() : nullptr;
}

void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

void require_matrix(const Matrix& matrix, int64_t rows, int64_t cols, const char* message) {
    require(matrix && matrix->view().rows == rows && matrix->view().cols == cols, message);
}

void require_norm(const std::vector<float>& norm, int64_t size, bool may_be_missing, const char* message) {
    require((may_be_missing && norm.empty()) || norm.size() == static_cast<size_t>(size), message);
}

void require_below(const int32_t* values, int64_t count, int64_t bound, const char* message) {
    for (int64_t i = 0; i < count; ++i) require(values[i] >= 0 && values[i] < bound, message);
}

Stack::Stack(StackShape shape, const KernelTable& kernels, std::shared_ptr<Workers> workers, Rope rope)
    : shape_(shape), kernels_(kernels), workers_(std::move(workers)) {
    require(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "kv heads must divide the heads");
    require(shape.head_dim > 0 && shape.head_dim % 2 == 0, "the head dimension must be even");
    add_rope(std::move(rope));
}

size_t Stack::add_rope(Rope rope) {
    const int64_t rotated = 2 * static_cast<int64_t>(rope.inverse_frequencies.size());
    require(rotated > 0 && rotated <= shape_.head_dim, "there must be one frequency per rotated pair");
    ropes_.push_back(std::move(rope));
    return ropes_.size() - 1;
}

void Stack::add_layer(Layer layer, int64_t inputs) {
    const int64_t hidden = shape_.hidden_size;
    if (layer.has_attention()) check_attention(layer, inputs);
    if (layer.recurrent) check_recurrent(layer, inputs);
    for (const Matrix& input : layer.inputs) require(same_input(*layer.inputs.front(), *input), "projections of one input must be grouped alike");
    for (const Layer& other : layers_) {
        layer.place += layer.recurrent ? other.recurrent != nullptr : layer.has_attention() && other.has_attention();
    }
    check_mlp(layer);
    if (layer.experts) {
        const Experts& experts = *layer.experts;
        mixtures_ = {std::max(mixtures_.count, experts.count()), std::max(mixtures_.per_token, experts.routing.per_token),
                     std::max(mixtures_.size, experts.size())};
    }
    require(layer.rope < ropes_.size(), "a layer turns by frequencies that are not there");
    require(!layer.experts || layer.activation != Activation::Gelu, "experts have SiLU or a squared ReLU");
    for (const std::vector<float>* norm : {&layer.attention_norm, &layer.mlp_norm, &layer.after_attention, &layer.after_mlp}) {
        require_norm(*norm, hidden, true, "norms must have one weight per hidden dimension");
    }
    require(!layer.experts || (layer.after_mlp.empty() && !layer.mlp_norm.empty()), "what experts say is not normed, and their input is");
    adds_as_it_is_ = adds_as_it_is_ && layer.adds_as_it_is();
    layers_.push_back(std::move(layer));
}

void Stack::set_sinks(std::vector<float> sinks) {
    require(!layers_.empty(), "sinks belong to a layer");
    require_norm(sinks, shape_.num_heads, false, "there is one sink per head");
    layers_.back().sinks = std::move(sinks);
}

void Stack::check_attention(const Layer& layer, int64_t inputs) const {
    const int64_t width = shape_.query_width();
    require(layer.inputs.size() == 3, "attention has a query, a key and a value projection");
    const bool is_gated = layer.inputs[0] && layer.inputs[0]->view().rows == 2 * width;
    require_matrix(layer.inputs[0], is_gated ? 2 * width : width, inputs, "the query projection has the wrong shape");
    require_matrix(layer.inputs[1], shape_.kv_width(), inputs, "the key projection has the wrong shape");
    require_matrix(layer.inputs[2], shape_.kv_width(), inputs, "the value projection has the wrong shape");
    require_matrix(layer.output, shape_.hidden_size, width, "the output projection has the wrong shape");
    check_head_norms(layer);
}

void Stack::check_recurrent(const Layer& layer, int64_t inputs) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    int64_t width = 0;
    for (const Matrix& matrix : layer.inputs) {
        require(matrix && matrix->view().cols == inputs, "a projection of a recurrent layer has the wrong shape");
        width += matrix->view().rows;
    }
    require(width == shape.projected() && layer.inputs.size() <= kSitesOfOneInput, "the projections of a recurrent layer have the wrong shape");
    require_matrix(layer.output, shape_.hidden_size, shape.value_width(), "the output projection has the wrong shape");
    require(!recurrent() || recurrent()->shape == shape, "all recurrent layers must have one shape");
}

void Stack::check_head_norms(const Layer& layer) const {
    const auto queries = static_cast<int64_t>(layer.query_norm.size()), keys = static_cast<int64_t>(layer.key_norm.size());
    const bool each = queries == shape_.head_dim && keys == shape_.head_dim;
    const bool together = queries == shape_.query_width() && keys == shape_.kv_width();
    require((queries == 0 && keys == 0) || each || together, "head norms must have one weight per head dimension, or for all heads");
}

void Stack::check_mlp(const Layer& layer) const {
    const int64_t hidden = shape_.hidden_size;
    if (layer.experts) layer.experts->check(hidden);
    if (!layer.gate && !layer.up && !layer.down) return;
    const int64_t inner = layer.gate ? layer.gate->view().rows : 0;
    require(inner > 0 && inner <= shape_.intermediate_size, "the gate projection has the wrong shape");
    require_matrix(layer.gate, inner, hidden, "the gate projection has the wrong shape");
    require_matrix(layer.down, hidden, inner, "the down projection has the wrong shape");
    require((layer.activation == Activation::SquaredRelu) == !layer.up, "only a squared ReLU has no second matrix");
    if (layer.up) {
        require_matrix(layer.up, inner, hidden, "the up projection has the wrong shape");
        require(same_input(*layer.gate, *layer.up), "projections of one input must be grouped alike");
    }
    require(!layer.experts || same_input(*layer.gate, *layer.experts->gate.front()),
            "shared experts must be grouped like the others");
}

RowKind Stack::kv_rows() const {
    return {attention_layers(), shape_.num_kv_heads, shape_.head_dim};
}

int64_t Stack::attention_layers() const {
    return std::count_if(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.has_attention(); });
}

const Recurrent* Stack::recurrent() const {
    for (const Layer& layer : layers_) {
        if (layer.recurrent) return layer.recurrent.get();
    }
    return nullptr;
}

int64_t Stack::layer_bytes() const {
    size_t total = 0;
    for (const Layer& layer : layers_) {
        for (int site = 0; site < kSites; ++site) {
            if (const PackedMatrix* matrix = layer.at(static_cast<Site>(site))) total += matrix->bytes();
        }
        if (layer.experts) total += static_cast<size_t>(layer.experts->bytes());
    }
    return static_cast<int64_t>(total);
}

void Stack::check_rows(const Batch& batch, const KvStore& store, int64_t vocab_size, const int32_t* starts) const {
    const int64_t slots = store.slots();
    require_below(batch.token_ids, batch.rows, vocab_size, "a token id is outside the vocabulary");
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
        const int64_t first = starts ? starts[r] : 0;
        require(first >= 0, "a request starts before its first KV row");
        require(batch.kv_lens[r] >= 0 && batch.kv_lens[r] <= reach, "a request is longer than its block table");
        for (int64_t row = batch.row_starts[r]; row < batch.row_starts[r + 1]; ++row) {
            const uint64_t mask = static_cast<uint64_t>(batch.ancestor_masks[row]);
            const int64_t last = batch.prefix_lens[row] + (mask ? 64 - __builtin_clzll(mask) : 0);
            require(batch.prefix_lens[row] >= first && last <= batch.kv_lens[r], "a row sees behind the end of its request");
            require(last > first, "a row must see at least itself");
        }
    }
}

void Stack::check_states(const Batch& batch, const StateStore* states) const {
    if (!recurrent()) return;
    require(states && batch.chunks.size() == static_cast<size_t>(batch.requests), "a pass of a model with recurrent layers has no states");
    const int64_t layers = std::count_if(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.recurrent != nullptr; });
    require(states->layers() == layers && states->shape() == recurrent()->shape, "the states were made for another decoder");
    const auto is_below = [](int64_t value, int64_t bound) { return value >= 0 && value < bound; };
    for (const auto& [from, to] : batch.ring_copies) {
        require(is_below(from, states->rings() * kRingRows) && is_below(to, states->rings() * kRingRows), "a copy is outside the rings");
    }
    for (int64_t r = 0; r < batch.requests; ++r) {
        const RequestChunks& own = batch.chunks[static_cast<size_t>(r)];
        const int64_t rows = batch.row_starts[r + 1] - batch.row_starts[r], known = own.begin - own.read.start;
        const StateChunk& newest = own.entered.empty() ? own.read : own.entered.back();
        require(own.run >= 0 && own.run <= rows && known >= 0 && known <= kStateChunk, "the rows of a request do not follow its ring");
        require(is_below(own.read.state, states->states()) && is_below(own.read.ring, states->rings()) && is_below(newest.ring, states->rings()),
                "a request reads a state or a ring that does not exist");
        const int64_t end = own.begin + own.run;   // of the committed rows
        require(newest.start >= own.read.start && (newest.start - own.read.start) % kStateChunk == 0 && newest.start <= end &&
                    end <= newest.start + kStateChunk && own.begin + rows - newest.start <= kRingRows,
                "the rows of a request do not fit into its chunks");
        for (const StateChunk& chunk : own.entered) {
            require(chunk.state > 0 && chunk.state < states->states(), "a request writes a state that does not exist");
        }
        for (int64_t row = own.run; row < rows; ++row) {   // nodes
            const uint64_t mask = static_cast<uint64_t>(batch.ancestor_masks[batch.row_starts[r] + row]);
            const int64_t node = row - own.run;
            require(node < 64 && (mask >> node) == 1 && end - newest.start + __builtin_popcountll(mask) <= kStateChunk,
                    "a draft crosses the end of its chunk");
        }
    }
}

}  // namespace foreword
