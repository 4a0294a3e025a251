// Python bindings of draft heads.
#include <algorithm>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "batch_bindings.h"
#include "decoder.h"
#include "head.h"

namespace foreword {

namespace {

void set_inputs(Head& head, const std::optional<Matrix>& fc, const std::vector<Floats>& feature_norms,
                const std::optional<Floats>& embedding_norm, const std::optional<Floats>& hidden_norm) {
    HeadInputs inputs{fc.value_or(nullptr), {}, copied(embedding_norm), copied(hidden_norm)};
    for (const Floats& norm : feature_norms) inputs.feature_norms.push_back(copied(norm));
    head.set_inputs(std::move(inputs));
}

Join join_named(const std::string& name) {
    if (name == "concat") return Join::Concat;
    if (name == "fused") return Join::Fused;
    if (name == "context") return Join::Context;
    throw std::invalid_argument("unknown join of a head's inputs: " + name);
}

HeadRows read_rows(const Head& head, const nb::tuple& arrays, const Array<const int32_t, 1>& starts,
                   const Array<const float, 2>& features, bool are_own_states) {
    const HeadRows rows{read_batch(arrays, {}), starts.data(), features.data(), are_own_states};
    const bool fits = static_cast<int64_t>(starts.shape(0)) == rows.batch.requests &&
                      static_cast<int64_t>(features.shape(0)) == rows.batch.rows &&
                      static_cast<int64_t>(features.shape(1)) == head.feature_width(are_own_states);
    if (!fits) throw std::invalid_argument("the arrays do not fit the batch");
    return rows;
}

void forward(Head& head, KvStore& store, size_t kind, const nb::tuple& arrays, const Array<const int32_t, 1>& starts,
             const Array<const float, 2>& features, bool are_own_states, const Array<float, 2>& logits, const Array<float, 2>& states) {
    const HeadRows rows = read_rows(head, arrays, starts, features, are_own_states);
    const auto fits = [&](const auto& array, int64_t columns) {
        return static_cast<int64_t>(array.shape(0)) == rows.batch.logit_count && static_cast<int64_t>(array.shape(1)) == columns;
    };
    if (!fits(logits, head.head_shape().draft_vocab_size) || !fits(states, head.shape().hidden_size)) {
        throw std::invalid_argument("the arrays do not fit the batch");
    }
    nb::gil_scoped_release release;
    head.forward(rows, store, kind, logits.data(), states.data());
}

template <typename T>
using Field = nb::ndarray<const T, nb::ndim<1>, nb::device::cpu>;  // may be a column of records

// The arrays of a ChainStop: edges, rates, min_chances, confidence.
using StopArrays = std::tuple<Array<const float, 1>, Array<const float, 2>, Array<const float, 2>, Array<float, 2>>;

ChainStop read_stop(const StopArrays& arrays, size_t requests, size_t max_depth) {
    const auto& [edges, rates, min_chances, confidence] = arrays;
    const bool fits = rates.shape(0) == requests && rates.shape(1) == edges.shape(0) + 1 &&
                      min_chances.shape(0) == requests && min_chances.shape(1) == max_depth && confidence.shape(0) == requests &&
                      confidence.shape(1) == max_depth;
    if (!fits) throw std::invalid_argument("the arrays do not fit the batch");
    return {edges.data(), static_cast<int64_t>(rates.shape(1)), rates.data(), min_chances.data(), confidence.data()};
}

// The arguments of a ChainPlan; `tokens` [requests, max depth] is the output.
struct PlanArrays {
    const Array<const int32_t, 1>&lengths, &depths;
    const std::optional<Array<const int32_t, 1>>& ids;
    int64_t vocab;
    const Field<double>& temperature;
    const Field<int64_t>& top_k;
    const Field<double>&top_p, &min_p;
    const Field<uint64_t>& stems;
    const Array<int32_t, 2>& tokens;
    const std::optional<StopArrays>& stop;

    ChainPlan read(Head& head, const Batch& batch) const {
        const auto requests = static_cast<size_t>(batch.requests);
        const int64_t draft_vocab = head.head_shape().draft_vocab_size;
        for (const size_t size : {lengths.shape(0), depths.shape(0), temperature.shape(0), top_k.shape(0), top_p.shape(0),
                                  min_p.shape(0), stems.shape(0), tokens.shape(0)}) {
            if (size != requests) throw std::invalid_argument("the arrays do not fit the batch");
        }
        if (ids ? static_cast<int64_t>(ids->shape(0)) != draft_vocab : vocab > draft_vocab) {
            throw std::invalid_argument("the vocabulary does not have the size of the head's");
        }
        const auto vocabulary = ids ? head.vocabulary(ids->data()) : nullptr;
        const bool has_excluded_tokens = (vocabulary ? vocabulary->largest + 1 : draft_vocab) > vocab;
        ChainPlan plan{lengths.data(), depths.data(), vocabulary, vocab, static_cast<int64_t>(tokens.shape(1)), has_excluded_tokens, {}, {}, {}};
        if (stop) plan.stop = read_stop(*stop, requests, tokens.shape(1));
        for (size_t r = 0; r < requests; ++r) {
            const int64_t end = lengths(r) + depths(r) - 1;  // of the rows that passes compute: the last token has none
            if (lengths(r) < 0 || depths(r) < 1 || depths(r) > plan.max_depth || plan.max_depth > 64 || end > batch.pages * kPageSize) {
                throw std::invalid_argument("a chain does not fit its pages");
            }
            plan.params.push_back(checked_params(temperature(r), top_k(r), top_p(r), min_p(r)));
            plan.stems.push_back(stems(r));
        }
        return plan;
    }
};

void draft_chains(Head& head, KvStore& store, size_t kind, const nb::tuple& arrays, const Array<const int32_t, 1>& starts,
                  const Array<const float, 2>& features, const Array<const int32_t, 1>& lengths, const Array<const int32_t, 1>& depths,
                  const std::optional<Array<const int32_t, 1>>& ids, int64_t vocab, const Field<double>& temperature,
                  const Field<int64_t>& top_k, const Field<double>& top_p, const Field<double>& min_p, const Field<uint64_t>& stems,
                  const Array<int32_t, 2>& tokens, const std::optional<StopArrays>& stop) {
    const HeadRows rows = read_rows(head, arrays, starts, features, false);
    const PlanArrays plan_arrays{lengths, depths, ids, vocab, temperature, top_k, top_p, min_p, stems, tokens, stop};
    const ChainPlan plan = plan_arrays.read(head, rows.batch);
    nb::gil_scoped_release release;
    head.draft_chains(rows, store, kind, plan, tokens.data());
}

using Context = std::tuple<nb::tuple, Array<const int32_t, 1>, Array<const float, 2>>;  // arrays, starts, features

void draft_blocks(Head& head, KvStore& store, size_t kind, const std::optional<Context>& context, const nb::tuple& arrays,
                  const Array<const int32_t, 1>& starts, const Array<const float, 2>& features, const Array<const int32_t, 1>& lengths,
                  const Array<const int32_t, 1>& depths, const std::optional<Array<const int32_t, 1>>& ids, int64_t vocab,
                  const Field<double>& temperature, const Field<int64_t>& top_k, const Field<double>& top_p, const Field<double>& min_p,
                  const Field<uint64_t>& stems, const Array<int32_t, 2>& tokens, const std::optional<StopArrays>& stop) {
    std::optional<HeadRows> context_rows;
    if (context) context_rows = read_rows(head, std::get<0>(*context), std::get<1>(*context), std::get<2>(*context), false);
    const HeadRows rows = read_rows(head, arrays, starts, features, true);
    const PlanArrays plan_arrays{lengths, depths, ids, vocab, temperature, top_k, top_p, min_p, stems, tokens, stop};
    const ChainPlan plan = plan_arrays.read(head, rows.batch);
    nb::gil_scoped_release release;
    head.draft_blocks(context_rows ? &*context_rows : nullptr, rows, store, kind, plan, tokens.data());
}

}  // namespace

void register_head(nb::module_& m) {
    nb::class_<BlockConvolution>(m, "BlockConvolution")
        .def("__init__", [](BlockConvolution* self, int64_t taps, int64_t group, const Floats& base, Matrix projection) {
            new (self) BlockConvolution{taps, group, copied(base), std::move(projection)};
        }, nb::arg("taps"), nb::arg("group"), nb::arg("base"), nb::arg("projection"));
    nb::class_<Head>(m, "Head")
        .def("__init__", [](Head* self, const Decoder& decoder, int64_t draft_vocab_size, int64_t feature_width, const std::string& join,
                            bool norm_before_residual, bool norm_output, int64_t hidden_size, int64_t intermediate_size,
                            int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float rms_norm_eps,
                            float magnitude, const Floats& inverse_frequencies) {
            if (draft_vocab_size < 1) throw std::invalid_argument("the vocabulary of a head must have at least one token");
            const HeadShape head_shape{draft_vocab_size, feature_width, join_named(join), norm_before_residual, norm_output};
            const StackShape shape{hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rms_norm_eps};
            new (self) Head(decoder, head_shape, shape, {copied(inverse_frequencies), magnitude});
        }, nb::arg("decoder"), nb::arg("draft_vocab_size"), nb::arg("feature_width"), nb::arg("join"),
           nb::arg("norm_before_residual"), nb::arg("norm_output"), nb::arg("hidden_size"), nb::arg("intermediate_size"),
           nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("rms_norm_eps"), nb::arg("magnitude"),
           nb::arg("inverse_frequencies"))
        .def("set_inputs", &set_inputs, nb::arg("fc").none(), nb::arg("feature_norms"), nb::arg("embedding_norm").none(),
             nb::arg("hidden_norm").none())
        .def("add_layer", [](Head& self, const std::optional<Floats>& attention_norm, const Floats& mlp_norm,
                             std::vector<Matrix> mixing, const std::vector<Matrix>& mlp, const std::optional<Floats>& query_norm,
                             const std::optional<Floats>& key_norm, std::shared_ptr<Experts> experts, float score_scale,
                             std::shared_ptr<Latent> latent) {
            Layer layer = read_layer(attention_norm, mlp_norm, std::move(mixing), mlp, query_norm, key_norm, std::move(experts), std::move(latent));
            layer.score_scale = score_scale;
            self.add_layer(std::move(layer));
        }, nb::arg("attention_norm").none(), nb::arg("mlp_norm"), nb::arg("mixing"), nb::arg("mlp"), nb::arg("query_norm").none(),
           nb::arg("key_norm").none(), nb::arg("experts").none(), nb::arg("score_scale"), nb::arg("latent").none())
        .def("set_embedding_and_output", [](Head& self, Matrix embedding, Matrix output, const std::optional<Floats>& final_norm) {
            self.set_embedding_and_output(std::move(embedding), std::move(output), copied(final_norm));
        }, nb::arg("embedding"), nb::arg("output"), nb::arg("final_norm").none())
        .def("set_markov", &Head::set_markov, nb::arg("embedding"), nb::arg("output"))
        .def("set_selector", [](Head& self, Matrix predecessor, Matrix successor, Matrix projection, int64_t candidates, float logit_scale,
                                float logit_cap, float embedding_scale) {
            self.set_selector({std::move(predecessor), std::move(successor), std::move(projection), candidates, logit_scale, logit_cap,
                               embedding_scale});
        }, nb::arg("predecessor"), nb::arg("successor"), nb::arg("projection"), nb::arg("candidates"), nb::arg("logit_scale"),
           nb::arg("logit_cap"), nb::arg("embedding_scale"))
        .def("set_convolutions", [](Head& self, std::shared_ptr<BlockConvolution> attention, std::shared_ptr<BlockConvolution> mlp) {
            self.set_convolutions(std::move(attention), std::move(mlp));
        }, nb::arg("attention"), nb::arg("mlp"))
        .def("forward", &forward, nb::arg("store"), nb::arg("kind"), nb::arg("arrays"), nb::arg("starts"), nb::arg("features"),
             nb::arg("are_own_states"), nb::arg("logits"), nb::arg("states"))
        .def("draft_chains", &draft_chains, nb::arg("store"), nb::arg("kind"), nb::arg("arrays"), nb::arg("starts"), nb::arg("features"),
             nb::arg("lengths"), nb::arg("depths"), nb::arg("ids").none(), nb::arg("vocab"), nb::arg("temperature"), nb::arg("top_k"),
             nb::arg("top_p"), nb::arg("min_p"), nb::arg("stems"), nb::arg("tokens"), nb::arg("stop").none())
        .def("draft_blocks", &draft_blocks, nb::arg("store"), nb::arg("kind"), nb::arg("context").none(), nb::arg("arrays"), nb::arg("starts"),
             nb::arg("features"), nb::arg("lengths"), nb::arg("depths"), nb::arg("ids").none(), nb::arg("vocab"),
             nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("stems"), nb::arg("tokens"),
             nb::arg("stop").none());
}

}  // namespace foreword
