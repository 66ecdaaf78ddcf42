// Random numbers that are the same on every platform.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace probjax::fuzz {

class Random {
 public:
  Random(uint64_t seed, uint64_t number) : state_(seed * 0x9E3779B97F4A7C15u ^ (number + 1) * 0xD1B54A32D192ED03u) {}

  // Steele, Lea and Flood's SplitMix64.
  uint64_t bits() {
    uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }

  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool chance(double p) { return uniform() < p; }

  // Close to a standard normal number, and never beyond 6.
  double normal() { return 2 * (uniform() + uniform() + uniform()) - 3; }

  template <class T>
  T pick(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int64_t>(list.size()))];
  }

  template <class T>
  const T& pick(const std::vector<T>& list) {
    return list[below(static_cast<int64_t>(list.size()))];
  }

 private:
  uint64_t state_;
};

}  // namespace probjax::fuzz
