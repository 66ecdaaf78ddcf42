// One call of attention, as every instruction set's kernels receive it. Nothing here depends on XLA.
//
// Letters as in Python: T queries, S keys, N query heads, K key/value heads, G = N / K, D head size, V value
// size. Operands have `batch_rank` batch axes, then the axes named below; an axis has its full size or 1, and
// an axis of size 1 stands for all of it (its stride here is 0).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace probjax {

constexpr int kMaskDepth = 16;  // most values on the stack of a mask program

// An array with strides in elements. The meaning of `axis` depends on the operand; the last axis of query, key,
// value and their like has stride 1 and is not listed.
struct Array {
  void* data = nullptr;
  Type type = Type::f32;
  std::array<int64_t, kMaxBatchRank> batch{};
  std::array<int64_t, 3> axis{};
  int64_t heads = 1;  // size of the head axis: 1, K or N

  explicit operator bool() const { return data != nullptr; }
};

// Which pairs attend: a postfix program over bool stacks. Query i and key j, both counted from 0.
enum class MaskOp : int64_t {
  all_of,         // both of the two on top
  any_of,         // one of the two on top
  none_of,        // not the one on top
  band,           // a <= j - i <= b
  block,          // i / a == j / a
  prefix,         // j < operand a [()] or j - i <= b
  segments,       // operand a [(T)] at i == operand b [(S)] at j
  key_lengths,    // j < operand a [()]
  query_lengths,  // i < operand a [()]
  dense,          // operand a [(H, T, S)], boolean
  table,          // operand a [(ceil(T / c), ceil(S / d))], s32: 0 hides a tile of c x d pairs, 1 shows it,
                  // 2 + n gives it tile n of operand b [(n, c, d)], boolean. No batch axes.
};

// What is done to a score, from first to last, before the mask.
enum class ScoreOp : int64_t {
  add_dense,     // + operand a [(H, T, S)]
  add_diagonal,  // + operand a [(H, T + S - 1)] at S - 1 - j + i: one number per distance
  multiply,      // * operand a [(H)]
  soft_cap,      // c * tanh(score / c) with c = `constant`, or operand a [()] if a >= 0
};

struct MaskStep {
  MaskOp op;
  int64_t a = 0, b = 0, c = 0, d = 0;
};

struct ScoreStep {
  ScoreOp op;
  int64_t a = -1;
  double constant = 0;
};

struct Problem {
  int batch_rank = 0;
  std::array<int64_t, kMaxBatchRank> batch_shape{};
  int64_t batch = 1;  // product of batch_shape
  int64_t T = 0, S = 0, N = 0, K = 0, D = 0, V = 0;
  double scale = 1;

  // All operands: query [(T, N, D)], key [(S, K, D)], value [(S, K, V)], then those that the programs, `sinks`
  // and `dropout` refer to. Types: query, key, value alike in f32, f64, bf16 or f16; numbers in score
  // operands of any of these; sinks f32, or f64 if query is.
  std::vector<Array> operands;
  std::vector<MaskStep> mask;
  std::vector<ScoreStep> score;
  int64_t sinks = -1;  // operand [(N)]: a logit that joins the softmax of its head and carries no value

  // Dropout by the counter hash of probjax.attention.dropout: words [(2)] s32 without broadcasting of the
  // last axis, batch index [()] s32, head index [(N)] s32.
  int64_t dropout = -1, batch_index = -1, head_index = -1;
  uint32_t dropout_threshold = 0;  // dropped where hash < threshold
  bool dropout_all = false;        // rate 1
  double dropout_scale = 1;

  // Results of forward, arguments of the others. lse is f32, or f64 if query is.
  Array out, lse;  // [(T, N, V)], [(T, N)]

  // Tangent: one array per operand that moves, shaped like it (none for others), and the two results.
  std::vector<Array> moves;
  Array out_move, lse_move;

  // Backward: cotangents (either may be missing), and gradients by operand: of query, key, value and score
  // operands. A gradient of an operand with broadcast axes is the sum over them. Exceptions: the batch axes
  // of a gradient of query are always full, those of key and value agree with each other.
  Array out_cotangent, lse_cotangent;
  std::vector<Array> gradients;
  int64_t key_chunk = 0;    // keys that one work item of backward covers; it fixes the order of sums
  void* workspace = nullptr;  // ceil(S / key_chunk) * batch * T * N * D accumulators; allocated if missing and needed
};

}  // namespace probjax
