// The shares of a row's attention that go to each part of its KV rows, for drafters that leave parts out. They are computed from
// the states of the online softmax at the ends of parts.
#pragma once

#include "../types.h"
#include "softmax_tile.h"

namespace {

using namespace foreword;

// The softmax of the one row of a task, by head.
class PartShares {
public:
    explicit PartShares(const AttentionTask& task) : task_(task), heads_(task.head_end - task.head_begin) {}

    template <typename States>
    void begin(const States& states) {
        for (int64_t head = 0; head < heads_; ++head) {
            for (int i = 0; i < 2; ++i) before_[head][i] = states.at(0, head).stats[i];
        }
    }

    // Stores the logarithm of the weights of the part that ends before position `end`, relative to the score 0.
    template <typename States>
    void end_part(const States& states, int64_t end) {
        for (int64_t head = 0; head < heads_; ++head) {
            const float *stats = states.at(0, head).stats, *before = before_[head];
            const float weight = stats[1] - before[1] * __builtin_expf(before[0] - stats[0]);
            part_logs(head)[(end - 1) / kSharePart] = weight > 0.0f ? stats[0] + __builtin_logf(weight) : -__builtin_inff();
        }
        begin(states);
    }

    // Adds the shares of all parts before position `end`.
    void finish(int64_t end) const {
        const int64_t parts = (end + kSharePart - 1) / kSharePart;
        for (int64_t head = 0; head < heads_; ++head) {
            float *logs = part_logs(head), *sums = logs - task_.share_parts;
            float largest = -3.0e38f, total = 0.0f;
            for (int64_t part = 0; part < parts; ++part) largest = logs[part] > largest ? logs[part] : largest;
            for (int64_t part = 0; part < parts; ++part) total += __builtin_expf(logs[part] - largest);
            for (int64_t part = 0; total > 0.0f && part < parts; ++part) sums[part] += __builtin_expf(logs[part] - largest) / total;
        }
    }

private:
    // The sums of a head are followed by memory for its logarithms.
    float* part_logs(int64_t head) const { return task_.shares + (2 * (task_.head_begin + head) + 1) * task_.share_parts; }

    const AttentionTask& task_;
    int64_t heads_;
    float before_[kAttentionHeads][2];   // stats at the end of the previous part
};

}  // namespace
