#include "batch_bindings.h"

#include <algorithm>
#include <stdexcept>

namespace foreword {

namespace {

// One array of a batch, [entries] or [entries, width].
template <typename T>
struct BatchArray {
    const T* data;
    int64_t entries, width;

    explicit BatchArray(nb::handle object) {
        const auto array = nb::cast<nb::ndarray<const T, nb::c_contig, nb::device::cpu>>(object);
        if (array.ndim() < 1 || array.ndim() > 2) throw std::invalid_argument("an array of the batch has neither one nor two dimensions");
        data = array.data();
        entries = static_cast<int64_t>(array.shape(0));
        width = array.ndim() == 2 ? static_cast<int64_t>(array.shape(1)) : 1;
    }
};

}  // namespace

std::vector<float> copied(const Floats& array) { return {array.data(), array.data() + array.shape(0)}; }

std::vector<float> copied(const std::optional<Floats>& array) {
    return array ? copied(*array) : std::vector<float>{};
}

std::vector<std::string> batch_arrays() {
#define ARRAY(type, name, entries, values) #name,
    return {FOREWORD_BATCH_ARRAYS(ARRAY)};
#undef ARRAY
}

Batch read_batch(const nb::tuple& arrays, const std::vector<std::pair<int64_t, bool>>& taps) {
    if (arrays.size() != batch_arrays().size()) throw std::invalid_argument("the batch has the wrong number of arrays");
    size_t index = 0;
#define ARRAY(type, name, entries, values) const BatchArray<type> name(arrays[index++]);
    FOREWORD_BATCH_ARRAYS(ARRAY)
#undef ARRAY
    const int64_t rows = token_ids.entries, requests = kv_lens.entries, pages = block_tables.width;
    const int64_t logit_count = logit_rows.entries, copies = kv_copies.entries, hidden_count = hidden_rows.entries;
    Batch batch;
#define ARRAY(type, name, count, values)                                                                           \
    if (name.entries != (count) || (name.entries > 0 && name.width != (values))) {                                 \
        throw std::invalid_argument("the arrays of the batch do not fit together: " #name);                        \
    }                                                                                                              \
    batch.name = name.data;
    FOREWORD_BATCH_ARRAYS(ARRAY)
#undef ARRAY
    batch.rows = rows;
    batch.requests = requests;
    batch.pages = pages;
    batch.logit_count = logit_count;
    batch.copies = copies;
    batch.hidden_count = hidden_count;
    for (const auto& [layer, is_normed] : taps) batch.taps.push_back({layer, is_normed});
    return batch;
}

Layer read_layer(const std::optional<Floats>& attention_norm, const std::optional<Floats>& mlp_norm,
                 std::vector<Matrix> mixing, const std::vector<Matrix>& mlp, const std::optional<Floats>& query_norm,
                 const std::optional<Floats>& key_norm, std::shared_ptr<Experts> experts, std::shared_ptr<Latent> latent) {
    for (const std::vector<Matrix>* matrices : {static_cast<const std::vector<Matrix>*>(&mixing), &mlp}) {
        if (std::find(matrices->begin(), matrices->end(), nullptr) != matrices->end()) {
            throw std::invalid_argument("a matrix of the layer is missing");
        }
    }
    if (mlp.size() == 1 || mlp.size() > 3) throw std::invalid_argument("an MLP has two or three matrices");
    Layer layer;
    layer.attention_norm = copied(attention_norm);
    layer.mlp_norm = copied(mlp_norm);
    layer.query_norm = copied(query_norm);
    layer.key_norm = copied(key_norm);
    if (!mixing.empty()) layer.output_projection = mixing.back(), mixing.pop_back();
    layer.input_projections = std::move(mixing);
    if (!mlp.empty()) layer.gate = mlp.front(), layer.down = mlp.back();
    if (mlp.size() == 3) layer.up = mlp[1];
    layer.experts = std::move(experts);
    layer.latent = std::move(latent);
    return layer;
}

}  // namespace foreword
