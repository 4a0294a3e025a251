// A few threads that run one function together and meet at barriers. They sleep whenever no pass is running.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
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

    int size() const { return static_cast<int>(crew_->workers.size()) + 1; }

    // Throws in a forked child: threads do not follow into it, and a lock may have been held when it was made. So
    // whoever guards a pool with a lock asks before taking it.
    void require_own_process() const;

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
            std::atomic<int64_t>& taken = crew_->taken[static_cast<size_t>(owner)].units;
            for (;;) {
                const int64_t begin = first + taken.fetch_add(grain, std::memory_order_relaxed);
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

    // The threads and what they wait on. A forked child can neither join nor destroy these: it leaves them alone.
    struct Crew {
        explicit Crew(int threads) : taken(static_cast<size_t>(threads)) {}
        std::vector<std::thread> workers;
        std::mutex mutex;
        std::condition_variable wake;
        std::condition_variable released;
        const std::function<void(int)>* body = nullptr;
        uint64_t job = 0;
        bool stopping = false;
        std::atomic<int> arrived{0};
        std::atomic<int> sleepers{0};
        std::atomic<uint64_t> generation{0};
        std::vector<Taken> taken;   // of every thread's stretch
    };

    static int current_thread();
    void work(int thread);
    void stop();
    void forget_taken();
    void await_generation(uint64_t arrived_in);

    std::unique_ptr<Crew> crew_;
    pid_t process_;
};

}  // namespace foreword
