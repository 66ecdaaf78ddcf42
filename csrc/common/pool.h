// XLA's threads as an Executor.
#pragma once

#include <utility>

#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace probjax {

class Pool : public Executor {
 public:
  explicit Pool(xla::ffi::ThreadPool& pool) : pool_(pool), threads_(pool.num_threads()) {}
  int64_t threads() const override { return threads_; }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  xla::ffi::ThreadPool& pool_;
  int64_t threads_;
};

}  // namespace probjax
