// Work sharing: a loop over independent items whose result does not depend on who runs which.
#pragma once

#include <cstdint>
#include <functional>

namespace probjax {

// Where helpers come from. `schedule` may run a task at any later time, or at once in the caller.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int64_t threads() const = 0;
  virtual void schedule(std::function<void()> task) = 0;
};

// Runs body(0) ... body(count - 1) on at most so many threads, the caller taking part, and returns when all are done.
void parallel_for(Executor& executor, int64_t count, int64_t most_threads, const std::function<void(int64_t)>& body);

}  // namespace probjax
