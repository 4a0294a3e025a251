#include "stack.h"

#include <algorithm>
#include <stdexcept>

namespace foreword {

bool share_input_format(const PackedMatrix& a, const PackedMatrix& b) {
    const MatrixView &x = a.view(), &y = b.view();
    return (x.format == WeightFormat::F32) == (y.format == WeightFormat::F32) && x.grouping.group_size == y.grouping.group_size &&
           x.grouping.is_rotated == y.grouping.is_rotated;
}

const PackedMatrix* Layer::matrix_at(Site site) const {
    switch (site) {
        case Site::Output: return output_projection.get();
        case Site::Gate: return gate.get();
        case Site::Up: return up.get();
        case Site::Down: return down.get();
        default: break;
    }
    const size_t index = static_cast<size_t>(site);   // the first sites are the input projections
    return index < input_projections.size() ? input_projections[index].get() : nullptr;
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

void require_indices(const int32_t* values, int64_t count, int64_t bound, const char* message) {
    for (int64_t i = 0; i < count; ++i) require(values[i] >= 0 && values[i] < bound, message);
}

Stack::Stack(StackShape shape, const KernelTable& kernels, std::shared_ptr<Workers> workers, Rope rope)
    : shape_(shape), kernels_(kernels), workers_(std::move(workers)) {
    require(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0, "kv heads must divide the heads");
    require(shape.head_dim > 0 && shape.head_dim % 2 == 0, "the head dimension must be even");
    add_rope(std::move(rope));
}

size_t Stack::add_rope(Rope rope) {
    const int64_t rotated_dims = 2 * static_cast<int64_t>(rope.inverse_frequencies.size());
    require(rotated_dims > 0 && rotated_dims <= shape_.head_dim, "there must be one frequency per rotated pair");
    ropes_.push_back(std::move(rope));
    return ropes_.size() - 1;
}

void Stack::add_layer(Layer layer, int64_t input_width) {
    const int64_t hidden = shape_.hidden_size;
    if (layer.has_attention()) layer.latent ? check_latent(layer, input_width) : check_attention(layer, input_width);
    if (layer.recurrent) check_recurrent(layer, input_width);
    for (const Matrix& projection : layer.input_projections) {
        require(share_input_format(*layer.input_projections.front(), *projection), "projections of one input must read the same input format");
    }
    for (const Layer& other : layers_) {
        layer.store_layer += layer.recurrent ? other.recurrent != nullptr : layer.has_attention() && other.has_attention();
    }
    check_mlp(layer);
    if (layer.experts) {
        const Experts& experts = *layer.experts;
        mixtures_ = {std::max(mixtures_.experts, experts.count()), std::max(mixtures_.experts_per_token, experts.routing.per_token),
                     std::max(mixtures_.expert_width, experts.width())};
    }
    require(layer.rope_index < ropes_.size(), "a layer names a rotary embedding that does not exist");
    require(!layer.experts || layer.activation != Activation::Gelu, "the activation of experts must be SiLU or a squared ReLU");
    for (const std::vector<float>* norm : {&layer.attention_norm, &layer.mlp_norm, &layer.post_attention_norm, &layer.post_mlp_norm}) {
        require_norm(*norm, hidden, true, "norms must have one weight per hidden dimension");
    }
    require(!layer.experts || (layer.post_mlp_norm.empty() && !layer.mlp_norm.empty()),
            "a mixture of experts needs a norm of its input, and has none of its output");
    adds_directly_ = adds_directly_ && layer.adds_directly();
    layers_.push_back(std::move(layer));
}

void Stack::set_convolutions(std::shared_ptr<const BlockConvolution> attention, std::shared_ptr<const BlockConvolution> mlp) {
    require(!layers_.empty(), "convolutions belong to a layer");
    Layer& layer = layers_.back();
    require(!layer.attention_norm.empty() && !layer.mlp_norm.empty() && layer.adds_directly() && layer.gate && !layer.experts,
            "only layers with plain attention and a plain MLP, both with normed inputs, have convolutions");
    for (const auto& convolution : {attention, mlp}) {
        const int64_t hidden = shape_.hidden_size, taps = convolution ? convolution->taps : 0;
        require(taps >= 1 && convolution->group >= 1 && hidden % convolution->group == 0, "a convolution has no taps, or its groups do not divide the channels");
        const int64_t width = 2 * taps * hidden / convolution->group;
        require(static_cast<int64_t>(convolution->base.size()) == 2 * taps * hidden, "a convolution has the wrong number of weights");
        require_matrix(convolution->projection, width, hidden, "the projection of a convolution has the wrong shape");
        convolution_width_ = std::max(convolution_width_, width);
    }
    layer.attention_convolution = std::move(attention);
    layer.mlp_convolution = std::move(mlp);
    adds_directly_ = false;
}

void Stack::set_sinks(std::vector<float> sinks) {
    require(!layers_.empty(), "sinks belong to a layer");
    require_norm(sinks, shape_.num_heads, false, "there is one sink per head");
    layers_.back().sinks = std::move(sinks);
}

void Stack::check_attention(const Layer& layer, int64_t input_width) const {
    const int64_t width = shape_.query_width();
    require(!latent(), "all layers must have latent attention of one shape, or none");
    require(layer.input_projections.size() == 3, "attention has a query, a key and a value projection");
    const bool is_gated = layer.input_projections[0] && layer.input_projections[0]->view().rows == 2 * width;
    require_matrix(layer.input_projections[0], is_gated ? 2 * width : width, input_width, "the query projection has the wrong shape");
    require_matrix(layer.input_projections[1], shape_.kv_width(), input_width, "the key projection has the wrong shape");
    require_matrix(layer.input_projections[2], shape_.kv_width(), input_width, "the value projection has the wrong shape");
    require_matrix(layer.output_projection, shape_.hidden_size, width, "the output projection has the wrong shape");
    check_head_norms(layer);
}

void Stack::check_latent(const Layer& layer, int64_t input_width) const {
    const Latent& latent = *layer.latent;
    const LatentShape& shape = latent.shape;
    const int64_t width = shape_.query_width(), heads = shape_.num_heads, rank = latent.query ? latent.query->view().cols : width;
    require(shape.kv_rank > 0 && shape.nope_dim > 0 && shape.value_dim > 0 && shape.rope_dim % 2 == 0 && shape.head_dim() == shape_.head_dim &&
                shape.rope_dim == 2 * static_cast<int64_t>(ropes_.at(layer.rope_index).inverse_frequencies.size()),
            "the sizes of latent attention do not fit each other");
    require(!attention_layers() || (this->latent() && this->latent()->shape == shape), "all layers must have latent attention of one shape, or none");
    require(layer.input_projections.size() == 2, "latent attention has a query projection and one of the row");
    require_matrix(layer.input_projections[0], rank, input_width, "the query projection has the wrong shape");
    require_matrix(layer.input_projections[1], shape.row_dim(), input_width, "the projection of latent rows has the wrong shape");
    if (latent.query) require_matrix(latent.query, width, rank, "the projection of compressed queries has the wrong shape");
    require_norm(layer.query_norm, latent.query ? rank : 0, false, "compressed queries need a norm, and other queries have none");
    require_norm(layer.key_norm, shape.kv_rank, false, "the norm of latent rows must have one weight per number");
    require(static_cast<int64_t>(latent.keys.size()) == heads && static_cast<int64_t>(latent.values.size()) == heads,
            "every head of latent attention has two matrices");
    for (const Matrix& matrix : latent.keys) require_matrix(matrix, shape.kv_rank, shape.nope_dim, "a head's key matrix has the wrong shape");
    for (const Matrix& matrix : latent.values) require_matrix(matrix, shape.value_dim, shape.kv_rank, "a head's value matrix has the wrong shape");
    require_matrix(layer.output_projection, shape_.hidden_size, heads * shape.value_dim, "the output projection has the wrong shape");
}

void Stack::check_recurrent(const Layer& layer, int64_t input_width) const {
    const RecurrentShape& shape = layer.recurrent->shape;
    int64_t width = 0;
    for (const Matrix& matrix : layer.input_projections) {
        require(matrix && matrix->view().cols == input_width, "a projection of a recurrent layer has the wrong shape");
        width += matrix->view().rows;
    }
    require(width == shape.projected_width() && layer.input_projections.size() <= kSitesOfOneInput,
            "the projections of a recurrent layer have the wrong shape");
    require_matrix(layer.output_projection, shape_.hidden_size, shape.value_width(), "the output projection has the wrong shape");
    require(!first_recurrent() || first_recurrent()->shape == shape, "all recurrent layers must have one shape");
}

void Stack::check_head_norms(const Layer& layer) const {
    const auto queries = static_cast<int64_t>(layer.query_norm.size()), keys = static_cast<int64_t>(layer.key_norm.size());
    const bool is_per_head = queries == shape_.head_dim && keys == shape_.head_dim;
    const bool is_of_all_heads = queries == shape_.query_width() && keys == shape_.kv_width();
    require((queries == 0 && keys == 0) || is_per_head || is_of_all_heads,
            "query and key norms must have one weight per head dimension, or one per dimension of all heads");
}

void Stack::check_mlp(const Layer& layer) const {
    const int64_t hidden = shape_.hidden_size;
    if (layer.experts) layer.experts->check(hidden);
    if (!layer.gate && !layer.up && !layer.down) return;
    const int64_t width = layer.gate ? layer.gate->view().rows : 0;
    require(width > 0 && width <= shape_.intermediate_size, "the gate projection has the wrong shape");
    require_matrix(layer.gate, width, hidden, "the gate projection has the wrong shape");
    require_matrix(layer.down, hidden, width, "the down projection has the wrong shape");
    require((layer.activation == Activation::SquaredRelu) == !layer.up, "an MLP has an up projection unless its activation is a squared ReLU");
    if (layer.up) {
        require_matrix(layer.up, width, hidden, "the up projection has the wrong shape");
        require(share_input_format(*layer.gate, *layer.up), "projections of one input must read the same input format");
    }
    require(!layer.experts || share_input_format(*layer.gate, *layer.experts->gate.front()),
            "shared experts must be grouped like the others");
}

RowKind Stack::kv_row_kind() const {
    if (latent()) return {attention_layers(), 1, latent()->shape.row_dim(), true};
    return {attention_layers(), shape_.num_kv_heads, shape_.head_dim, false};
}

int64_t Stack::attention_layers() const {
    return std::count_if(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.has_attention(); });
}

const Recurrent* Stack::first_recurrent() const {
    for (const Layer& layer : layers_) {
        if (layer.recurrent) return layer.recurrent.get();
    }
    return nullptr;
}

const Latent* Stack::latent() const {
    for (const Layer& layer : layers_) {
        if (layer.latent) return layer.latent.get();
    }
    return nullptr;
}

int64_t Stack::attention_width() const {
    return latent() ? shape_.num_heads * latent()->shape.value_dim : shape_.query_width();
}

int64_t Stack::layer_bytes() const {
    size_t total = 0;
    for (const Layer& layer : layers_) {
        for (int site = 0; site < kSites; ++site) {
            if (const PackedMatrix* matrix = layer.matrix_at(static_cast<Site>(site))) total += matrix->bytes();
        }
        if (layer.experts) total += static_cast<size_t>(layer.experts->bytes());
        if (layer.latent) total += static_cast<size_t>(layer.latent->bytes());
    }
    return static_cast<int64_t>(total);
}

void Stack::check_rows(const Batch& batch, const KvStore& store, int64_t vocab_size, const int32_t* starts) const {
    const int64_t slots = store.slots();
    require_indices(batch.token_ids, batch.rows, vocab_size, "a token id is outside the vocabulary");
    require_indices(batch.slots, batch.rows, slots, "a KV slot is outside the pages");
    require_indices(batch.kv_copies, 2 * batch.copies, slots, "a KV copy is outside the pages");
    require_indices(batch.logit_rows, batch.logit_count, batch.rows, "a logit row is outside the batch");
    require_indices(batch.hidden_rows, batch.hidden_count, batch.rows, "a hidden row is outside the batch");
    require_indices(batch.block_tables, batch.requests * batch.pages, store.pages() > 0 ? store.pages() : 1,
                  "a block table names a page that does not exist");
    require(batch.row_starts[0] == 0 && batch.row_starts[batch.requests] == batch.rows,
            "row_starts must begin with 0 and end with the number of rows");
    const int64_t most_rows = batch.pages * kPageSize;   // of a request
    for (int64_t r = 0; r < batch.requests; ++r) {
        require(batch.row_starts[r] <= batch.row_starts[r + 1], "row_starts must not descend");
        const int64_t start = starts ? starts[r] : 0;
        require(start >= 0, "a request starts before its first KV row");
        require(batch.kv_lens[r] >= 0 && batch.kv_lens[r] <= most_rows, "a request is longer than its block table");
        for (int64_t row = batch.row_starts[r]; row < batch.row_starts[r + 1]; ++row) {
            const uint64_t mask = static_cast<uint64_t>(batch.ancestor_masks[row]);
            const int64_t end = batch.prefix_lens[row] + (mask ? 64 - __builtin_clzll(mask) : 0);   // of the visible rows
            require(batch.prefix_lens[row] >= start && end <= batch.kv_lens[r], "a row sees rows outside its request");
            require(end > start, "a row must see at least itself");
        }
    }
}

void Stack::check_recurrent_states(const Batch& batch, const StateStore* states) const {
    if (!first_recurrent()) return;
    require(states && batch.chunks.size() == static_cast<size_t>(batch.requests), "a pass of a model with recurrent layers has no states");
    const int64_t layers = std::count_if(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.recurrent != nullptr; });
    require(states->layers() == layers && states->shape() == first_recurrent()->shape, "the states were made for another decoder");
    const auto is_below = [](int64_t value, int64_t bound) { return value >= 0 && value < bound; };
    for (const auto& [from, to] : batch.ring_copies) {
        require(is_below(from, states->rings() * kRingRows) && is_below(to, states->rings() * kRingRows), "a copy is outside the rings");
    }
    for (int64_t r = 0; r < batch.requests; ++r) {
        const RequestChunks& chunks = batch.chunks[static_cast<size_t>(r)];
        const int64_t rows = batch.row_starts[r + 1] - batch.row_starts[r], ring_rows = chunks.begin - chunks.read.start;
        const StateChunk& last_chunk = chunks.entered.empty() ? chunks.read : chunks.entered.back();
        require(chunks.run >= 0 && chunks.run <= rows && ring_rows >= 0 && ring_rows <= kStateChunk, "the rows of a request do not follow its ring");
        require(is_below(chunks.read.state, states->states()) && is_below(chunks.read.ring, states->rings()) &&
                    is_below(last_chunk.ring, states->rings()),
                "a request reads a state or a ring that does not exist");
        const int64_t end = chunks.begin + chunks.run;   // position after the committed rows
        require(last_chunk.start >= chunks.read.start && (last_chunk.start - chunks.read.start) % kStateChunk == 0 && last_chunk.start <= end &&
                    end <= last_chunk.start + kStateChunk && chunks.begin + rows - last_chunk.start <= kRingRows,
                "the rows of a request do not fit into its chunks");
        for (const StateChunk& chunk : chunks.entered) {
            require(chunk.state > 0 && chunk.state < states->states(), "a request writes a state that does not exist");
        }
        for (int64_t row = chunks.run; row < rows; ++row) {   // draft nodes
            const uint64_t mask = static_cast<uint64_t>(batch.ancestor_masks[batch.row_starts[r] + row]);
            const int64_t node = row - chunks.run;
            require(node < 64 && (mask >> node) == 1 && end - last_chunk.start + __builtin_popcountll(mask) <= kStateChunk,
                    "a draft crosses the end of its chunk");
        }
    }
}

}  // namespace foreword
