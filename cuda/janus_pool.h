// A pool of worker threads for one device thread: the caller is worker 0 and never waits for a worker that did not come.
//
// A job is `tasks` calls of one function; whoever is awake claims the next task. Workers spin for a moment between jobs
// (the gap between two kernels of a step is a few microseconds) and then sleep, so that an idle server burns no CPU.
// One caller at a time: the pool belongs to the thread that runs steps.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "janus_simd.h"

namespace janus {

// A buffer that only grows; contents are lost when it does.
class Scratch {
  public:
    ~Scratch() { free(data_); }
    char* reserve(int64_t bytes) {
        if (bytes > size_) {
            free(data_);
            size_ = (bytes + 4095) / 4096 * 4096;
            data_ = (char*)aligned_alloc(64, size_);
            if (!data_) abort();
        }
        return data_;
    }

  private:
    char* data_ = nullptr;
    int64_t size_ = 0;
};

class Pool {
  public:
    explicit Pool(int threads) : scratch(threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            closing_.store(true);
        }
        wake_.notify_all();
        for (auto& t : workers_) t.join();
    }
    int threads() const { return (int)workers_.size() + 1; }

    // Calls body(task, worker) for task 0 … tasks-1 in any order, on any worker; returns when all have returned.
    template <class Body>
    void run(int64_t tasks, const Body& body) {
        if (workers_.empty() || tasks <= 1 || tasks >= COUNT_LIMIT) {
            for (int64_t i = 0; i < tasks; i++) body(i, 0);
            return;
        }
        body_ = &body;
        call_ = [](const void* b, int64_t task, int worker) { (*(const Body*)b)(task, worker); };
        done_.store(0, std::memory_order_relaxed);
        epoch_++;
        job_.store((epoch_ << 40) | ((uint64_t)tasks << 20));
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> hold(mutex_); }
            wake_.notify_all();
        }
        help(0);
        for (int64_t spins = 0; done_.load(std::memory_order_acquire) < tasks; spins++) {
            // A worker that claimed a task may have lost its core: give the scheduler a chance.
            if (spins < 2000) pause();
            else std::this_thread::yield();
        }
    }

    std::vector<Scratch> scratch;  // one a worker
    Scratch shared;                // written before a job, read by it

  private:
    static constexpr int64_t COUNT_LIMIT = 1 << 19;
    static constexpr int64_t SPIN_US = 40;

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#else
        std::this_thread::yield();
#endif
    }

    // Epoch, count and next index share one word: a worker that comes late reads a claim that is whole, and the job's
    // function cannot change while a claimed task is unfinished because the caller waits for it.
    void help(int worker) {
        for (;;) {
            uint64_t word = job_.fetch_add(1, std::memory_order_acq_rel);
            int64_t index = word & 0xfffff, count = (word >> 20) & 0xfffff;
            if (index >= count) return;
            call_(body_, index, worker);
            done_.fetch_add(1, std::memory_order_acq_rel);
        }
    }

    void work(int worker) {
        uint64_t seen = 0;
        for (;;) {
            if (!spin(seen) && !sleep(seen)) return;
            seen = job_.load(std::memory_order_acquire) >> 40;
            help(worker);
        }
    }

    // True as soon as a job newer than `seen` is there; false after a while without one.
    bool spin(uint64_t seen) {
        auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(SPIN_US);
        do {
            for (int i = 0; i < 16; i++) {
                if (job_.load(std::memory_order_acquire) >> 40 != seen) return true;
                pause();
            }
        } while (std::chrono::steady_clock::now() < end);
        return false;
    }

    // Blocks until a newer job (true) or the end of the pool (false).
    bool sleep(uint64_t seen) {
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(hold, [&] { return closing_.load() || job_.load() >> 40 != seen; });
        sleepers_.fetch_sub(1);
        return !closing_.load();
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<bool> closing_{false};
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<uint64_t> job_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    const void* body_ = nullptr;
    void (*call_)(const void*, int64_t, int) = nullptr;
    uint64_t epoch_ = 0;
};

}  // namespace janus
