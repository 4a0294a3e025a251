#include "thread_pool.h"

#include <stdexcept>
#include <string>
#include <system_error>

namespace foreword {

namespace {

constexpr int kSpins = 1000;   // some twenty microseconds: what it takes the threads of a phase to even out

inline void relax() {
#if defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

thread_local int this_thread = 0;   // a worker's place in its pool; whoever calls `run` is thread 0

}  // namespace

ThreadPool::ThreadPool(int threads) : taken_(static_cast<size_t>(threads)) {
    workers_.reserve(static_cast<size_t>(threads));
    try {
        for (int thread = 1; thread < threads; ++thread) {
            workers_.emplace_back([this, thread] { work(thread); });
        }
    } catch (const std::system_error& error) {
        const size_t started = workers_.size();
        stop();
        throw std::runtime_error("only " + std::to_string(started + 1) + " of " + std::to_string(threads) +
                                 " threads could be started: " + error.what());
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void(int)>& body) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        body_ = &body;
        ++job_;
    }
    wake_.notify_all();
    body(0);
    barrier();
}

int ThreadPool::current_thread() { return this_thread; }

void ThreadPool::forget_taken() {
    for (Taken& taken : taken_) taken.units.store(0, std::memory_order_relaxed);
}

void ThreadPool::work(int thread) {
    this_thread = thread;
    uint64_t done = 0;
    for (;;) {
        const std::function<void(int)>* body;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return stopping_ || job_ != done; });
            if (stopping_) return;
            done = job_;
            body = body_;
        }
        (*body)(thread);
        barrier();
    }
}

void ThreadPool::barrier() {
    if (workers_.empty()) {
        forget_taken();
        return;
    }
    const uint64_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size()) return await_generation(generation);
    forget_taken();
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        released_.notify_all();
    }
}

void ThreadPool::await_generation(uint64_t arrived_in) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (generation_.load(std::memory_order_acquire) != arrived_in) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    released_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != arrived_in; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace foreword
