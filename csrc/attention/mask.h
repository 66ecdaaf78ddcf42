// The mask: ranges of keys per panel, so that work is skipped, and bytes where a tile is visible in part.
#pragma once

#include "attention/panel.h"

namespace probjax::PROBJAX_ISA {

constexpr int kKeys = 64;  // keys of a tile

// Keys outside of [lo, hi) are hidden from every query of a panel; keys in [full_lo, full_hi) are visible to
// every one.
struct Range {
  int64_t lo = 0, hi = 0, full_lo = 0, full_hi = 0;

  static Range exactly(int64_t lo, int64_t hi) { return {lo, hi, lo, hi}; }
};

inline Range clipped(Range r, int64_t S) {
  r.lo = std::max<int64_t>(r.lo, 0);
  r.hi = std::min(r.hi, S);
  if (r.lo >= r.hi) return {};
  r.full_lo = std::max(r.full_lo, r.lo);
  r.full_hi = std::min(r.full_hi, r.hi);
  if (r.full_lo >= r.full_hi) r.full_lo = r.full_hi = r.lo;
  return r;
}

inline Range all_of(const Range& a, const Range& b) {
  return {std::max(a.lo, b.lo), std::min(a.hi, b.hi), std::max(a.full_lo, b.full_lo),
          std::min(a.full_hi, b.full_hi)};
}

inline Range longer_full(Range r, const Range& a, const Range& b) {
  bool meet = a.full_lo <= b.full_hi && b.full_lo <= a.full_hi;
  bool a_any = a.full_lo < a.full_hi, b_any = b.full_lo < b.full_hi;
  if (a_any && b_any && meet) {
    r.full_lo = std::min(a.full_lo, b.full_lo);
    r.full_hi = std::max(a.full_hi, b.full_hi);
  } else {
    const Range& best = a.full_hi - a.full_lo >= b.full_hi - b.full_lo ? a : b;
    r.full_lo = best.full_lo;
    r.full_hi = best.full_hi;
  }
  return r;
}

inline Range any_of(const Range& a, const Range& b) {
  if (a.lo >= a.hi) return b;
  if (b.lo >= b.hi) return a;
  return longer_full({std::min(a.lo, b.lo), std::max(a.hi, b.hi), 0, 0}, a, b);
}

inline Range none_of(const Range& a, int64_t S) {
  Range r{0, S, 0, 0};
  if (a.full_lo < a.full_hi) {
    if (a.full_lo == 0) r.lo = a.full_hi;
    if (a.full_hi == S) r.hi = a.full_lo;
  }
  if (a.lo >= a.hi) return Range::exactly(0, S);
  return longer_full(r, {0, 0, 0, a.lo}, {0, 0, a.hi, S});
}

// An integer of an s32 or s64 array.
inline int64_t integer_at(const Array& x, int64_t offset) {
  return x.type == Type::s64 ? static_cast<const int64_t*>(x.data)[offset]
                             : static_cast<const int32_t*>(x.data)[offset];
}

template <class T>
class MaskOf {
 public:
  MaskOf(const Problem& p, const Entry& entry) : p_(p), entry_(entry) {}

  bool exists() const { return !p_.mask.empty(); }

  // Keys that queries of the panel may see.
  Range range(const Panel<T>& panel) const {
    if (!exists()) return Range::exactly(0, p_.S);
    Range stack[kMaskDepth];
    int top = 0;
    for (const MaskStep& step : p_.mask) {
      switch (step.op) {
        case MaskOp::all_of:
          --top;
          stack[top - 1] = clipped(all_of(stack[top - 1], stack[top]), p_.S);
          break;
        case MaskOp::any_of:
          --top;
          stack[top - 1] = clipped(any_of(stack[top - 1], stack[top]), p_.S);
          break;
        case MaskOp::none_of:
          stack[top - 1] = clipped(none_of(stack[top - 1], p_.S), p_.S);
          break;
        default:
          stack[top++] = clipped(leaf_range(step, panel), p_.S);
      }
    }
    return stack[0];
  }

  // Which of the keys [first, first + count), count <= kKeys, the panel's queries see: bytes of 0 or -1 in
  // `out` [count][kPanel].
  void tile(const Panel<T>& panel, int64_t first, int64_t count, int8_t* out) const {
    alignas(64) int8_t stack[kMaskDepth][kKeys * kPanel<T>];
    int64_t size = count * kPanel<T>;
    int top = 0;
    for (const MaskStep& step : p_.mask) {
      switch (step.op) {
        case MaskOp::all_of:
          --top;
          for (int64_t i = 0; i < size; ++i) stack[top - 1][i] &= stack[top][i];
          break;
        case MaskOp::any_of:
          --top;
          for (int64_t i = 0; i < size; ++i) stack[top - 1][i] |= stack[top][i];
          break;
        case MaskOp::none_of:
          for (int64_t i = 0; i < size; ++i) stack[top - 1][i] = int8_t(~stack[top - 1][i]);
          break;
        default:
          leaf_tile(step, panel, first, count, stack[top++]);
      }
    }
    std::memcpy(out, stack[0], size_t(size));
  }

 private:
  static constexpr int kWidth = kPanel<T>;

  const Array& operand(int64_t i) const { return p_.operands[size_t(i)]; }
  int64_t scalar(int64_t i) const { return integer_at(operand(i), entry_.offset(operand(i))); }

  Range leaf_range(const MaskStep& step, const Panel<T>& panel) const {
    int64_t S = p_.S, first = panel.first, last = panel.last;
    switch (step.op) {
      case MaskOp::band:
        return {first + step.a, last + step.b + 1, last + step.a, first + step.b + 1};
      case MaskOp::block: {
        int64_t lo = first / step.a, hi = last / step.a;
        Range r{lo * step.a, (hi + 1) * step.a, 0, 0};
        return lo == hi ? Range::exactly(r.lo, r.hi) : r;
      }
      case MaskOp::prefix: {
        int64_t length = scalar(step.a);
        return {0, std::max(length, last + step.b + 1), 0, std::max(length, first + step.b + 1)};
      }
      case MaskOp::segments:
        return segment_range(step, panel);
      case MaskOp::key_lengths:
        return Range::exactly(0, scalar(step.a));
      case MaskOp::query_lengths: {
        int64_t length = scalar(step.a);
        if (first >= length) return {};
        return last < length ? Range::exactly(0, S) : Range{0, S, 0, 0};
      }
      case MaskOp::table:
        return table_range(step, panel);
      default:
        return {0, S, 0, 0};
    }
  }

  Range segment_range(const MaskStep& step, const Panel<T>& panel) const {
    const Array &queries = operand(step.a), &keys = operand(step.b);
    int64_t q = entry_.offset(queries), k = entry_.offset(keys);
    int64_t low = integer_at(queries, q + panel.first * queries.axis[0]), high = low;
    for (int j = 0; j < panel.count; ++j) {
      int64_t id = integer_at(queries, q + panel.query[j] * queries.axis[0]);
      low = std::min(low, id);
      high = std::max(high, id);
    }
    auto inside = [&](int64_t j) {
      int64_t id = integer_at(keys, k + j * keys.axis[0]);
      return low <= id && id <= high;
    };
    Range r{0, p_.S, 0, 0};
    while (r.lo < r.hi && !inside(r.lo)) ++r.lo;
    while (r.hi > r.lo && !inside(r.hi - 1)) --r.hi;
    if (low != high) return r;
    int64_t end = r.lo;
    while (end < r.hi && inside(end)) ++end;
    r.full_lo = r.lo;
    r.full_hi = end;
    return r;
  }

  int32_t table_entry(const MaskStep& step, int64_t row, int64_t column) const {
    int64_t columns = (p_.S + step.d - 1) / step.d;
    return static_cast<const int32_t*>(operand(step.a).data)[row * columns + column];
  }

  Range table_range(const MaskStep& step, const Panel<T>& panel) const {
    int64_t columns = (p_.S + step.d - 1) / step.d, lo = columns, hi = 0;
    int64_t top = panel.first / step.c, bottom = panel.last / step.c;
    for (int64_t row = top; row <= bottom; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        if (table_entry(step, row, column) != 0) {
          lo = std::min(lo, column);
          hi = std::max(hi, column + 1);
        }
      }
    }
    Range r{lo * step.d, hi * step.d, 0, 0};
    if (lo >= hi) return {};
    if (top != bottom) return r;
    int64_t start = lo;
    while (start < hi && table_entry(step, top, start) != 1) ++start;
    int64_t end = start;
    while (end < hi && table_entry(step, top, end) == 1) ++end;
    r.full_lo = start * step.d;
    r.full_hi = end * step.d;
    return r;
  }

  void leaf_tile(const MaskStep& step, const Panel<T>& panel, int64_t first, int64_t count, int8_t* out) const {
    switch (step.op) {
      case MaskOp::band:
        each_key(count, out, [&](int64_t k, int8_t* row) {
          for (int j = 0; j < kWidth; ++j) {
            // In 32 bits, which vectorise; the bounds are clipped so that nothing overflows.
            int32_t distance = int32_t(first + k) - panel.query[j];
            row[j] = -int8_t((distance >= bound(step.a)) & (distance <= bound(step.b)));
          }
        });
        break;
      case MaskOp::block:
        each_key(count, out, [&](int64_t k, int8_t* row) {
          int64_t block = (first + k) / step.a;
          int64_t lo = block * step.a, hi = lo + step.a;
          for (int j = 0; j < kWidth; ++j) row[j] = -int8_t((panel.query[j] >= lo) & (panel.query[j] < hi));
        });
        break;
      case MaskOp::prefix: {
        int64_t length = scalar(step.a);
        each_key(count, out, [&](int64_t k, int8_t* row) {
          int8_t early = first + k < length;
          for (int j = 0; j < kWidth; ++j) row[j] = -int8_t(early | (first + k - panel.query[j] <= step.b));
        });
        break;
      }
      case MaskOp::segments:
        segment_tile(step, panel, first, count, out);
        break;
      case MaskOp::key_lengths: {
        int64_t length = scalar(step.a);
        each_key(count, out, [&](int64_t k, int8_t* row) { std::memset(row, first + k < length ? -1 : 0, kWidth); });
        break;
      }
      case MaskOp::query_lengths: {
        int64_t length = scalar(step.a);
        each_key(count, out, [&](int64_t, int8_t* row) {
          for (int j = 0; j < kWidth; ++j) row[j] = -int8_t(panel.query[j] < length);
        });
        break;
      }
      case MaskOp::dense:
        dense_tile(operand(step.a), panel, first, count, out);
        break;
      default:
        table_tile(step, panel, first, count, out);
    }
  }

  static int32_t bound(int64_t x) {
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    return int32_t(std::min(std::max(x, -limit), limit));
  }

  template <class Row>
  static void each_key(int64_t count, int8_t* out, const Row& row) {
    for (int64_t k = 0; k < count; ++k) row(k, out + k * kWidth);
  }

  void segment_tile(const MaskStep& step, const Panel<T>& panel, int64_t first, int64_t count, int8_t* out) const {
    const Array &queries = operand(step.a), &keys = operand(step.b);
    int64_t q = entry_.offset(queries), k0 = entry_.offset(keys);
    int64_t ids[kWidth];
    for (int j = 0; j < kWidth; ++j) ids[j] = integer_at(queries, q + panel.query[j] * queries.axis[0]);
    each_key(count, out, [&](int64_t k, int8_t* row) {
      int64_t id = integer_at(keys, k0 + (first + k) * keys.axis[0]);
      for (int j = 0; j < kWidth; ++j) row[j] = -int8_t(ids[j] == id);
    });
  }

  void dense_tile(const Array& x, const Panel<T>& panel, int64_t first, int64_t count, int8_t* out) const {
    const int8_t* data = static_cast<const int8_t*>(x.data) + entry_.offset(x);
    int64_t key_stride = x.axis[2];
    for (int j = 0; j < kWidth; ++j) {
      const int8_t* row = data + head_of(p_, x, panel.head[j]) * x.axis[0] + panel.query[j] * x.axis[1];
      if (key_stride == 0) {
        for (int64_t k = 0; k < count; ++k) out[k * kWidth + j] = -row[0];
      } else {
        row += first * key_stride;
        for (int64_t k = 0; k < count; ++k) out[k * kWidth + j] = -row[k * key_stride];
      }
    }
  }

  void table_tile(const MaskStep& step, const Panel<T>& panel, int64_t first, int64_t count, int8_t* out) const {
    const int8_t* tiles = static_cast<const int8_t*>(operand(step.b).data);
    for (int j = 0; j < kWidth; ++j) {
      int64_t row = panel.query[j] / step.c, inner = panel.query[j] % step.c;
      for (int64_t k = 0; k < count; ++k) {
        int64_t key = first + k;
        int32_t entry = table_entry(step, row, key / step.d);
        out[k * kWidth + j] =
            entry < 2 ? int8_t(-entry) : int8_t(-tiles[((entry - 2) * step.c + inner) * step.d + key % step.d]);
      }
    }
  }

  const Problem& p_;
  const Entry& entry_;
};

// Sets hidden scores to minus infinity: `scores` and `visible` are [count][kPanel].
template <class T>
inline void hide(const int8_t* visible, int64_t count, int width, T* scores, int64_t stride) {
  for (int64_t k = 0; k < count; ++k) {
    for (int j = 0; j < width; j += kLanes<T>) {
      IntVector<T> seen = widen_bytes<T>(visible + k * kPanel<T> + j);
      Vector<T> s = load(scores + k * stride + j);
      store(scores + k * stride + j, seen ? s : broadcast<T>(-kInfinity<T>));
    }
  }
}

// Hides what a panel does not see of keys [first, last) of a tile of scores [last - first][stride]. Returns whether
// anything may have been hidden. `visible` is scratch, [kKeys][kPanel].
template <class T>
inline bool hide_part(const MaskOf<T>& mask, const Panel<T>& panel, const Range& range, int64_t first, int64_t last,
                      int8_t* visible, T* scores, int64_t stride) {
  if (range.full_lo <= first && last <= range.full_hi) return false;
  // Only what lies outside of the full range is looked at.
  if (range.full_lo <= first && first < range.full_hi) {
    scores += (range.full_hi - first) * stride;
    first = range.full_hi;
  } else if (range.full_lo < last && last <= range.full_hi) {
    last = range.full_lo;
  }
  mask.tile(panel, first, last - first, visible);
  hide<T>(visible, last - first, panel.width(), scores, stride);
  return true;
}

}  // namespace probjax::PROBJAX_ISA
