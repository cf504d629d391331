// Threads that stay: parallel(n, work) runs work(0) .. work(n - 1), one of them on the calling thread.
// Starting a thread costs several times what waking one does. Knows nothing about what the work is.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace dlmserve {

class Pool {
  public:
    // A caller that finds the pool in use does its parts by itself, as it does those of threads it can't have.
    void run(int64_t num_parts, const std::function<void(int64_t)>& work) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (num_parts <= 1 || !turn.owns_lock()) {
            for (int64_t part = 0; part < num_parts; part++) work(part);
            return;
        }
        start(num_parts - 1);
        hand_out(num_parts, &work);
        take_parts();
        std::unique_lock<std::mutex> lock(mutex_);
        finished_.wait(lock, [this] { return num_unfinished_ == 0; });
        work_ = nullptr;
    }

  private:
    void start(int64_t num_wanted) {
        try {
            for (; num_threads_ < num_wanted; num_threads_++) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
        }
    }

    void hand_out(int64_t num_parts, const std::function<void(int64_t)>* work) {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = work;
        next_ = 0;
        num_parts_ = num_unfinished_ = num_parts;
        round_++;
        given_.notify_all();
    }

    void take_parts() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (next_ < num_parts_) {
            const int64_t part = next_++;
            const auto* work = work_;
            lock.unlock();
            (*work)(part);
            lock.lock();
            if (--num_unfinished_ == 0) finished_.notify_one();
        }
    }

    void serve() {
        for (uint64_t seen = 0;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                given_.wait(lock, [&] { return round_ != seen; });
                seen = round_;
            }
            take_parts();
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable given_, finished_;
    const std::function<void(int64_t)>* work_ = nullptr;
    int64_t num_threads_ = 0, next_ = 0, num_parts_ = 0, num_unfinished_ = 0;
    uint64_t round_ = 0;
};

// Never destroyed: its threads may outlive the statics of a process that exits.
inline Pool& pool() {
    static Pool* const pool = new Pool;
    return *pool;
}

}  // namespace dlmserve
