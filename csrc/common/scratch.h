// Scratch memory of the kernels of one instruction set.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace probjax::PROBJAX_ISA {

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Scratch memory of one thread. It is kept between calls: fresh pages would cost more than the work on them.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    thread_local struct Owner {
      char* data = nullptr;
      size_t size = 0;
      ~Owner() { std::free(data); }
    } owner;
    if (bytes > owner.size) {
      std::free(owner.data);
      owner.size = size_t(round_up(int64_t(bytes), 4096));
      owner.data = static_cast<char*>(std::aligned_alloc(64, owner.size));
      if (owner.data == nullptr) std::abort();
    }
    next_ = owner.data;
  }

  template <class T>
  T* take(int64_t count) {
    T* out = reinterpret_cast<T*>(next_);
    next_ += round_up(count * int64_t(sizeof(T)), 64);
    return out;
  }

  // Bytes that `take` of that many uses.
  template <class T>
  static size_t need(int64_t count) {
    return size_t(round_up(count * int64_t(sizeof(T)), 64));
  }

 private:
  char* next_;
};

}  // namespace probjax::PROBJAX_ISA
