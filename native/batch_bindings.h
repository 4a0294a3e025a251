// Batches as they come from Python.
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

std::vector<float> copied(const Floats& array);
std::vector<float> copied(const std::optional<Floats>& array);

// The names of the arrays, in the order in which they come.
std::vector<std::string> batch_arrays();
// A view of the arrays; throws unless they fit together.
Batch read_batch(const nb::tuple& arrays, const std::vector<std::pair<int64_t, bool>>& taps);
// The parts of a layer. `mixing` has what reads the stream, then the output projection; nothing in an MLP alone. `mlp` has
// gate, up and down, or what a squared ReLU follows and down; nothing where there is none but experts.
Layer read_layer(const std::optional<Floats>& attention_norm, const std::optional<Floats>& mlp_norm,
                 std::vector<Matrix> mixing, const std::vector<Matrix>& mlp, const std::optional<Floats>& query_norm,
                 const std::optional<Floats>& key_norm, std::shared_ptr<Experts> experts);

}  // namespace foreword
