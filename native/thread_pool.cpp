#include "thread_pool.h"

#include <unistd.h>

#include <stdexcept>
#include <string>
#include <system_error>

namespace foreword {

namespace {

constexpr int kSpins = 1000;   // about 20 microseconds, the usual difference between the threads at a barrier

inline void relax() {
#if defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

thread_local int this_thread = 0;   // index in the pool; a thread that calls `run` has index 0

}  // namespace

ThreadPool::ThreadPool(int threads) : crew_(std::make_unique<Crew>(threads)), process_(getpid()) {
    crew_->workers.reserve(static_cast<size_t>(threads));
    try {
        for (int thread = 1; thread < threads; ++thread) {
            crew_->workers.emplace_back([this, thread] { work(thread); });
        }
    } catch (const std::system_error& error) {
        const size_t started = crew_->workers.size();
        stop();
        throw std::runtime_error("only " + std::to_string(started + 1) + " of " + std::to_string(threads) +
                                 " threads could be started: " + error.what());
    }
}

ThreadPool::~ThreadPool() {
    if (getpid() == process_) {
        stop();
    } else {
        crew_.release();
    }
}

void ThreadPool::require_own_process() const {
    if (getpid() == process_) return;
    throw std::runtime_error(
        "the CPU kernels were set up before this process was forked, and a fork does not copy their threads; load the model in "
        "the new process, or start it with multiprocessing's \"spawn\"");
}

void ThreadPool::stop() {
    {
        std::lock_guard<std::mutex> lock(crew_->mutex);
        crew_->stopping = true;
    }
    crew_->wake.notify_all();
    for (std::thread& worker : crew_->workers) worker.join();
}

void ThreadPool::run(const std::function<void(int)>& body) {
    require_own_process();
    {
        std::lock_guard<std::mutex> lock(crew_->mutex);
        crew_->body = &body;
        ++crew_->run_count;
    }
    crew_->wake.notify_all();
    body(0);
    barrier();
}

int ThreadPool::current_thread() { return this_thread; }

void ThreadPool::reset_taken() {
    for (Taken& taken : crew_->taken) taken.indices.store(0, std::memory_order_relaxed);
}

void ThreadPool::work(int thread) {
    this_thread = thread;
    uint64_t runs_done = 0;
    for (;;) {
        const std::function<void(int)>* body;
        {
            std::unique_lock<std::mutex> lock(crew_->mutex);
            crew_->wake.wait(lock, [&] { return crew_->stopping || crew_->run_count != runs_done; });
            if (crew_->stopping) return;
            runs_done = crew_->run_count;
            body = crew_->body;
        }
        (*body)(thread);
        barrier();
    }
}

void ThreadPool::barrier() {
    if (crew_->workers.empty()) {
        reset_taken();
        return;
    }
    const uint64_t ended_before = crew_->barriers.load(std::memory_order_acquire);
    if (crew_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size()) return await_barrier(ended_before);
    reset_taken();
    crew_->arrived.store(0, std::memory_order_relaxed);
    crew_->barriers.store(ended_before + 1, std::memory_order_seq_cst);
    if (crew_->sleepers.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(crew_->mutex);
        crew_->released.notify_all();
    }
}

void ThreadPool::await_barrier(uint64_t ended_before) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (crew_->barriers.load(std::memory_order_acquire) != ended_before) return;
        relax();
    }
    std::unique_lock<std::mutex> lock(crew_->mutex);
    crew_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    crew_->released.wait(lock, [&] { return crew_->barriers.load(std::memory_order_seq_cst) != ended_before; });
    crew_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace foreword
