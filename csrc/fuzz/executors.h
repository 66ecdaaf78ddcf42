// Executors, kind and unkind: the kernels must give the same result with all of them.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "common/parallel.h"

namespace probjax::fuzz {

// Threads that wait for tasks.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { work(); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

// Hands tasks to a pool, whose size it need not tell truly.
class PoolExecutor : public Executor {
 public:
  PoolExecutor(Pool& pool, int64_t threads) : pool_(pool), threads_(threads) {}
  int64_t threads() const override { return threads_; }
  void schedule(std::function<void()> task) override { pool_.schedule(std::move(task)); }

 private:
  Pool& pool_;
  int64_t threads_;
};

// Runs a task in the caller, before `schedule` returns.
class AtOnce : public Executor {
 public:
  explicit AtOnce(int64_t threads) : threads_(threads) {}
  int64_t threads() const override { return threads_; }
  void schedule(std::function<void()> task) override { task(); }

 private:
  int64_t threads_;
};

// Runs its tasks when it is destroyed: long after the caller has done everything.
class TooLate : public Executor {
 public:
  explicit TooLate(int64_t threads) : threads_(threads) {}
  ~TooLate() override {
    for (auto& task : tasks_) task();
  }
  int64_t threads() const override { return threads_; }
  void schedule(std::function<void()> task) override { tasks_.push_back(std::move(task)); }

 private:
  int64_t threads_;
  std::vector<std::function<void()>> tasks_;
};

}  // namespace probjax::fuzz
