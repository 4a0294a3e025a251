#include "head.h"

#include "head_pass.h"

#include <algorithm>

namespace foreword {

Head::Head(const Stack& decoder, HeadShape head, StackShape shape, Rope rope)
    : Stack(shape, decoder.kernels(), decoder.workers(), std::move(rope)), head_(head) {
    require(head.join != Join::Fused || head.feature_width == shape.hidden_size, "fused features must be as wide as the head");
}

void Head::set_inputs(HeadInputs inputs) {
    const int64_t hidden = shape_.hidden_size, width = head_.feature_width;
    const bool fused = head_.join == Join::Fused;
    if (fused) require_matrix(inputs.fc, hidden, 2 * hidden, "fc has the wrong shape");
    else if (inputs.fc) require_matrix(inputs.fc, hidden, width, "fc has the wrong shape");
    else require(width == hidden, "features without fc must be as wide as the head");
    const int64_t parts = static_cast<int64_t>(inputs.feature_norms.size());
    require(parts == 0 || (!fused && inputs.fc && width % parts == 0), "features cannot be normed in these parts");
    for (const std::vector<float>& norm : inputs.feature_norms) {
        require_norm(norm, width / parts, false, "a norm of features has the wrong size");
    }
    require_norm(inputs.embedding_norm, hidden, true, "norms must have one weight per hidden dimension");
    require_norm(inputs.hidden_norm, hidden, true, "norms must have one weight per hidden dimension");
    inputs_ = std::move(inputs);
}

void Head::add_layer(Layer layer) {
    const bool side_by_side = layers_.empty() && head_.join == Join::SideBySide;
    require(!side_by_side || layer.attention_norm.empty(), "the first layer's input has norms of its own");
    require(layer.has_attention(), "every layer of a head has attention");
    Stack::add_layer(std::move(layer), (side_by_side ? 2 : 1) * shape_.hidden_size);
    require(head_.join != Join::Context || same_input(*layers_.front().inputs[1], *layers_.back().inputs[1]),
            "all layers that keep a context must be grouped alike");
}

void Head::set_ends(Matrix embedding, Matrix output, std::vector<float> final_norm) {
    require(embedding && embedding->view().cols == shape_.hidden_size, "the embedding has the wrong shape");
    require_matrix(output, head_.draft_vocab_size, shape_.hidden_size, "the output matrix has the wrong shape");
    require_norm(final_norm, shape_.hidden_size, true, "the final norm must have one weight per hidden dimension");
    embedding_ = std::move(embedding);
    output_ = std::move(output);
    final_norm_ = std::move(final_norm);
}

std::shared_ptr<const HeadTokens> Head::tokens(const int32_t* ids) {
    if (!tokens_ || !tokens_->are(ids)) tokens_ = std::make_shared<HeadTokens>(ids, head_.draft_vocab_size);
    return tokens_;
}

void Head::set_markov(Matrix before, Matrix after) {
    require(before && after && before->view().cols == after->view().cols && after->view().rows == head_.draft_vocab_size,
            "the Markov head has the wrong shape");
    before_ = std::move(before);
    after_ = std::move(after);
}

void Head::check(const HeadRows& rows, const KvStore& store, size_t kind) const {
    require(embedding_ && output_, "the head has no embedding or output matrix yet");
    require(kind < store.kinds().size() && store.kinds()[kind] == kv_rows(), "the KV store has no rows for this head");
    require(rows.batch.copies == 0, "rows are moved by the target's passes");
    const bool keeps = head_.join == Join::Context && !rows.are_own;
    require(!keeps || rows.batch.wanted == 0, "nothing comes of rows that are kept");
    check_rows(rows.batch, store, embedding_->view().rows, rows.starts);
}

void Head::run(const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states) {
    check(rows, store, kind);
    HeadPass(*this, rows, store, kind, logits, states).run();
}

void Head::forward(const HeadRows& rows, KvStore& store, size_t kind, float* logits, float* states) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->one_pass);
    run(rows, store, kind, logits, states);
}

void Head::chain(const HeadRows& first, KvStore& store, size_t kind, const ChainPlan& plan, int32_t* tokens) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->one_pass);
    const Batch& batch = first.batch;
    require(batch.wanted == batch.requests, "a chain starts from one row of every request");
    const auto hidden = static_cast<size_t>(shape_.hidden_size), vocab = static_cast<size_t>(head_.draft_vocab_size);
    logits_.resize(static_cast<size_t>(batch.requests) * vocab);
    states_.resize(static_cast<size_t>(batch.requests) * hidden);
    std::fill_n(tokens, batch.requests * plan.most, -1);
    run(first, store, kind, logits_.data(), states_.data());
    std::vector<int64_t> requests;
    for (int64_t request = 0; request < batch.requests; ++request) requests.push_back(request);
    ChainLevel rows(batch, plan);
    std::vector<Draw> draws;
    std::vector<float> chances(static_cast<size_t>(batch.requests), 1.0f);  // that all guesses so far are right
    const auto goes_on = [&](int64_t request, int64_t level) {
        if (!plan.stop) return true;
        float& chance = chances[static_cast<size_t>(request)];
        chance *= plan.rate(request, plan.stop->confidence[request * plan.most + level]);
        return chance >= plan.stop->least[request * plan.most + level];
    };
    for (int64_t level = 0; level < plan.most; ++level) {
        draws.clear();
        for (size_t place = 0; place < requests.size(); ++place) {
            draws.push_back({requests[place], level, logits_.data() + place * vocab});
        }
        draw(draws, plan, tokens);
        rows.begin(level);
        next_states_.clear();
        for (size_t place = 0; place < requests.size(); ++place) {
            const int64_t request = requests[place];
            const int32_t token = tokens[request * plan.most + level];
            if (token < 0 || level + 1 >= plan.steps[request] || !goes_on(request, level)) continue;
            rows.add(request, token, first.starts);
            const float* own = states_.data() + place * hidden;
            next_states_.insert(next_states_.end(), own, own + hidden);
        }
        if (rows.requests().empty()) return;
        run({rows.view(), rows.starts(), next_states_.data(), true}, store, kind, logits_.data(), states_.data());
        requests = rows.requests();
    }
}

void Head::block(const HeadRows* context, const HeadRows& blocks, KvStore& store, size_t kind, const ChainPlan& plan,
                 int32_t* tokens) {
    workers_->pool.require_own_process();
    std::lock_guard<std::mutex> lock(workers_->one_pass);
    require(head_.join == Join::Context && blocks.are_own, "this head has no blocks");
    const Batch& batch = blocks.batch;
    const auto vocab = static_cast<size_t>(head_.draft_vocab_size);
    logits_.resize(static_cast<size_t>(batch.wanted) * vocab);
    states_.resize(static_cast<size_t>(batch.wanted * shape_.hidden_size));
    std::fill_n(tokens, batch.requests * plan.most, -1);
    if (context) run(*context, store, kind, nullptr, nullptr);
    run(blocks, store, kind, logits_.data(), states_.data());
    std::vector<Draw> draws;
    for (int64_t request = 0, place = 0; request < batch.requests; ++request) {
        int64_t level = 0;
        for (; place < batch.wanted && batch.logit_rows[place] < batch.row_starts[request + 1]; ++place, ++level) {
            if (level < plan.steps[request]) draws.push_back({request, level, logits_.data() + static_cast<size_t>(place) * vocab});
        }
    }
    if (after_) draw_behind(draws, blocks, store, kind, plan, tokens);
    else draw(draws, plan, tokens);
    for (int64_t request = 0; request < batch.requests; ++request) {  // nothing stands behind a place that has no guess
        int32_t *begin = tokens + request * plan.most, *end = begin + plan.most;
        std::fill(std::find(begin, end, -1), end, -1);
    }
}

void Head::draw_behind(const std::vector<Draw>& draws, const HeadRows& blocks, KvStore& store, size_t kind, const ChainPlan& plan,
                       int32_t* tokens) {
    const auto vocab = static_cast<size_t>(head_.draft_vocab_size);
    std::vector<int32_t> before;
    std::vector<Draw> now;
    for (int64_t level = 0; level < plan.most; ++level) {
        now.clear();
        before.clear();
        level_logits_.clear();
        for (const Draw& one : draws) {
            const int32_t token = level > 0 ? tokens[one.request * plan.most + level - 1]
                                            : blocks.batch.token_ids[blocks.batch.row_starts[one.request]];
            if (one.level != level || token < 0) continue;
            now.push_back(one);
            before.push_back(token);
            level_logits_.insert(level_logits_.end(), one.logits, one.logits + vocab);
        }
        if (now.empty()) return;
        Batch rows;
        rows.token_ids = before.data();
        rows.rows = static_cast<int64_t>(before.size());
        require_below(rows.token_ids, rows.rows, before_->view().rows, "the Markov head does not know a token");
        MarkovPass(*this, rows, store, kind, level_logits_.data()).run();
        for (size_t place = 0; place < now.size(); ++place) now[place].logits = level_logits_.data() + place * vocab;
        draw(now, plan, tokens);
    }
}

void Head::draw(const std::vector<Draw>& draws, const ChainPlan& plan, int32_t* tokens) {
    const auto one = [&](const Draw& wanted, int thread) {
        if (wanted.level >= plan.steps[wanted.request]) return;
        const auto own = static_cast<size_t>(thread);
        tokens[wanted.request * plan.most + wanted.level] =
            draw_guess(wanted.logits, head_.draft_vocab_size, plan, wanted.request, wanted.level, scratch_[own], masked_[own]);
    };
    scratch_.resize(static_cast<size_t>(threads()));
    masked_.resize(static_cast<size_t>(threads()));
    if (draws.size() == 1) return one(draws.front(), 0);  // not worth waking another thread for
    ThreadPool& pool = workers_->pool;
    pool.run([&](int thread) {
        pool.share(static_cast<int64_t>(draws.size()), 1, [&](int64_t begin, int64_t end) {
            for (int64_t place = begin; place < end; ++place) one(draws[static_cast<size_t>(place)], thread);
        });
    });
}

}  // namespace foreword
