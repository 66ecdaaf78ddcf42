// A case in words, for reports of failures.
#pragma once

#include <sstream>
#include <string>

#include "fuzz/draw.h"

namespace probjax::fuzz {

inline const char* name_of(Type type) {
  static const char* names[] = {"f32", "f64", "bf16", "f16", "bool", "s32", "s64"};
  return names[static_cast<int>(type)];
}

inline const char* name_of(MaskOp op) {
  static const char* names[] = {"all_of",      "any_of",        "none_of", "band", "block", "prefix", "segments",
                                "key_lengths", "query_lengths", "dense",   "table"};
  return names[static_cast<int>(op)];
}

inline const char* name_of(ScoreOp op) {
  static const char* names[] = {"add_dense", "add_diagonal", "multiply", "soft_cap"};
  return names[static_cast<int>(op)];
}

inline void describe(std::ostream& to, const Buffer& buffer) {
  if (!buffer.array) return;
  to << "    " << buffer.name << ": " << name_of(buffer.array.type) << ", sizes";
  for (const Axis& axis : buffer.axes) to << ' ' << axis.size;
  to << ", strides";
  for (const Axis& axis : buffer.axes) to << ' ' << axis.stride;
  to << '\n';
}

inline std::string describe(const Case& c) {
  const Problem& p = c.problem;
  std::ostringstream to;
  to << "  " << name_of(p.operands[0].type) << ", batch";
  for (int r = 0; r < p.batch_rank; ++r) to << ' ' << p.batch_shape[r];
  to << ", T " << p.T << ", S " << p.S << ", N " << p.N << ", K " << p.K << ", D " << p.D << ", V " << p.V;
  to << ", scale " << p.scale << ", key_chunk " << p.key_chunk << (c.poisoned ? ", poisoned" : "") << '\n';
  for (const MaskStep& step : p.mask)
    to << "  mask " << name_of(step.op) << ' ' << step.a << ' ' << step.b << ' ' << step.c << ' ' << step.d << '\n';
  for (const ScoreStep& step : p.score)
    to << "  score " << name_of(step.op) << ' ' << step.a << ' ' << step.constant << '\n';
  if (p.sinks >= 0) to << "  sinks " << p.sinks << '\n';
  if (p.dropout >= 0) {
    to << "  dropout below " << p.dropout_threshold << (p.dropout_all ? " (all)" : "") << ", then times "
       << p.dropout_scale << '\n';
  }
  to << "  operands\n";
  for (const Buffer& x : c.operands) describe(to, x);
  to << "  results and their like\n";
  for (const Buffer* x : {&c.out, &c.lse, &c.out_move, &c.lse_move, &c.out_cotangent, &c.lse_cotangent}) {
    describe(to, *x);
  }
  for (const Buffer& x : c.moves) describe(to, x);
  for (const Buffer& x : c.gradients) describe(to, x);
  return to.str();
}

}  // namespace probjax::fuzz
