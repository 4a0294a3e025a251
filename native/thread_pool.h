// Threads that run one function together and wait for each other at barriers. They sleep between two calls of `run`.
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
    // Throws std::runtime_error if a thread cannot be started, after ending the others.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(crew_->workers.size()) + 1; }   // includes the caller's thread

    // Throws std::runtime_error in a forked child, which does not have the threads. A lock may have been held at the fork, so
    // a caller that guards the pool with a lock must call this before it locks.
    void require_own_process() const;

    // Calls `body(thread)` in every thread, of which the caller is thread 0; returns when all calls have returned.
    void run(const std::function<void(int)>& body);

    // Waits until every thread of the running body has called this. A thread that waits long goes to sleep.
    void barrier();

    // Divides the indices [0, count) among the threads, calls `piece(begin, end)` for pieces of at most `grain` indices, and
    // ends with a barrier. A thread first takes the pieces of its own section, one after the other, so that it reads
    // consecutive memory; then those that are left in other sections.
    // Every thread of the running body must call this, in the same order.
    template <typename Piece>
    void parallel_for(int64_t count, int64_t grain, Piece&& piece) {
        if (grain < 1) grain = 1;
        const int threads = size();
        for (int i = 0; i < threads; ++i) {
            const int section = (current_thread() + i) % threads;
            const int64_t section_begin = count * section / threads, section_end = count * (section + 1) / threads;
            std::atomic<int64_t>& taken = crew_->taken[static_cast<size_t>(section)].indices;
            for (;;) {
                const int64_t begin = section_begin + taken.fetch_add(grain, std::memory_order_relaxed);
                if (begin >= section_end) break;
                piece(begin, begin + grain < section_end ? begin + grain : section_end);
            }
        }
        barrier();
    }

private:
    struct alignas(64) Taken {   // aligned, so that each is in its own cache line
        std::atomic<int64_t> indices{0};
    };

    // The threads and the state that they share. A forked child can neither join nor destroy it, so it leaks it.
    struct Crew {
        explicit Crew(int threads) : taken(static_cast<size_t>(threads)) {}
        std::vector<std::thread> workers;
        std::mutex mutex;
        std::condition_variable wake;       // workers wait for the next call of `run`
        std::condition_variable released;   // threads that sleep at a barrier wait for its end
        const std::function<void(int)>* body = nullptr;
        uint64_t run_count = 0;
        bool stopping = false;
        std::atomic<int> arrived{0};        // threads at the current barrier
        std::atomic<int> sleepers{0};       // those of them that sleep
        std::atomic<uint64_t> barriers{0};  // barriers that have ended
        std::vector<Taken> taken;           // [sections], indices that were taken from each
    };

    static int current_thread();
    void work(int thread);
    void stop();
    void reset_taken();
    // Waits until the barrier ends at which `barriers` was `ended_before`.
    void await_barrier(uint64_t ended_before);

    std::unique_ptr<Crew> crew_;
    pid_t process_;
};

}  // namespace foreword
