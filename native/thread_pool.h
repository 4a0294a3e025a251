// A few threads that run one function together and meet at barriers. They sleep whenever no pass is running.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace foreword {

class ThreadPool {
public:
    // Throws if a thread cannot be started; those that were are ended first.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Runs `body(thread)` on every thread, the caller being thread 0; returns when all are done.
    void run(const std::function<void(int)>& body);

    // Waits until every thread of the running body is here. A thread that waits long goes to sleep.
    void barrier();

    // Hands out `count` units in pieces of at most `grain`, then meets the others. Every thread first walks through
    // a stretch of its own (neighbouring pieces, so that memory streams), then helps with what others have left.
    // Called by every thread of the running body in the same order.
    template <typename Piece>
    void share(int64_t count, int64_t grain, Piece&& piece) {
        if (grain < 1) grain = 1;
        const int threads = size();
        for (int turn = 0; turn < threads; ++turn) {
            const int owner = (current_thread() + turn) % threads;
            const int64_t first = count * owner / threads, last = count * (owner + 1) / threads;
            for (;;) {
                const int64_t begin = first + taken_[static_cast<size_t>(owner)].units.fetch_add(grain, std::memory_order_relaxed);
                if (begin >= last) break;
                piece(begin, begin + grain < last ? begin + grain : last);
            }
        }
        barrier();
    }

private:
    struct alignas(64) Taken {   // a cache line each
        std::atomic<int64_t> units{0};
    };

    static int current_thread();
    void work(int thread);
    void stop();
    void forget_taken();
    void await_generation(uint64_t arrived_in);

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable released_;
    const std::function<void(int)>* body_ = nullptr;
    uint64_t job_ = 0;
    bool stopping_ = false;
    std::atomic<int> arrived_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<uint64_t> generation_{0};
    std::vector<Taken> taken_;   // of every thread's stretch
};

}  // namespace foreword
