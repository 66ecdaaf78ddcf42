// Calls of the recurrences, as every instruction set's kernels receive them. Nothing here depends on XLA.
//
// Operands have batch axes, then the axes named in brackets; an axis has its full size or 1, and an axis of size 1
// stands for all of it (its stride here is 0). Results are dense, batch axes in full. "First" and "last" are in the
// order of processing, which `reverse` turns against that of memory.
#pragma once

#include <array>
#include <cstdint>

#include "common/types.h"

namespace probjax::recurrence {

// An array with strides in elements.
struct Array {
  void* data = nullptr;
  std::array<int64_t, kMaxBatchRank> batch{};
  std::array<int64_t, 3> axis{};

  explicit operator bool() const { return data != nullptr; }
};

struct Batch {
  int rank = 0;
  std::array<int64_t, kMaxBatchRank> shape{};
  int64_t count = 1;  // product of shape

  // Where entry `number` of the batch begins in x.
  int64_t offset(const Array& x, int64_t number) const {
    int64_t total = 0;
    for (int i = rank - 1; i >= 0; --i) {
      total += number % shape[size_t(i)] * x.batch[size_t(i)];
      number /= shape[size_t(i)];
    }
    return total;
  }
};

// h_t = a_t h_{t-1} + b_t. All arrays have one type: T or, if `complex`, pairs of T.
struct LinearScan {
  bool is_double = false, complex = false;
  bool reverse = false;
  Batch batch;
  int64_t L = 0, C = 0;
  Array a, b, initial;  // [(L, C)], [(L, C)], [(C)]
  Array h;              // [(L, C)]: result of forward, argument of backward

  // Backward: results may be missing. That of `a` is [(1, C)] where a is, and then a sum over time.
  Array h_cotangent;
  Array a_gradient, b_gradient, initial_gradient;
};

// Steps between two states that forward keeps.
constexpr int64_t kChunk = 64;

// h_t = exp(dt_t A) h_{t-1} + u_t B_t, or without the first term at a reset; y_t = sum over n of C_t h_t.
//
// An item of work is a batch entry and a block of channels: D is cut into runs, and each run into blocks. In a
// call that is not `mixed` a run has one group of B and one of C.
struct SelectiveScan {
  bool is_double = false;
  bool reverse = false;
  Batch batch;
  int64_t L = 0, D = 0, N = 0;
  int64_t B_groups = 1, C_groups = 1;
  int64_t run = 0, block = 0;
  bool mixed = false;

  struct Operands {
    Array u, dt;    // [(L, D)]
    Array A;        // [(D, N)]
    Array B, C;     // [(L, groups, N)]
    Array initial;  // [(D, N)]
  };
  Operands x;
  Array reset;   // [(L)], bytes; or missing
  Array starts;  // [(ceil(L / kChunk), D, N)] states before steps 0, kChunk, ...: result of forward, argument of backward
  Array y, last; // [(L, D)], [(D, N)]: results of forward; of tangent their tangents

  Operands moves;  // tangent: shaped like the operands, or with sizes of 1

  // Backward: cotangents, which may have sizes of 1, and results, any of which may be missing. Those of B and C are
  // [slots, batch, (1 if the operand is shared over time, groups, 1 if it is shared over n)]: a block adds to the
  // slot that is its number among the blocks that its group has.
  Array y_cotangent, last_cotangent;
  Operands gradients;
  int64_t B_slots = 1, C_slots = 1;
  int64_t B_slot = 0, C_slot = 0;  // strides of slots

  int64_t blocks_per_run() const { return (run + block - 1) / block; }
  int64_t blocks() const { return D / run * blocks_per_run(); }
  int64_t block_of(int64_t channel) const { return channel / run * blocks_per_run() + channel % run / block; }
};

}  // namespace probjax::recurrence
