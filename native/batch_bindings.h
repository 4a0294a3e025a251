// Conversion of batches, norms and layers from Python.
#pragma once

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch.h"
#include "bindings.h"
#include "stack.h"

namespace foreword {

// Copies an array; None becomes an empty vector.
std::vector<float> copied(const Floats& array);
std::vector<float> copied(const std::optional<Floats>& array);

// Returns the names of a batch's arrays, in the order in which `read_batch` expects them.
std::vector<std::string> batch_arrays();
// Returns a batch that points into the arrays; throws std::invalid_argument unless their shapes fit together. A tap is a
// layer and whether the final norm is applied.
Batch read_batch(const nb::tuple& arrays, const std::vector<std::pair<int64_t, bool>>& taps);
// Returns a layer.
// - `mixing`: the input projections and then the output projection of attention or a recurrence; empty in a layer that is only an
//   MLP.
// - `mlp`: gate, up and down projection; with a squared ReLU gate and down; empty without an MLP, and in a mixture without shared
//   experts.
Layer read_layer(const std::optional<Floats>& attention_norm, const std::optional<Floats>& mlp_norm,
                 std::vector<Matrix> mixing, const std::vector<Matrix>& mlp, const std::optional<Floats>& query_norm,
                 const std::optional<Floats>& key_norm, std::shared_ptr<Experts> experts, std::shared_ptr<Latent> latent);

}  // namespace foreword
