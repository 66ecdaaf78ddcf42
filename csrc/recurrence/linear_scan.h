// linear_scan: channels in the lanes, time from first to last. The state is the row of results before.
#pragma once

#include <algorithm>
#include <functional>

#include "common/parallel.h"
#include "common/scratch.h"
#include "common/vector.h"
#include "recurrence/problem.h"

namespace probjax::PROBJAX_ISA::recurrence {

using namespace probjax::recurrence;

// Threads of which each has at least some ten microseconds of work of so many nanoseconds.
inline int64_t useful_threads(double nanoseconds) {
  return std::max<int64_t>(1, int64_t(std::min(nanoseconds / 2e4, 1e6)));
}

template <class T, size_t... lane>
PROBJAX_INLINE Vector<T> multiply_pairs(Vector<T> a, Vector<T> b, std::index_sequence<lane...>) {
  Vector<T> real = __builtin_shufflevector(a, a, int(lane & ~size_t(1))...);
  Vector<T> imaginary = __builtin_shufflevector(a, a, int(lane | 1)...);
  Vector<T> turned = __builtin_shufflevector(b, b, int(lane ^ 1)...);
  const Vector<T> sign = {(lane & 1 ? T(1) : T(-1))...};
  return real * b + (imaginary * sign) * turned;
}

// a * b, of numbers or of pairs that are complex numbers.
template <class T, bool complex>
PROBJAX_INLINE Vector<T> multiply(Vector<T> a, Vector<T> b) {
  if constexpr (complex) {
    return multiply_pairs<T>(a, b, std::make_index_sequence<kLanes<T>>());
  } else {
    return a * b;
  }
}

// The row of numbers that an array holds at a time t. Where the array has one number for all channels, it is a copy.
template <class T, bool complex>
class Rows {
 public:
  static constexpr int kParts = complex ? 2 : 1;

  // `width` channels from `channel` on; `buffer` has room for them.
  Rows(const Array& x, int64_t offset, int64_t channel, int64_t width, int64_t channels, T* buffer)
      : data_(static_cast<const T*>(x.data) + (offset + channel * x.axis[1]) * kParts),
        step_(x.axis[0] * kParts),
        width_(width),
        spread_(channels > 1 && x.axis[1] == 0),
        buffer_(buffer) {
    if (spread_ && step_ == 0) fill(data_);
  }

  PROBJAX_INLINE const T* at(int64_t t) {
    const T* p = data_ + t * step_;
    if (!spread_) return p;
    if (step_ != 0) fill(p);
    return buffer_;
  }

 private:
  PROBJAX_NOINLINE void fill(const T* p) {
    for (int64_t i = 0; i < width_ * kParts; ++i) buffer_[i] = p[i % kParts];
  }

  const T* data_;
  int64_t step_, width_;
  bool spread_;
  T* buffer_;
};

// What both directions share: items are tiles of channels of a batch entry.
template <class T>
class LinearPass {
 public:
  LinearPass(const LinearScan& problem, Executor& executor) : p_(problem), executor_(executor) {
    parts_ = p_.complex ? 2 : 1;
    // Long rows read memory best; a row of 512 bytes already hides the time that a product takes.
    int64_t least = std::max<int64_t>(1, 512 / (parts_ * int64_t(sizeof(T))));
    int64_t wanted = (16 + p_.batch.count - 1) / p_.batch.count;
    tile_ = std::max(least, std::min(8 * least, round_up((p_.C + wanted - 1) / wanted, least)));
    tiles_ = (p_.C + tile_ - 1) / tile_;
  }

 protected:
  // `arrays` of the size of b are read or written.
  void each(double arrays, const std::function<void(int64_t, int64_t, int64_t)>& body) {
    double work = double(p_.batch.count) * double(p_.L) * double(p_.C) * double(parts_ * int64_t(sizeof(T))) * arrays;
    parallel_for(executor_, p_.batch.count * tiles_, useful_threads(work / 10), [&](int64_t item) {
      FlushDenormals flush;
      int64_t channel = item % tiles_ * tile_;
      body(item / tiles_, channel, std::min(tile_, p_.C - channel));
    });
  }

  int64_t time(int64_t step) const { return p_.reverse ? p_.L - 1 - step : step; }

  // Calls f(i, n) for the n numbers from i on: for whole vectors, then for the rest.
  template <class F>
  static PROBJAX_INLINE void vectors(int64_t count, const F& f) {
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) f(i, kLanes<T>);
    if (i < count) f(i, int(count - i));
  }

  static PROBJAX_INLINE Vector<T> part(const T* p, int count) {
    return count == kLanes<T> ? load(p) : rest(p, count);
  }

  static PROBJAX_INLINE void put(T* p, Vector<T> x, int count) {
    if (count == kLanes<T>) return store(p, x);
    put_rest(p, x, count);
  }

  static PROBJAX_NOINLINE Vector<T> rest(const T* p, int count) {
    Vector<T> out{};
    for (int i = 0; i < count; ++i) out[i] = p[i];
    return out;
  }

  static PROBJAX_NOINLINE void put_rest(T* p, Vector<T> x, int count) {
    for (int i = 0; i < count; ++i) p[i] = x[i];
  }

  const LinearScan& p_;
  Executor& executor_;
  int64_t parts_, tile_, tiles_;
};

template <class T>
class LinearForward : public LinearPass<T> {
 public:
  using LinearPass<T>::LinearPass;

  void run() {
    this->each(3, [this](int64_t entry, int64_t channel, int64_t width) {
      p_.complex ? item<true>(entry, channel, width) : item<false>(entry, channel, width);
    });
  }

 private:
  using LinearPass<T>::p_;

  template <bool complex>
  void item(int64_t entry, int64_t channel, int64_t width) {
    constexpr int parts = complex ? 2 : 1;
    const int64_t count = width * parts;
    Scratch scratch(3 * Scratch::need<T>(count));
    auto rows = [&](const Array& x) {
      return Rows<T, complex>(x, p_.batch.offset(x, entry), channel, width, p_.C, scratch.take<T>(count));
    };
    Rows<T, complex> a = rows(p_.a), b = rows(p_.b);
    Array start = p_.initial;
    start.axis = {0, p_.initial.axis[0], 0};
    const T* h = rows(start).at(0);
    T* out = static_cast<T*>(p_.h.data) + (p_.batch.offset(p_.h, entry) + channel) * parts;
    for (int64_t step = 0; step < p_.L; ++step) {
      const int64_t t = this->time(step);
      const T *at = a.at(t), *bt = b.at(t);
      T* next = out + t * p_.C * parts;
      this->vectors(count, [&](int64_t i, int n) __attribute__((always_inline)) {
        const Vector<T> kept = multiply<T, complex>(this->part(at + i, n), this->part(h + i, n));
        this->put(next + i, kept + this->part(bt + i, n), n);
      });
      h = next;
    }
  }
};

// g_t = cotangent_t + a_{t+1} g_{t+1}: the gradient of b; times h_{t-1} that of a.
template <class T>
class LinearBackward : public LinearPass<T> {
 public:
  using LinearPass<T>::LinearPass;

  void run() {
    this->each(5, [this](int64_t entry, int64_t channel, int64_t width) {
      p_.complex ? item<true>(entry, channel, width) : item<false>(entry, channel, width);
    });
  }

 private:
  using LinearPass<T>::p_;

  template <bool complex>
  void item(int64_t entry, int64_t channel, int64_t width) {
    constexpr int parts = complex ? 2 : 1;
    const int64_t count = width * parts, padded = round_up(count, kLanes<T>);
    Scratch scratch(4 * Scratch::need<T>(count) + 3 * Scratch::need<T>(padded));
    auto rows = [&](const Array& x) {
      return Rows<T, complex>(x, p_.batch.offset(x, entry), channel, width, p_.C, scratch.take<T>(count));
    };
    Rows<T, complex> a = rows(p_.a), h = rows(p_.h), cotangent = rows(p_.h_cotangent);
    Array start = p_.initial;
    start.axis = {0, p_.initial.axis[0], 0};
    const T* initial = rows(start).at(0);
    T* carry = scratch.take<T>(padded);  // a_{t+1} g_{t+1}
    // Sums over time in two levels, which keeps rounding errors small.
    T* sum = scratch.take<T>(padded);
    T* total = scratch.take<T>(padded);
    std::fill(carry, carry + padded, T(0));
    std::fill(sum, sum + padded, T(0));
    std::fill(total, total + padded, T(0));

    auto result = [&](const Array& x) {
      return x ? static_cast<T*>(x.data) + (p_.batch.offset(x, entry) + channel) * parts : nullptr;
    };
    T *da = result(p_.a_gradient), *db = result(p_.b_gradient), *first = result(p_.initial_gradient);
    const bool summed = p_.a_gradient.axis[0] == 0 && p_.L > 1;
    for (int64_t step = p_.L - 1; step >= 0; --step) {
      const int64_t t = this->time(step), row = t * p_.C * parts;
      const T *at = a.at(t), *ct = cotangent.at(t);
      const T* before = step > 0 ? h.at(this->time(step - 1)) : initial;
      this->vectors(count, [&](int64_t i, int n) __attribute__((always_inline)) {
        Vector<T> g = this->part(ct + i, n) + load(carry + i);
        if (db) this->put(db + row + i, g, n);
        if (da) {
          Vector<T> d = multiply<T, complex>(g, this->part(before + i, n));
          if (summed) {
            store(sum + i, load(sum + i) + d);
          } else {
            this->put(da + row + i, d, n);
          }
        }
        store(carry + i, multiply<T, complex>(this->part(at + i, n), g));
      });
      if (da && summed && step % kChunk == 0) {
        for (int64_t i = 0; i < padded; i += kLanes<T>) {
          store(total + i, load(total + i) + load(sum + i));
          store(sum + i, Vector<T>{});
        }
      }
    }
    if (da && summed) std::copy(total, total + count, da);
    if (first) std::copy(carry, carry + count, first);
  }
};

}  // namespace probjax::PROBJAX_ISA::recurrence
