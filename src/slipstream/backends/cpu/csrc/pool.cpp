#include "pool.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax() { asm volatile("yield"); }
#else
static inline void relax() {}
#endif

namespace {

// A worker stays awake for about 300 us: the host needs some tens between two passes, and up to two hundred where it
// samples many rows. It yields now and then, so that a busy machine which put two threads on one core does not make one
// spin while the other waits for the core.
constexpr int SPINS_BEFORE_SLEEP = 12000, SPINS_BEFORE_YIELD = 64;

void wait_change(std::atomic<uint32_t>& value, uint32_t seen) {
    for (int i = 1; i <= SPINS_BEFORE_SLEEP; i++) {
        if (value.load(std::memory_order_acquire) != seen) return;
        if (i % SPINS_BEFORE_YIELD) relax();
        else std::this_thread::yield();
    }
    value.wait(seen, std::memory_order_acquire);
}

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
    try {
        for (int t = 1; t < threads; t++) workers_.emplace_back([this, t] { loop(t); });
    } catch (...) {  // the system gives no more threads; those that started would end the process if left unjoined
        quit();
        throw;
    }
}

Pool::~Pool() { quit(); }

void Pool::quit() {
    quit_ = true;
    job_.fetch_add(1);
    job_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::run(void (*work)(void*, int), void* what) {
    if (threads_ > 1) {
        work_ = work;
        what_ = what;
        job_.fetch_add(1);
        job_.notify_all();
    }
    work(what, 0);
    meet();
}

void Pool::loop(int thread) {
    for (uint32_t seen = 0;; seen++) {
        while (job_.load(std::memory_order_acquire) == seen) wait_change(job_, seen);
        if (quit_) return;
        work_(what_, thread);
        meet();
    }
}

void Pool::meet() {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1);  // in total order with the sleepers' count that notify_all reads, or a wake-up is lost
        phase_.notify_all();
    } else {
        while (phase_.load(std::memory_order_acquire) == phase) wait_change(phase_, phase);
    }
}
