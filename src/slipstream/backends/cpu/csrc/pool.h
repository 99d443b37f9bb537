// Threads that sleep between passes and meet at spinning barriers within one: a pass has about 150 meetings, and waking
// a sleeper costs more than the work between two of them.
#pragma once
#include <atomic>
#include <thread>
#include <vector>

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;

    int size() const { return threads_; }

    // Runs work(what, thread) on every thread, the caller being thread 0, and returns when all are done. A plain pointer,
    // since kernels of every instruction set call it: a template would be compiled for one of them and linked for all.
    void run(void (*work)(void*, int), void* what);

    // Called by every thread inside `run`: returns when all have arrived.
    void meet();

private:
    void loop(int thread);
    void quit();

    const int threads_;
    void (*work_)(void*, int) = nullptr;
    void* what_ = nullptr;
    std::atomic<uint32_t> job_{0};
    std::atomic<bool> quit_{false};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::vector<std::thread> workers_;
};
