#include "head.h"

#include "head_pass.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace foreword {

Head::Head(const Stack& decoder, HeadShape head_shape, StackShape shape, Rope rope)
    : Stack(shape, decoder.kernels(), decoder.workers(), std::move(rope)), head_shape_(head_shape) {
    require(head_shape.join != Join::Fused || head_shape.feature_width == shape.hidden_size, "fused features must be as wide as the head");
}

void Head::set_inputs(HeadInputs inputs) {
    const int64_t hidden = shape_.hidden_size, width = head_shape_.feature_width;
    const bool is_fused = head_shape_.join == Join::Fused;
    if (is_fused) require_matrix(inputs.fc, hidden, 2 * hidden, "fc has the wrong shape");
    else if (inputs.fc) require_matrix(inputs.fc, hidden, width, "fc has the wrong shape");
    else require(width == hidden, "features without fc must be as wide as the head");
    const int64_t parts = static_cast<int64_t>(inputs.feature_norms.size());
    require(parts == 0 || (!is_fused && inputs.fc && width % parts == 0), "the target's features cannot be divided among these norms");
    for (const std::vector<float>& norm : inputs.feature_norms) {
        require_norm(norm, width / parts, false, "a norm of features has the wrong size");
    }
    require_norm(inputs.embedding_norm, hidden, true, "norms must have one weight per hidden dimension");
    require_norm(inputs.hidden_norm, hidden, true, "norms must have one weight per hidden dimension");
    inputs_ = std::move(inputs);
}

void Head::add_layer(Layer layer) {
    const bool is_concat = layers_.empty() && head_shape_.join == Join::Concat;
    require(!is_concat || layer.attention_norm.empty(),
            "the first layer of a head that concatenates its inputs has no attention norm: give its norms to set_inputs");
    require(layer.has_attention(), "every layer of a head has attention");
    require(!layer.latent || head_shape_.join != Join::Context, "a head that keeps context rows cannot have latent attention");
    Stack::add_layer(std::move(layer), (is_concat ? 2 : 1) * shape_.hidden_size);
    require(head_shape_.join != Join::Context || share_input_format(*layers_.front().input_projections[1], *layers_.back().input_projections[1]),
            "the key projections of all layers must read the same input format");
}

void Head::set_embedding_and_output(Matrix embedding, Matrix output, std::vector<float> final_norm) {
    require(embedding && embedding->view().cols == shape_.hidden_size, "the embedding has the wrong shape");
    require_matrix(output, head_shape_.draft_vocab_size, shape_.hidden_size, "the output matrix has the wrong shape");
    require_norm(final_norm, shape_.hidden_size, true, "the final norm must have one weight per hidden dimension");
    embedding_ = std::move(embedding);
    output_ = std::move(output);
    final_norm_ = std::move(final_norm);
}

std::shared_ptr<const DraftVocabulary> Head::vocabulary(const int32_t* ids) {
    if (!vocabulary_ || !vocabulary_->has_ids(ids)) vocabulary_ = std::make_shared<DraftVocabulary>(ids, head_shape_.draft_vocab_size);
    return vocabulary_;
}

void Head::set_markov(Matrix embedding, Matrix output) {
    require(embedding && output && embedding->view().cols == output->view().cols && output->view().rows == head_shape_.draft_vocab_size,
            "the Markov head has the wrong shape");
    markov_embedding_ = std::move(embedding);
    markov_output_ = std::move(output);
}

void Head::set_selector(CandidateSelector selector) {
    require(head_shape_.join == Join::Context && head_shape_.norm_output && !markov_output_,
            "a selector needs a head of blocks with normed states and without a Markov head");
    const int64_t rank = selector.projection ? selector.projection->view().rows : 0;
    require_matrix(selector.projection, rank, shape_.hidden_size, "the projection of the selector has the wrong shape");
    require_matrix(selector.predecessor, embedding_->view().rows, rank, "the vectors of previous tokens have the wrong shape");
    require_matrix(selector.successor, head_shape_.draft_vocab_size, rank, "the vectors of candidates have the wrong shape");
    require(selector.candidates >= 1, "a selector has at least one candidate");
    selector_ = std::move(selector);
}

void Head::check(const HeadRows& rows, const KvStore& store, size_t kind) const {
    require(embedding_ && output_, "the head has no embedding or output matrix yet");
    require(kind < store.kinds().size() && store.kinds()[kind] == kv_row_kind(), "the KV store has no rows for this head");
    require(rows.batch.copies == 0, "KV rows can be copied only by the target's passes");
    const bool only_stores = head_shape_.join == Join::Context && !rows.are_own_states;
    require(!only_stores || rows.batch.logit_count == 0, "a pass that only stores KV rows has no logits");
    check_rows(rows.batch, store, embedding_->view().rows, rows.starts);
}

void Head::run(const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states) {
    check(rows, store, kind);
    HeadPass(*this, rows, store, kind, logits, states).run();
}

void Head::forward(const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->pass_mutex);
    run(rows, store, kind, logits, states);
}

void Head::draft_chains(const HeadRows& rows, KvStore& store, size_t kind, const ChainPlan& plan, int32_t* tokens) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->pass_mutex);
    const Batch& batch = rows.batch;
    require(batch.logit_count == batch.requests, "a chain starts from one logit row of every request");
    const auto hidden = static_cast<size_t>(shape_.hidden_size), vocab = static_cast<size_t>(head_shape_.draft_vocab_size);
    logits_.resize(static_cast<size_t>(batch.requests) * vocab);
    states_.resize(static_cast<size_t>(batch.requests) * hidden);
    std::fill_n(tokens, batch.requests * plan.max_depth, -1);
    run(rows, store, kind, logits_.data(), states_.data());
    std::vector<int64_t> requests;   // whose chains go on; logits_ and states_ have a row for each
    for (int64_t request = 0; request < batch.requests; ++request) requests.push_back(request);
    ChainLevel next_level(batch, plan);
    std::vector<DraftPosition> positions;
    std::vector<float> chances(static_cast<size_t>(batch.requests), 1.0f);  // that all draft tokens of a chain are accepted
    const auto is_worth_extending = [&](int64_t request, int64_t level) {
        if (!plan.stop) return true;
        float& chance = chances[static_cast<size_t>(request)];
        chance *= plan.rate(request, plan.stop->confidence[request * plan.max_depth + level]);
        return chance >= plan.stop->min_chances[request * plan.max_depth + level];
    };
    for (int64_t level = 0; level < plan.max_depth; ++level) {
        positions.clear();
        for (size_t i = 0; i < requests.size(); ++i) positions.push_back({requests[i], level, logits_.data() + i * vocab});
        draw(positions, plan, tokens);
        next_level.begin(level);
        next_states_.clear();
        for (size_t i = 0; i < requests.size(); ++i) {
            const int64_t request = requests[i];
            const int32_t token = tokens[request * plan.max_depth + level];
            if (token < 0 || level + 1 >= plan.depths[request] || !is_worth_extending(request, level)) continue;
            next_level.add(request, token, rows.starts);
            const float* state = states_.data() + i * hidden;
            next_states_.insert(next_states_.end(), state, state + hidden);
        }
        if (next_level.requests().empty()) return;
        run({next_level.batch(), next_level.starts(), next_states_.data(), true}, store, kind, logits_.data(), states_.data());
        requests = next_level.requests();
    }
}

void Head::draft_blocks(const HeadRows* context, const HeadRows& blocks, KvStore& store, size_t kind, const ChainPlan& plan,
                 int32_t* tokens) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->pass_mutex);
    require(head_shape_.join == Join::Context && blocks.are_own_states, "this head has no blocks: it drafts chains");
    const Batch& batch = blocks.batch;
    const auto vocab = static_cast<size_t>(head_shape_.draft_vocab_size);
    logits_.resize(static_cast<size_t>(batch.logit_count) * vocab);
    states_.resize(static_cast<size_t>(batch.logit_count * shape_.hidden_size));
    std::fill_n(tokens, batch.requests * plan.max_depth, -1);
    if (context) run(*context, store, kind, nullptr, nullptr);
    run(blocks, store, kind, logits_.data(), states_.data());
    const auto rank = selector_.projection ? static_cast<size_t>(selector_.projection->view().rows) : 0;
    if (rank > 0) {
        projected_.resize(static_cast<size_t>(batch.logit_count) * rank);
        Batch states;
        states.rows = batch.logit_count;
        SelectorPass(*this, states, store, kind, states_.data(), projected_.data()).run();
    }
    std::vector<DraftPosition> positions;
    for (int64_t request = 0, i = 0; request < batch.requests; ++request) {
        int64_t level = 0;
        for (; i < batch.logit_count && batch.logit_rows[i] < batch.row_starts[request + 1]; ++i, ++level) {
            const auto row = static_cast<size_t>(i);
            if (level < plan.depths[request]) positions.push_back({request, level, logits_.data() + row * vocab, projected_.data() + row * rank});
        }
    }
    if (markov_output_ || selector_.projection) draw_by_level(positions, blocks, store, kind, plan, tokens);
    else draw(positions, plan, tokens);
    for (int64_t request = 0; request < batch.requests; ++request) {  // a chain ends before the first missing token
        int32_t *begin = tokens + request * plan.max_depth, *end = begin + plan.max_depth;
        std::fill(std::find(begin, end, -1), end, -1);
    }
}

void Head::draw_by_level(const std::vector<DraftPosition>& positions, const HeadRows& blocks, KvStore& store, size_t kind,
                         const ChainPlan& plan, int32_t* tokens) {
    const auto vocab = static_cast<size_t>(head_shape_.draft_vocab_size);
    std::vector<int32_t> previous_tokens;
    std::vector<DraftPosition> level_positions;
    for (int64_t level = 0; level < plan.max_depth; ++level) {
        level_positions.clear();
        previous_tokens.clear();
        level_logits_.clear();
        for (const DraftPosition& position : positions) {
            const int32_t previous = level > 0 ? tokens[position.request * plan.max_depth + level - 1]
                                               : blocks.batch.token_ids[blocks.batch.row_starts[position.request]];
            if (position.level != level || previous < 0) continue;
            level_positions.push_back(position);
            previous_tokens.push_back(previous);
            level_logits_.insert(level_logits_.end(), position.logits, position.logits + vocab);
        }
        if (level_positions.empty()) return;
        const auto count = static_cast<int64_t>(previous_tokens.size());
        const Matrix& vectors = markov_output_ ? markov_embedding_ : selector_.predecessor;
        require_indices(previous_tokens.data(), count, vectors->view().rows, "a token is outside the vocabulary of the head");
        if (markov_output_) {
            Batch rows;
            rows.token_ids = previous_tokens.data();
            rows.rows = count;
            MarkovPass(*this, rows, store, kind, level_logits_.data()).run();
        } else {
            workers_->pool.run([&](int) {
                workers_->pool.parallel_for(count, 1, [&](int64_t i, int64_t) {
                    const auto row = static_cast<size_t>(i);
                    select(level_positions[row], previous_tokens[row], plan, level_logits_.data() + row * vocab);
                });
            });
        }
        for (size_t i = 0; i < level_positions.size(); ++i) level_positions[i].logits = level_logits_.data() + i * vocab;
        draw(level_positions, plan, tokens);
    }
}

void Head::select(const DraftPosition& position, int32_t previous_token, const ChainPlan& plan, float* logits) const {
    using Candidate = std::pair<float, int64_t>;   // logit and draft token
    const int64_t vocab = head_shape_.draft_vocab_size;
    std::vector<Candidate> best;   // a heap with the worst one first
    for (int64_t token = 0; token < vocab; ++token) {
        const float logit = position.logits[token];
        if (std::isnan(logit)) return;   // the logits stay, and the chain ends here
        if (plan.has_excluded_tokens && plan.id_of(token) >= plan.vocab) continue;
        const bool is_full = static_cast<int64_t>(best.size()) == selector_.candidates;
        if (is_full && logit <= best.front().first) continue;
        if (is_full) {
            std::pop_heap(best.begin(), best.end(), std::greater<>());
            best.pop_back();
        }
        best.emplace_back(logit, token);
        std::push_heap(best.begin(), best.end(), std::greater<>());
    }
    const auto rank = static_cast<size_t>(selector_.projection->view().rows);
    std::vector<float> pair(rank), vector(rank);
    kernels_.dequantize_row(selector_.predecessor->view(), previous_token, pair.data());
    for (size_t r = 0; r < rank; ++r) pair[r] *= position.projected[r];
    std::fill_n(logits, vocab, -std::numeric_limits<float>::infinity());
    for (const auto& [logit, token] : best) {
        kernels_.dequantize_row(selector_.successor->view(), token, vector.data());
        float score = logit * selector_.logit_scale;
        if (selector_.logit_cap > 0.0f) score = selector_.logit_cap * std::tanh(score / selector_.logit_cap);
        for (size_t r = 0; r < rank; ++r) score += pair[r] * vector[r];
        logits[token] = score;
    }
}

void Head::draw(const std::vector<DraftPosition>& positions, const ChainPlan& plan, int32_t* tokens) {
    const auto draw_one = [&](const DraftPosition& position, int thread) {
        if (position.level >= plan.depths[position.request]) return;
        const auto t = static_cast<size_t>(thread);
        tokens[position.request * plan.max_depth + position.level] =
            draw_draft_token(position.logits, head_shape_.draft_vocab_size, plan, position.request, position.level, scratch_[t], masked_[t]);
    };
    scratch_.resize(static_cast<size_t>(threads()));
    masked_.resize(static_cast<size_t>(threads()));
    if (positions.size() == 1) return draw_one(positions.front(), 0);  // faster than waking the other threads
    ThreadPool& pool = workers_->pool;
    pool.run([&](int thread) {
        pool.parallel_for(static_cast<int64_t>(positions.size()), 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) draw_one(positions[static_cast<size_t>(i)], thread);
        });
    });
}

}  // namespace foreword
