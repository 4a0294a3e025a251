#include "head.h"

#include "head_pass.h"

#include <algorithm>

namespace foreword {

Head::Head(const Stack& decoder, HeadShape head, StackShape shape, Rope rope)
    : Stack(shape, decoder.kernels(), decoder.workers(), std::move(rope)), head_(head) {
    require(!head.fused || head.feature_width == shape.hidden_size, "fused features must be as wide as the head");
}

void Head::set_inputs(HeadInputs inputs) {
    const int64_t hidden = shape_.hidden_size, width = head_.feature_width;
    if (head_.fused) require_matrix(inputs.fc, hidden, 2 * hidden, "fc has the wrong shape");
    else if (inputs.fc) require_matrix(inputs.fc, hidden, width, "fc has the wrong shape");
    else require(width == hidden, "features without fc must be as wide as the head");
    const int64_t parts = static_cast<int64_t>(inputs.feature_norms.size());
    require(parts == 0 || (!head_.fused && inputs.fc && width % parts == 0), "features cannot be normed in these parts");
    for (const std::vector<float>& norm : inputs.feature_norms) {
        require_norm(norm, width / parts, false, "a norm of features has the wrong size");
    }
    require_norm(inputs.embedding_norm, hidden, true, "norms must have one weight per hidden dimension");
    require_norm(inputs.hidden_norm, hidden, true, "norms must have one weight per hidden dimension");
    inputs_ = std::move(inputs);
}

void Head::add_layer(Layer layer) {
    const bool side_by_side = layers_.empty() && !head_.fused;
    require(!side_by_side || layer.attention_norm.empty(), "the first layer's input has norms of its own");
    Stack::add_layer(std::move(layer), (side_by_side ? 2 : 1) * shape_.hidden_size);
}

void Head::set_ends(Matrix embedding, Matrix output, std::vector<float> final_norm) {
    require(embedding && embedding->view().cols == shape_.hidden_size, "the embedding has the wrong shape");
    require_matrix(output, head_.draft_vocab_size, shape_.hidden_size, "the output matrix has the wrong shape");
    require_norm(final_norm, shape_.hidden_size, true, "the final norm must have one weight per hidden dimension");
    embedding_ = std::move(embedding);
    output_ = std::move(output);
    final_norm_ = std::move(final_norm);
}

void Head::check(const Batch& batch, const KvStore& store, size_t kind, const int32_t* starts) const {
    require(embedding_ && output_, "the head has no embedding or output matrix yet");
    require(kind < store.kinds().size() && store.kinds()[kind] == kv_rows(), "the KV store has no rows for this head");
    require(batch.copies == 0, "rows are moved by the target's passes");
    check_rows(batch, store, embedding_->view().rows, starts);
}

void Head::run(const Batch& batch, KvStore& store, size_t kind, const int32_t* starts, const float* features, bool are_own,
               float* logits, float* states) {
    check(batch, store, kind, starts);
    HeadPass(*this, {batch, store, kind, starts}, features, are_own, logits, states).run();
}

void Head::forward(const Batch& batch, KvStore& store, size_t kind, const int32_t* starts, const float* features, bool are_own,
                   float* logits, float* states) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->one_pass);
    run(batch, store, kind, starts, features, are_own, logits, states);
}

void Head::chain(const Batch& batch, KvStore& store, size_t kind, const int32_t* starts, const float* features,
                 const ChainPlan& plan, int32_t* tokens) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->one_pass);
    require(batch.wanted == batch.requests, "a chain starts from one row of every request");
    const auto hidden = static_cast<size_t>(shape_.hidden_size);
    logits_.resize(static_cast<size_t>(batch.requests * head_.draft_vocab_size));
    states_.resize(static_cast<size_t>(batch.requests) * hidden);
    std::fill_n(tokens, batch.requests * plan.most, -1);
    run(batch, store, kind, starts, features, false, logits_.data(), states_.data());
    std::vector<int64_t> requests;
    for (int64_t request = 0; request < batch.requests; ++request) requests.push_back(request);
    ChainLevel rows(batch, plan);
    for (int64_t level = 0; level < plan.most; ++level) {
        draw(requests, plan, level, tokens);
        rows.begin(level);
        next_states_.clear();
        for (size_t place = 0; place < requests.size(); ++place) {
            const int64_t request = requests[place];
            const int32_t token = tokens[request * plan.most + level];
            if (token < 0 || level + 1 >= plan.steps[request]) continue;
            rows.add(request, token, starts);
            const float* own = states_.data() + place * hidden;
            next_states_.insert(next_states_.end(), own, own + hidden);
        }
        if (rows.requests().empty()) return;
        run(rows.view(), store, kind, rows.starts(), next_states_.data(), true, logits_.data(), states_.data());
        requests = rows.requests();
    }
}

void Head::draw(const std::vector<int64_t>& requests, const ChainPlan& plan, int64_t level, int32_t* tokens) {
    const auto one = [&](size_t place, int thread) {
        const int64_t request = requests[place];
        if (level >= plan.steps[request]) return;
        const float* logits = logits_.data() + place * static_cast<size_t>(head_.draft_vocab_size);
        tokens[request * plan.most + level] = draw_guess(logits, head_.draft_vocab_size, plan, request, level,
                                                         scratch_[static_cast<size_t>(thread)], spread_[static_cast<size_t>(thread)]);
    };
    scratch_.resize(static_cast<size_t>(threads()));
    spread_.resize(static_cast<size_t>(threads()));
    if (requests.size() == 1) return one(0, 0);  // not worth waking another thread for
    ThreadPool& pool = workers_->pool;
    pool.run([&](int thread) {
        pool.share(static_cast<int64_t>(requests.size()), 1, [&](int64_t begin, int64_t end) {
            for (int64_t place = begin; place < end; ++place) one(static_cast<size_t>(place), thread);
        });
    });
}

}  // namespace foreword
