// Python bindings of decoders, their layers and their memory.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "batch_bindings.h"
#include "decoder.h"
#include "dispatch.h"

namespace foreword {

namespace {

// A Chunk of kv/chunks.py: start, state, ring.
using Chunk = std::tuple<int64_t, int64_t, std::optional<int64_t>>;
using Chunks = std::vector<std::tuple<int64_t, int64_t, Chunk, std::vector<Chunk>>>;   // RequestChunks: begin, run, read, entered

StateChunk state_chunk(const Chunk& chunk) {
    return {std::get<0>(chunk), std::get<1>(chunk), std::get<2>(chunk).value_or(-1)};
}

void forward(Decoder& decoder, KvStore& store, const nb::tuple& arrays, const std::vector<std::pair<int64_t, bool>>& taps,
             const Array<float, 2>& logits, const Array<float, 2>& hidden, std::vector<int32_t> adapters, StateStore* states,
             const Chunks& chunks, std::vector<std::pair<int64_t, int64_t>> ring_copies, const std::optional<Array<float, 4>>& shares) {
    Batch batch = read_batch(arrays, taps);
    batch.adapters = std::move(adapters);
    batch.ring_copies = std::move(ring_copies);
    for (const auto& [begin, run, read, entered] : chunks) {
        batch.chunks.push_back({begin, run, state_chunk(read), {}});
        for (const Chunk& chunk : entered) batch.chunks.back().entered.push_back(state_chunk(chunk));
    }
    const bool fits = static_cast<int64_t>(logits.shape(0)) == batch.logit_count &&
                      static_cast<int64_t>(logits.shape(1)) == decoder.vocab_size() &&
                      static_cast<int64_t>(hidden.shape(0)) == batch.hidden_count &&
                      hidden.shape(1) == taps.size() * static_cast<size_t>(decoder.shape().hidden_size) &&
                      (!shares || (static_cast<int64_t>(shares->shape(0)) == batch.requests &&
                                   static_cast<int64_t>(shares->shape(1)) == decoder.shape().num_heads && shares->shape(2) == 2));
    if (!fits) throw std::invalid_argument("the output arrays do not fit the batch");
    nb::gil_scoped_release release;
    decoder.forward(batch, store, states, logits.data(), hidden.data(), shares ? shares->data() : nullptr,
                    shares ? static_cast<int64_t>(shares->shape(3)) : 0);
}

void exit_forward(Decoder& decoder, KvStore& store, size_t kind, const nb::tuple& arrays, const Array<const int32_t, 1>& starts,
                  const std::optional<Array<const float, 2>>& states, const Array<float, 2>& logits) {
    const ExitRows rows{read_batch(arrays, {}), starts.data(), states ? states->data() : nullptr};
    const bool fits = static_cast<int64_t>(starts.shape(0)) == rows.batch.requests &&
                      static_cast<int64_t>(logits.shape(0)) == rows.batch.logit_count &&
                      static_cast<int64_t>(logits.shape(1)) == decoder.vocab_size() &&
                      (!states || (static_cast<int64_t>(states->shape(0)) == rows.batch.rows &&
                                   static_cast<int64_t>(states->shape(1)) == decoder.shape().hidden_size));
    if (!fits) throw std::invalid_argument("the arrays do not fit the batch");
    nb::gil_scoped_release release;
    decoder.exit(rows, store, kind, logits.data());
}

// [layers][kSites], the factors A and B of each site, or None.
using Factors = std::vector<std::vector<std::optional<std::pair<Matrix, Matrix>>>>;

void set_adapter(Decoder& decoder, int64_t slot, const std::optional<Factors>& layers) {
    std::shared_ptr<Adapter> adapter;
    if (layers) {
        adapter = std::make_shared<Adapter>();
        for (const auto& layer : *layers) {
            if (layer.size() != kSites) throw std::invalid_argument("the factors of a layer must be a list of eight pairs or None");
            adapter->layers.emplace_back();
            for (size_t site = 0; site < kSites; ++site) {
                if (layer[site]) adapter->layers.back()[site] = {layer[site]->first, layer[site]->second};
            }
        }
    }
    nb::gil_scoped_release release;
    decoder.set_adapter(slot, std::move(adapter));
}

using Rows = nb::ndarray<nb::numpy, nb::ndim<5>>;

KvDtype dtype_named(const std::string& name) {
    if (name == "float32") return KvDtype::Float32;
    if (name == "bfloat16") return KvDtype::BFloat16;
    if (name == "int8") return KvDtype::Int8;
    throw std::invalid_argument("KV rows must be float32, bfloat16 or int8, not " + name);
}

// Returns views of the keys [layers, pages, kv heads, padded key dim, 16] and the values [layers, pages, kv heads, 16, padded
// value dim] of one kind, without scales; the value dimension of latent rows is 0.
std::pair<Rows, Rows> arrays(KvStore& store, int64_t kind) {
    if (kind < 0 || kind >= static_cast<int64_t>(store.kinds().size())) throw std::invalid_argument("there are no such KV rows");
    const RowKind& rows = store.kinds()[static_cast<size_t>(kind)];
    const KvView first_layer = store.view(static_cast<size_t>(kind), 0);
    const auto layers = static_cast<size_t>(rows.layers), pages = static_cast<size_t>(store.pages());
    const int64_t key_dim = padded_dim_of(rows.key_dim), value_dim = rows.is_latent ? 0 : key_dim;
    const auto heads = static_cast<size_t>(rows.kv_heads), page = static_cast<size_t>(kPageSize);
    const int64_t number_bytes = kv_dtype_bytes(store.dtype());   // strides are in numbers
    const int64_t head_stride = kv_block_bytes(store.dtype(), key_dim) / number_bytes, page_stride = rows.kv_heads * head_stride;
    const int64_t layer_stride = rows.page_bytes(store.dtype()) / rows.layers * store.pages() / number_bytes;
    const nb::object owner = nb::find(store);
    const nb::dlpack::dtype dtypes[] = {nb::dtype<float>(), nb::dtype<int16_t>(), nb::dtype<int8_t>()};   // NumPy has no bfloat16, so its bits are returned
    const nb::dlpack::dtype dtype = dtypes[static_cast<int>(store.dtype())];
    return {Rows(first_layer.keys, {layers, pages, heads, static_cast<size_t>(key_dim), page}, owner,
                 {layer_stride, page_stride, head_stride, kPageSize, 1}, dtype),
            Rows(first_layer.values, {layers, pages, heads, page, static_cast<size_t>(value_dim)}, owner,
                 {layer_stride, page_stride, head_stride, key_dim, 1}, dtype)};
}

void copy_rows(KvStore& store, const Array<const int32_t, 2>& copies) {
    const int64_t count = static_cast<int64_t>(copies.shape(0));
    if (count > 0 && copies.shape(1) != 2) throw std::invalid_argument("a copy must be a pair of KV rows");
    for (int64_t i = 0; i < 2 * count; ++i) {
        if (copies.data()[i] < 0 || copies.data()[i] >= store.slots()) throw std::invalid_argument("a KV copy is outside the pages");
    }
    nb::gil_scoped_release release;
    for (int64_t layer = 0; layer < store.layers(); ++layer) store.copy_rows(layer, copies.data(), count);
}

void bind_kv_store(nb::module_& m) {
    nb::class_<KvStore>(m, "KvStore")
        .def("__init__", [](KvStore* self, int64_t pages, const std::vector<std::tuple<int64_t, int64_t, int64_t, bool>>& kinds,
                            const std::string& dtype) {
            std::vector<RowKind> rows;
            for (const auto& [layers, kv_heads, key_dim, is_latent] : kinds) rows.push_back({layers, kv_heads, key_dim, is_latent});
            new (self) KvStore(pages, std::move(rows), dtype_named(dtype));
        }, nb::arg("pages"), nb::arg("kinds"), nb::arg("dtype"))
        .def("arrays", &arrays, nb::arg("kind"))
        .def("copy_rows", &copy_rows, nb::arg("copies"))
        .def_prop_ro("pages", &KvStore::pages)
        .def_prop_ro("bytes_per_row", &KvStore::bytes_per_row);
}

void bind_experts(nb::module_& m) {
    nb::class_<Experts>(m, "Experts")
        .def("__init__", [](Experts* self, Matrix router, std::vector<Matrix> gate, std::vector<Matrix> up, std::vector<Matrix> down,
                            int64_t per_token, bool uses_sigmoid, bool normalizes, float scale, int64_t groups, int64_t top_groups,
                            int64_t group_top_experts, const std::optional<Floats>& correction, const std::optional<Floats>& shared_gate) {
            for (const std::vector<Matrix>* matrices : {&gate, &up, &down}) {
                const bool is_complete = (matrices == &up || !matrices->empty()) &&
                                         std::find(matrices->begin(), matrices->end(), nullptr) == matrices->end();
                if (!is_complete) throw std::invalid_argument("every expert has three matrices, or two without an up projection");
            }
            new (self) Experts{{per_token, uses_sigmoid, normalizes, scale, groups, top_groups, group_top_experts}, std::move(router),
                               copied(correction), copied(shared_gate), std::move(gate), std::move(up), std::move(down)};
        }, nb::arg("router"), nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("per_token"), nb::arg("uses_sigmoid"),
           nb::arg("normalizes"), nb::arg("scale"), nb::arg("groups"), nb::arg("top_groups"), nb::arg("group_top_experts"),
           nb::arg("correction").none(), nb::arg("shared_gate").none())
        .def("set_clamp", [](Experts& self, float limit, float slope) {
            self.limit = limit;
            self.slope = slope;
        }, nb::arg("limit"), nb::arg("slope"))
        .def_prop_ro("nbytes", &Experts::bytes);
}

void bind_latent(nb::module_& m) {
    nb::class_<Latent>(m, "Latent")
        .def("__init__", [](Latent* self, int64_t kv_rank, int64_t rope_dim, int64_t nope_dim, int64_t value_dim, float eps,
                            const std::optional<Matrix>& query, std::vector<Matrix> keys, std::vector<Matrix> values) {
            new (self) Latent{{kv_rank, rope_dim, nope_dim, value_dim}, eps, query.value_or(nullptr), std::move(keys), std::move(values)};
        }, nb::arg("kv_rank"), nb::arg("rope_dim"), nb::arg("nope_dim"), nb::arg("value_dim"), nb::arg("eps"), nb::arg("query").none(),
           nb::arg("keys"), nb::arg("values"))
        .def_prop_ro("nbytes", &Latent::bytes);
}

Recurrence recurrence_named(const std::string& kind) {
    if (kind == "delta") return Recurrence::Delta;
    if (kind == "ssm") return Recurrence::Ssm;
    if (kind == "convolution") return Recurrence::Convolution;
    throw std::invalid_argument("the kind of a recurrent layer must be delta, ssm or convolution, not " + kind);
}

Activation activation_named(const std::string& name) {
    if (name == "silu") return Activation::Silu;
    if (name == "gelu_pytorch_tanh") return Activation::Gelu;
    if (name == "relu2") return Activation::SquaredRelu;
    throw std::invalid_argument("the CPU kernels have no activation named " + name);
}

using Arrays = nb::ndarray<nb::numpy, float, nb::ndim<5>>;

// Returns a view of the matrices of all states, [layers, states, heads, key dim, value dim].
Arrays matrices(StateStore& store) {
    const RecurrentShape& shape = store.shape();
    const auto size = [](int64_t count) { return static_cast<size_t>(count); };
    return Arrays(store.matrix(0, 0, 0), {size(store.layers()), size(store.states()), size(shape.heads), size(shape.key_dim), size(shape.value_dim)},
                  nb::find(store));
}

void bind_recurrent(nb::module_& m) {
    nb::class_<Recurrent>(m, "Recurrent")
        .def("__init__", [](Recurrent* self, const std::string& kind, int64_t kernel_size, int64_t heads, int64_t value_dim, int64_t key_heads,
                            int64_t key_dim, const Floats& conv, const std::optional<Floats>& conv_bias, const std::optional<Floats>& norm,
                            const std::optional<Floats>& log_decay_rates, const std::optional<Floats>& time_bias, const std::optional<Floats>& skip,
                            int64_t norm_groups, std::pair<float, float> time_step_limits) {
            Recurrent recurrent{{recurrence_named(kind), kernel_size, heads, value_dim, key_heads, key_dim}, copied(conv), copied(conv_bias),
                                copied(norm), copied(log_decay_rates), copied(time_bias), copied(skip), norm_groups,
                                time_step_limits.first, time_step_limits.second, {}, {}};
            recurrent.prepare();
            new (self) Recurrent(std::move(recurrent));
        }, nb::arg("kind"), nb::arg("kernel_size"), nb::arg("heads"), nb::arg("value_dim"), nb::arg("key_heads"), nb::arg("key_dim"),
           nb::arg("conv"), nb::arg("conv_bias").none(), nb::arg("norm").none(), nb::arg("log_decay_rates").none(), nb::arg("time_bias").none(),
           nb::arg("skip").none(), nb::arg("norm_groups"), nb::arg("time_step_limits"));
    nb::class_<StateStore>(m, "StateStore")
        .def("__init__", [](StateStore* self, const Recurrent& recurrent, int64_t layers, int64_t states, int64_t rings) {
            new (self) StateStore(layers, recurrent.shape, states, rings);
        }, nb::arg("recurrent"), nb::arg("layers"), nb::arg("states"), nb::arg("rings"))
        .def("matrices", &matrices);
}

void bind_decoder(nb::module_& m) {
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__", [](Decoder* self, int64_t vocab_size, int64_t hidden_size, int64_t intermediate_size,
                            int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float rms_norm_eps, float magnitude,
                            const Floats& inverse_frequencies, const std::string& isa, int threads, float embedding_scale,
                            float logit_scale, float logit_softcap) {
            const StackShape shape{hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rms_norm_eps};
            new (self) Decoder(vocab_size, shape, {embedding_scale, logit_scale, logit_softcap}, kernels_named(isa),
                               checked_threads(threads), {copied(inverse_frequencies), magnitude});
        }, nb::arg("vocab_size"), nb::arg("hidden_size"), nb::arg("intermediate_size"), nb::arg("num_heads"),
           nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("rms_norm_eps"), nb::arg("magnitude"), nb::arg("inverse_frequencies"),
           nb::arg("isa"), nb::arg("threads"), nb::arg("embedding_scale"), nb::arg("logit_scale"), nb::arg("logit_softcap"))
        .def("add_rope", [](Decoder& self, const Floats& inverse_frequencies, float magnitude) {
            return self.add_rope({copied(inverse_frequencies), magnitude});
        }, nb::arg("inverse_frequencies"), nb::arg("magnitude"))
        .def("add_layer", [](Decoder& self, const std::optional<Floats>& attention_norm, const std::optional<Floats>& mlp_norm,
                             std::vector<Matrix> mixing, const std::vector<Matrix>& mlp, const std::optional<Floats>& query_norm,
                             const std::optional<Floats>& key_norm, std::shared_ptr<Experts> experts, int64_t window, bool has_rope,
                             float score_scale, const std::optional<Floats>& post_attention_norm,
                             const std::optional<Floats>& post_mlp_norm, float residual_scale, size_t rope_index, float softcap,
                             const std::string& activation, std::shared_ptr<Recurrent> recurrent, std::shared_ptr<Latent> latent) {
            Layer layer = read_layer(attention_norm, mlp_norm, std::move(mixing), mlp, query_norm, key_norm, std::move(experts), std::move(latent));
            layer.post_attention_norm = copied(post_attention_norm);
            layer.post_mlp_norm = copied(post_mlp_norm);
            layer.residual_scale = residual_scale;
            layer.rope_index = rope_index;
            layer.softcap = softcap;
            layer.activation = activation_named(activation);
            layer.recurrent = std::move(recurrent);
            layer.window = window;
            layer.has_rope = has_rope;
            layer.score_scale = score_scale;
            self.add_layer(std::move(layer));
        }, nb::arg("attention_norm").none(), nb::arg("mlp_norm").none(), nb::arg("mixing"), nb::arg("mlp"), nb::arg("query_norm").none(),
           nb::arg("key_norm").none(), nb::arg("experts").none(), nb::arg("window"), nb::arg("has_rope"), nb::arg("score_scale"),
           nb::arg("post_attention_norm").none(), nb::arg("post_mlp_norm").none(), nb::arg("residual_scale"), nb::arg("rope_index"),
           nb::arg("softcap"), nb::arg("activation"), nb::arg("recurrent").none(), nb::arg("latent").none())
        .def("set_sinks", [](Decoder& self, const Floats& sinks) { self.set_sinks(copied(sinks)); }, nb::arg("sinks"))
        .def("set_embedding_and_output", [](Decoder& self, Matrix embedding, Matrix head, const Floats& final_norm) {
            self.set_embedding_and_output(std::move(embedding), std::move(head), copied(final_norm));
        }, nb::arg("embedding"), nb::arg("head"), nb::arg("final_norm"))
        .def("forward", &forward, nb::arg("store"), nb::arg("arrays"), nb::arg("taps"), nb::arg("logits"), nb::arg("hidden"),
             nb::arg("adapters"), nb::arg("states").none(), nb::arg("chunks"), nb::arg("ring_copies"),
             nb::arg("shares").none())
        .def("exit", &exit_forward, nb::arg("store"), nb::arg("kind"), nb::arg("arrays"), nb::arg("starts"), nb::arg("states").none(),
             nb::arg("logits"))
        .def("set_adapter", &set_adapter, nb::arg("slot"), nb::arg("layers").none())
        .def_prop_ro("threads", &Decoder::threads)
        .def_prop_ro("isa", &Decoder::isa)
        .def_prop_ro("weight_bytes", &Decoder::weight_bytes);
}

}  // namespace

void register_decoder(nb::module_& m) {
    m.attr("BATCH_ARRAYS") = batch_arrays();
    m.attr("STATE_CHUNK") = kStateChunk;
    m.attr("RING_ROWS") = kRingRows;
    m.attr("SHARE_PART") = kSharePart;
    bind_kv_store(m);
    bind_experts(m);
    bind_latent(m);
    bind_recurrent(m);
    bind_decoder(m);
}

}  // namespace foreword
