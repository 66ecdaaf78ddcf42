// Where work stands: a batch entry, a panel of queries in the lanes of two vectors, scratch memory, and reading
// operands into it.
#pragma once

#include <algorithm>

#include "attention/problem.h"
#include "common/scratch.h"
#include "common/vector.h"

namespace probjax::PROBJAX_ISA {

// --------------------------------------------------------------------------------------------------------------
// Positions

// One entry of the batch, as an index per batch axis.
struct Entry {
  std::array<int64_t, kMaxBatchRank> index{};
  int rank = 0;

  Entry(const Problem& p, int64_t number) : rank(p.batch_rank) {
    for (int i = rank - 1; i >= 0; --i) {
      index[i] = number % p.batch_shape[i];
      number /= p.batch_shape[i];
    }
  }

  int64_t offset(const Array& x) const {
    int64_t total = 0;
    for (int i = 0; i < rank; ++i) total += index[i] * x.batch[i];
    return total;
  }
};

// Index along the head axis of an array that has 1, K or N heads.
inline int64_t head_of(const Problem& p, const Array& x, int64_t head) { return head / (p.N / x.heads); }

// Queries in the lanes of two vectors. Lanes from `count` on are idle: they repeat the last query, and what they
// compute is thrown away.
template <class T>
struct Panel {
  int count = 0;
  bool run = false;  // one head, queries that follow each other
  int64_t first = 0, last = 0;  // smallest and largest query
  int64_t head[kPanel<T>];
  int32_t query[kPanel<T>];

  int vectors() const { return count > kLanes<T> ? 2 : 1; }
  int width() const { return vectors() * kLanes<T>; }

  // Queries `start`, `start` + 1, ... of one head.
  static Panel of(int64_t head, int64_t start, int64_t count) {
    Panel panel;
    panel.count = int(count);
    panel.run = true;
    panel.first = start;
    panel.last = start + count - 1;
    for (int j = 0; j < kPanel<T>; ++j) {
      panel.head[j] = head;
      panel.query[j] = int32_t(std::min(start + j, panel.last));
    }
    return panel;
  }

  // All T queries of the heads from `first_head` on, head by head; T * heads lanes at most.
  static Panel of_heads(const Problem& p, int64_t first_head, int64_t heads) {
    Panel panel;
    panel.count = int(heads * p.T);
    panel.run = heads == 1;
    panel.first = 0;
    panel.last = p.T - 1;
    for (int j = 0; j < kPanel<T>; ++j) {
      int64_t row = std::min<int64_t>(j, panel.count - 1);
      panel.head[j] = first_head + row / p.T;
      panel.query[j] = int32_t(row % p.T);
    }
    return panel;
  }
};

// --------------------------------------------------------------------------------------------------------------
// Reading operands

// Rows of a matrix as numbers of type T in memory, `stride` apart.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// Copies `count` rows of `size` numbers into `out` [count][round_up(size)], widened, times `scale`, and padded
// with zeros to whole vectors.
template <class T>
inline void pack_rows(const Array& x, int64_t offset, int64_t row_stride, int64_t count, int64_t size, T scale,
                      T* out) {
  int64_t padded = round_up(size, kLanes<T>);
  for (int64_t i = 0; i < count; ++i) {
    T* row = out + i * padded;
    widen<T>(x.data, x.type, offset + i * row_stride, size, row);
    if (scale != T(1)) {
      for (int64_t j = 0; j < size; ++j) row[j] *= scale;
    }
    for (int64_t j = size; j < padded; ++j) row[j] = 0;
  }
}

template <class T>
constexpr Type kTypeOf = sizeof(T) == 4 ? Type::f32 : Type::f64;

// The same rows where they lie, if they can be used as they are. For repeated use they must be close together: rows
// that are a page or a power of two apart fall into few lines of the cache.
template <class T>
inline Rows<T> rows_of(const Array& x, int64_t offset, int64_t row_stride, int64_t count, int64_t size, bool once,
                       T* scratch) {
  if (x.type == kTypeOf<T> && (once || row_stride == size) && size % kLanes<T> == 0) {
    return {static_cast<const T*>(x.data) + offset, row_stride};
  }
  pack_rows<T>(x, offset, row_stride, count, size, T(1), scratch);
  return {scratch, round_up(size, kLanes<T>)};
}

// Whether all of `count` rows of `size` numbers are finite: the difference of a number and itself is then 0.
template <class T>
inline bool all_finite(Rows<T> rows, int64_t count, int64_t size) {
  T found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const T* row = rows.data + i * rows.stride;
    Vector<T> differences{};
    int64_t j = 0;
    for (; j + kLanes<T> <= size; j += kLanes<T>) {
      Vector<T> x = load(row + j);
      differences += x - x;
    }
    found += sum<T>(differences);
    for (; j < size; ++j) found += row[j] - row[j];
  }
  return found == 0;
}

// Calls write(j, row) with lane j of `in` [size][kPanel] times factor[j], for the lanes in use. `scratch` holds
// [kPanel][round_up(size)].
template <class T, class Write>
inline void for_each_lane(const T* in, int64_t size, const Panel<T>& panel, const T* factor, T* scratch,
                          const Write& write) {
  int64_t padded = round_up(size, kLanes<T>);
  transpose_block(in, kPanel<T>, size, panel.width(), scratch, padded);
  for (int j = 0; j < panel.count; ++j) {
    T* row = scratch + j * padded;
    Vector<T> f = broadcast<T>(factor[j]);
    for (int64_t d = 0; d < padded; d += kLanes<T>) store(row + d, load(row + d) * f);
    write(j, row);
  }
}

}  // namespace probjax::PROBJAX_ISA
