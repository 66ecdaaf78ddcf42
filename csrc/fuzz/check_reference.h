// Whether the reference is right: its tangent against differences of its forward, its backward against its
// tangent. A run of this needs no kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "fuzz/describe.h"
#include "fuzz/draw.h"
#include "fuzz/reference.h"

namespace probjax::fuzz {

// Writes sums into the array that they make up.
inline void store_sums(const Buffer& buffer, Sums sums) {
  each_cell(buffer, [&](int64_t offset) { store(buffer.array, offset, cell(sums, offset).value); });
}

class ReferenceCheck {
 public:
  explicit ReferenceCheck(Case& c) : case_(c), p_(c.problem) {}

  // Whether the case fits: exact enough for differences, and something moves whose gradient is there too.
  bool fits() {
    if (case_.poisoned || p_.operands[0].type != Type::f64) return false;
    bool any = false;
    for (size_t i = 0; i < p_.moves.size(); ++i) {
      bool both = p_.moves[i] && p_.gradients[i] && p_.operands[i].type == Type::f64;
      if (!both) p_.moves[i] = p_.gradients[i] = {};
      any |= both;
    }
    return any;
  }

  bool passes() {
    auto now = Reference(p_).forward();
    store_sums(case_.out, now.out);
    store_sums(case_.lse, now.lse);
    auto moved = Reference(p_).tangent();
    auto ahead = forward_at(kStep), behind = forward_at(-kStep);
    bool ok = matches(case_.out, p_.out_move, moved.out, ahead.out, behind.out) &&
              matches(case_.lse, p_.lse_move, moved.lse, ahead.lse, behind.lse);
    return ok && is_adjoint(moved);
  }

 private:
  static constexpr double kStep = 1e-6;

  Case& case_;
  Problem& p_;

  // Forward with the operands moved by `step` times their moves.
  Reference::Results forward_at(double step) {
    std::vector<Memory> saved;
    for (size_t i = 0; i < p_.moves.size(); ++i) {
      saved.push_back(case_.operands[i].memory.copy());
      if (p_.moves[i]) shift(case_.operands[i], case_.moves[i], step);
    }
    auto results = Reference(p_).forward();
    for (size_t i = 0; i < saved.size(); ++i) {
      std::memcpy(case_.operands[i].memory.data(), saved[i].data(), saved[i].bytes());
    }
    return results;
  }

  static void shift(const Buffer& x, const Buffer& move, double step) {
    each_pair(x, move, [&](int64_t to, int64_t from) {
      store(x.array, to, load(x.array, to) + step * load(move.array, from));
    });
  }

  // Cells of two arrays whose axes are alike, but for those of the second that have size 1.
  template <class Body>
  static void each_pair(const Buffer& a, const Buffer& b, const Body& body) {
    each_pair(a, b, 0, 0, 0, body);
  }

  template <class Body>
  static void each_pair(const Buffer& a, const Buffer& b, size_t k, int64_t i, int64_t j, const Body& body) {
    if (k == a.axes.size()) return body(i, j);
    for (int64_t n = 0; n < a.axes[k].size; ++n) {
      each_pair(a, b, k + 1, i + n * a.axes[k].stride, j + n * b.axes[k].stride, body);
    }
  }

  bool matches(const Buffer& result, const Array& move, Sums& moved, Sums& ahead, Sums& behind) {
    bool ok = true;
    const Buffer& moved_buffer = move.data == case_.out_move.array.data ? case_.out_move : case_.lse_move;
    each_pair(result, moved_buffer, [&](int64_t offset, int64_t moved_offset) {
      double difference = (cell(ahead, offset).value - cell(behind, offset).value) / (2 * kStep);
      Number got = cell(moved, moved_offset);
      double allowed = 1e-5 * (1 + got.error);
      if (!std::isfinite(difference) || !(allowed < 1e30)) return;
      if (std::fabs(difference - got.value) <= allowed) return;
      if (ok) std::printf("%s: difference %g, tangent %g\n", result.name.c_str(), difference, got.value);
      ok = false;
    });
    return ok;
  }

  // Cotangents times the tangent are gradients times moves.
  bool is_adjoint(Reference::Results& moved) {
    Sum left, right;
    auto add = [](Sum& sum, const Buffer& buffer, Sums& sums, const Buffer& factor) {
      if (!factor.array) return;
      each_pair(buffer, factor, [&](int64_t offset, int64_t other) {
        sum += cell(sums, offset) * Number{load(factor.array, other)};
      });
    };
    add(left, case_.out_move, moved.out, case_.out_cotangent);
    add(left, case_.lse_move, moved.lse, case_.lse_cotangent);
    auto gradients = Reference(p_).backward();
    for (size_t i = 0; i < gradients.size(); ++i)
      if (p_.moves[i]) add(right, case_.gradients[i], gradients[i], case_.moves[i]);
    double allowed = 1e-13 * (left.error + right.error);
    if (!(allowed < 1e30) || std::fabs(left.value - right.value) <= allowed) return true;
    std::printf("not adjoint: %g by tangent, %g by backward, %g allowed\n", left.value, right.value, allowed);
    return false;
  }
};

inline int check_reference(uint64_t seed, int64_t cases) {
  int64_t checked = 0;
  for (int64_t n = 0; n < cases; ++n) {
    Random random(seed, n);
    Case c = Draw(random)();
    ReferenceCheck check(c);
    if (!check.fits()) continue;
    ++checked;
    if (check.passes()) continue;
    std::printf("The reference fails on case %lld of seed %llu:\n%s", static_cast<long long>(n),
                static_cast<unsigned long long>(seed), describe(c).c_str());
    return 1;
  }
  std::printf("The reference passes %lld cases.\n", static_cast<long long>(checked));
  return 0;
}

}  // namespace probjax::fuzz
