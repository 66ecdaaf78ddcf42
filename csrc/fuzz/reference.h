// What the kernels must compute, as loops over single pairs in float64: slow, and written to be obviously
// right. It shares no code with the kernels, only the description of the problem.
//
// Every number carries a bound on what a calculation in lower precision, in any order, may be off by.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/problem.h"
#include "fuzz/numbers.h"

namespace probjax::fuzz {

// A number and its possible error, in units of the rounding error of the type that accumulates.
struct Number {
  double value = 0, error = 0;
};

inline Number operator+(Number a, Number b) {
  return {a.value + b.value, a.error + b.error + std::fabs(a.value) + std::fabs(b.value)};
}

inline Number operator-(Number a) { return {-a.value, a.error}; }

inline Number operator-(Number a, Number b) { return a + -b; }

inline Number operator*(Number a, Number b) {
  double product = a.value * b.value;
  return {product, std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + std::fabs(product)};
}

inline Number operator/(Number a, Number b) {
  double ratio = a.value / b.value;
  return {ratio, (a.error + std::fabs(ratio) * b.error) / std::fabs(b.value) + std::fabs(ratio)};
}

inline Number exp(Number a) {
  double power = std::exp(a.value);
  return {power, power == 0 ? 0 : power * (a.error + 1)};  // of minus infinity, it is 0 exactly
}

inline Number log(Number a) {
  double logarithm = std::log(a.value);
  return {logarithm, a.error / a.value + std::fabs(logarithm)};
}

// tanh and its slope. They may come from exponentials, so their errors are absolute.
inline Number tanh(Number a) {
  double t = std::tanh(a.value);
  return {t, std::fabs(a.value) > 300 ? 1 : (1 - t * t) * a.error + 1};
}

inline Number tanh_slope(Number a) {
  if (std::fabs(a.value) > 300) return {0, 1};
  double t = std::tanh(a.value);
  return {1 / std::pow(std::cosh(a.value), 2), 2 * std::fabs(t) * tanh(a).error + 1};
}

// A sum of many: its error grows with the sum of absolute values, whatever the order.
struct Sum : Number {
  Sum& operator+=(Number term) {
    value += term.value;
    error += term.error + std::fabs(term.value);
    return *this;
  }
};

// The sums that make up an array, by offset from its first element. What is missing is zero.
using Sums = std::vector<Sum>;

inline Sum& cell(Sums& sums, int64_t offset) {
  if (offset >= static_cast<int64_t>(sums.size())) sums.resize(offset + 1);
  return sums[offset];
}

// A NaN in an input must reach the results that it is part of, and no others. For some the rules leave open
// whether they are NaN: those that an infinity or a number that overflows reaches, or a NaN in a pair that
// dropout drops or that a bias of minus infinity hides. `possible` makes them NaN, `certain` does not.
enum class Poison { certain, possible };

constexpr int kMostSteps = 4;  // of a score program

class Reference {
 public:
  struct Results {
    Sums out, lse;
  };

  explicit Reference(const Problem& problem, Poison poison = Poison::certain)
      : p(problem),
        possible(poison == Poison::possible),
        query(p.operands[0]),
        key(p.operands[1]),
        value(p.operands[2]),
        // One key has weight 1 whatever its score, so the score has no gradient through the softmax.
        one_key(p.S == 1 && p.sinks < 0 && p.dropout < 0) {}

  Results forward() {
    Results results;
    each_row([&](const Row& row) { forward_row(row, results); });
    return results;
  }

  Results tangent() {
    Results results;
    each_row([&](const Row& row) { tangent_row(row, results); });
    return results;
  }

  // Gradients by operand; empty where none is wanted.
  std::vector<Sums> backward() {
    std::vector<Sums> results(p.operands.size());
    each_row([&](const Row& row) { backward_row(row, results); });
    return results;
  }

  // One pair of query and key.
  struct Place {
    int64_t batch = 0;
    std::array<int64_t, kMaxBatchRank> index{};  // of `batch` on each axis
    int64_t head = 0, i = 0, j = 0;
  };

  template <class Body>
  void each_query(const Body& body) const {
    Place place;
    for (place.batch = 0; place.batch < p.batch; ++place.batch) {
      int64_t rest = place.batch;
      for (int r = p.batch_rank - 1; r >= 0; --r) {
        place.index[r] = rest % p.batch_shape[r];
        rest /= p.batch_shape[r];
      }
      for (place.head = 0; place.head < p.N; ++place.head)
        for (place.i = 0; place.i < p.T; ++place.i) body(place);
    }
  }

  // What the mask alone says.
  bool visible(const Place& at) const {
    std::array<bool, 64> stack;
    int top = -1;
    for (const MaskStep& step : p.mask) {
      switch (step.op) {
        case MaskOp::all_of:
          --top;
          stack[top] = stack[top] && stack[top + 1];
          break;
        case MaskOp::any_of:
          --top;
          stack[top] = stack[top] || stack[top + 1];
          break;
        case MaskOp::none_of: stack[top] = !stack[top]; break;
        default: stack[++top] = leaf(step, at);
      }
    }
    return top < 0 || stack[top];
  }

  // What mask and score say together.
  bool attends(const Place& at) const { return attend(at).has_value(); }

  // Where the numbers of a place lie in operands and results.
  int64_t query_offset(const Array& a, const Place& at) const {
    return batch_offset(a, at) + at.i * a.axis[0] + at.head * a.axis[1];
  }

  int64_t key_offset(const Array& a, const Place& at) const {
    return batch_offset(a, at) + at.j * a.axis[0] + at.head / (p.N / p.K) * a.axis[1];
  }

  int64_t score_offset(const ScoreStep& step, const Array& a, const Place& at) const {
    int64_t base = batch_offset(a, at);
    if (step.op == ScoreOp::soft_cap) return base;
    base += head(a, at) * a.axis[0];
    if (step.op == ScoreOp::add_dense) return base + at.i * a.axis[1] + at.j * a.axis[2];
    if (step.op == ScoreOp::add_diagonal) return base + (p.S - 1 - at.j + at.i) * a.axis[1];
    return base;
  }

  int64_t head(const Array& a, const Place& at) const { return at.head / (p.N / a.heads); }

  int64_t batch_offset(const Array& a, const Place& at) const {
    int64_t offset = 0;
    for (int r = 0; r < p.batch_rank; ++r) offset += at.index[r] * a.batch[r];
    return offset;
  }

 private:
  // A pair that attends.
  struct Pair {
    Place at;
    bool kept = true;                         // by dropout
    std::array<Number, kMostSteps> before{};  // the score as each step meets it
    Number score;
  };

  // A query that sees something.
  struct Row {
    Place at;
    std::vector<Pair> pairs;
  };

  const Problem& p;
  bool possible;
  const Array &query, &key, &value;
  bool one_key;

  // ------------------------------------------------------------------------------------------------------
  // Reading

  // As the accumulating type has it.
  double number(const Array& a, int64_t offset) const {
    double x = load(a, offset);
    return query.type == Type::f64 ? x : rounded(Type::f32, x);
  }

  static bool overflows(const Array& a, double x) {
    return std::fabs(x) > (a.type == Type::f16 ? 6e4 : a.type == Type::f64 ? 1e290 : 1e30);
  }

  // A number of query, key, value or what is shaped like them.
  double tame(const Array& a, int64_t offset) const {
    double x = number(a, offset);
    return !overflows(a, x) ? x : possible ? kNan : 0;
  }

  // ------------------------------------------------------------------------------------------------------
  // Masks

  bool leaf(const MaskStep& step, const Place& at) const {
    const Array* a = has_operand(step.op) ? &p.operands[step.a] : nullptr;
    switch (step.op) {
      case MaskOp::band: return step.a <= at.j - at.i && at.j - at.i <= step.b;
      case MaskOp::block: return at.i / step.a == at.j / step.a;
      case MaskOp::prefix: return at.j < load_integer(*a, batch_offset(*a, at)) || at.j - at.i <= step.b;
      case MaskOp::segments: {
        const Array& b = p.operands[step.b];
        return load_integer(*a, batch_offset(*a, at) + at.i * a->axis[0]) ==
               load_integer(b, batch_offset(b, at) + at.j * b.axis[0]);
      }
      case MaskOp::key_lengths: return at.j < load_integer(*a, batch_offset(*a, at));
      case MaskOp::query_lengths: return at.i < load_integer(*a, batch_offset(*a, at));
      case MaskOp::dense:
        return load(*a, batch_offset(*a, at) + head(*a, at) * a->axis[0] + at.i * a->axis[1] +
                            at.j * a->axis[2]) != 0;
      default: return in_table(step, at);
    }
  }

  static bool has_operand(MaskOp op) { return op != MaskOp::band && op != MaskOp::block; }

  bool in_table(const MaskStep& step, const Place& at) const {
    const Array &table = p.operands[step.a], &tiles = p.operands[step.b];
    int64_t entry = load_integer(table, at.i / step.c * table.axis[0] + at.j / step.d * table.axis[1]);
    if (entry < 2) return entry == 1;
    return load(tiles, (entry - 2) * tiles.axis[0] + at.i % step.c * tiles.axis[1] +
                           at.j % step.d * tiles.axis[2]) != 0;
  }

  // ------------------------------------------------------------------------------------------------------
  // Dropout, as probjax.attention.dropout defines it

  static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
  }

  bool survives(const Place& at) const {
    if (p.dropout < 0) return true;
    if (p.dropout_all) return false;
    auto integer = [](const Array& a, int64_t i) { return static_cast<uint32_t>(load_integer(a, i)); };
    const Array &words = p.operands[p.dropout], &batch = p.operands[p.batch_index];
    const Array& heads = p.operands[p.head_index];
    int64_t first = batch_offset(words, at);
    uint32_t row = mix(integer(words, first) + integer(batch, batch_offset(batch, at)) * 0x9E3779B1u);
    row = mix(row + integer(heads, batch_offset(heads, at) + at.head * heads.axis[0]) * 0x85EBCA77u);
    row = mix(row + static_cast<uint32_t>(at.i) * 0xC2B2AE3Du);
    uint32_t second = integer(words, first + words.axis[0]);
    return mix(mix(row + static_cast<uint32_t>(at.j) * 0x27D4EB2Fu) ^ second ^ row) >= p.dropout_threshold;
  }

  // A weight, or a cotangent of one, after dropout.
  Number drop(const Pair& pair, Number weight) const {
    if (p.dropout < 0) return weight;
    return (pair.kept ? Number{p.dropout_scale} : Number{0}) * weight;
  }

  // A dropped pair adds zero, unless it is NaN.
  bool counts(const Pair& pair) const { return pair.kept || possible; }

  // ------------------------------------------------------------------------------------------------------
  // Scores

  // Products of a query's and a key's numbers, over D.
  Number product(const Array& q, const Array& k, const Place& at) const {
    int64_t left = query_offset(q, at), right = key_offset(k, at);
    Sum sum;
    for (int64_t d = 0; d < p.D; ++d) sum += Number{tame(q, left + d)} * Number{tame(k, right + d)};
    return sum * Number{p.scale};
  }

  bool has_overflow(const Place& at) const {
    int64_t left = query_offset(query, at), right = key_offset(key, at);
    for (int64_t d = 0; d < p.D; ++d)
      if (overflows(query, load(query, left + d)) || overflows(key, load(key, right + d))) return true;
    return false;
  }

  Number operand(const ScoreStep& step, const Place& at) const {
    if (step.a < 0) return {step.constant};
    const Array& a = p.operands[step.a];
    return {number(a, score_offset(step, a, at))};
  }

  void apply_steps(Pair& pair, Number score) const {
    for (size_t n = 0; n < p.score.size(); ++n) {
      const ScoreStep& step = p.score[n];
      pair.before[n] = score;
      Number a = operand(step, pair.at);
      switch (step.op) {
        case ScoreOp::add_dense:
        case ScoreOp::add_diagonal: score = score + a; break;
        case ScoreOp::multiply: score = score * a; break;
        case ScoreOp::soft_cap: score = a * tanh(score / a);
      }
      if (query.type != Type::f64 && std::fabs(score.value) > 1e38) {
        score.value = rounded(Type::f32, score.value);
      }
      // Against so large a bias the score itself is lost, here as in any other precision.
      if (std::fabs(score.value) > 1e30) score.error = 0;
    }
    pair.score = score;
  }

  std::optional<Pair> attend(const Place& at) const {
    if (!visible(at) || (!possible && has_overflow(at))) return {};
    Pair pair;
    pair.at = at;
    Number raw = product(query, key, at);
    if (!possible && std::isnan(raw.value)) {
      apply_steps(pair, {0});
      if (pair.score.value == -kInfinity) return {};
    }
    apply_steps(pair, raw);
    if (pair.score.value == -kInfinity) return {};
    pair.kept = survives(at);
    return pair;
  }

  template <class Body>
  void each_row(const Body& body) const {
    each_query([&](const Place& at) {
      Row row{at, {}};
      for (row.at.j = 0; row.at.j < p.S; ++row.at.j)
        if (auto pair = attend(row.at)) row.pairs.push_back(std::move(*pair));
      body(row);
    });
  }

  // ------------------------------------------------------------------------------------------------------
  // Forward

  // The exponential of a score less a number that is the same for the whole row and cancels out of it.
  static Number power(Number score, double top) {
    return exp(Number{score.value - top, score.error + std::fabs(score.value - top)});
  }

  Number sink(const Place& at) const {
    const Array& a = p.operands[p.sinks];
    return {number(a, sink_offset(a, at))};
  }

  int64_t sink_offset(const Array& a, const Place& at) const {
    return batch_offset(a, at) + at.head * a.axis[0];
  }

  void forward_row(const Row& row, Results& results) const {
    int64_t out = query_offset(p.out, row.at), lse = query_offset(p.lse, row.at);
    cell(results.out, out + p.V - 1);
    cell(results.lse, lse).value = -kInfinity;
    if (row.pairs.empty()) return;
    double top = p.sinks < 0 ? -kInfinity : sink(row.at).value;
    for (const Pair& pair : row.pairs)
      if (pair.score.value > top) top = pair.score.value;
    Sum total;
    for (const Pair& pair : row.pairs) total += power(pair.score, top);
    if (p.sinks >= 0) total += power(sink(row.at), top);
    static_cast<Number&>(results.lse[lse]) = Number{top} + log(total);
    for (const Pair& pair : row.pairs) {
      if (!counts(pair)) continue;
      Number weight = drop(pair, power(pair.score, top) / total);
      int64_t from = key_offset(value, pair.at);
      for (int64_t c = 0; c < p.V; ++c) results.out[out + c] += weight * Number{tame(value, from + c)};
    }
  }

  // ------------------------------------------------------------------------------------------------------
  // What tangent and backward share

  Number lse(const Place& at) const { return {number(p.lse, query_offset(p.lse, at))}; }

  // Where the log-sum-exp is so large that its rounding matters, a weight is taken from the whole row instead.
  Number weight(const Pair& pair) const {
    if (!row_is_coarse) return exp(pair.score - lse(pair.at));
    return power(pair.score, row_top) / row_total;
  }

  mutable bool row_is_coarse = false;
  mutable double row_top = 0;
  mutable Number row_total;

  void enter(const Row& row) const {
    double size = std::fabs(lse(row.at).value);
    row_is_coarse = size > 1024 && std::isfinite(size);
    if (!row_is_coarse) return;
    row_top = p.sinks < 0 ? -kInfinity : sink(row.at).value;
    for (const Pair& pair : row.pairs)
      if (pair.score.value > row_top) row_top = pair.score.value;
    Sum total;
    for (const Pair& pair : row.pairs) total += power(pair.score, row_top);
    if (p.sinks >= 0) total += power(sink(row.at), row_top);
    row_total = total;
  }

  // How a soft cap's result changes with its cap.
  Number cap_slope(Number score, Number cap) const {
    Number ratio = score / cap;
    return tanh(ratio) - ratio * tanh_slope(ratio);
  }

  // ------------------------------------------------------------------------------------------------------
  // Tangent

  static bool moves(const Array& move) { return move.data != nullptr; }

  // How the score of a pair moves.
  Number score_move(const Pair& pair) const {
    Sum raw;
    if (moves(p.moves[0])) raw += product(p.moves[0], key, pair.at);
    if (moves(p.moves[1])) raw += product(query, p.moves[1], pair.at);
    Number move = raw;
    for (size_t n = 0; n < p.score.size(); ++n) {
      const ScoreStep& step = p.score[n];
      Number before = pair.before[n], a = operand(step, pair.at);
      if (step.op == ScoreOp::multiply) move = move * a;
      if (step.op == ScoreOp::soft_cap) move = move * tanh_slope(before / a);
      if (step.a < 0 || !moves(p.moves[step.a])) continue;
      Number own{number(p.moves[step.a], score_offset(step, p.moves[step.a], pair.at))};
      if (step.op == ScoreOp::multiply) own = own * before;
      if (step.op == ScoreOp::soft_cap) own = own * cap_slope(before, a);
      move = move + own;
    }
    return move;
  }

  void tangent_row(const Row& row, Results& results) const {
    int64_t out = query_offset(p.out_move, row.at), lse_move = query_offset(p.lse_move, row.at);
    cell(results.out, out + p.V - 1);
    cell(results.lse, lse_move);
    if (row.pairs.empty()) return;
    enter(row);
    Sum change;  // of the log-sum-exp
    for (const Pair& pair : row.pairs) {
      Number part = weight(pair) * score_move(pair);
      change += part;
      if (counts(pair)) add_value_moves(pair, part, &results.out[out]);
    }
    if (p.sinks >= 0 && moves(p.moves[p.sinks])) {
      const Array& move = p.moves[p.sinks];
      change += exp(sink(row.at) - lse(row.at)) * Number{number(move, sink_offset(move, row.at))};
    }
    int64_t old = query_offset(p.out, row.at);
    for (int64_t c = 0; c < p.V; ++c) results.out[out + c] += -change * Number{number(p.out, old + c)};
    results.lse[lse_move] += change;
  }

  // Adds what the move of a pair's weight and that of its value do to the output.
  void add_value_moves(const Pair& pair, Number weight_move, Sum* out) const {
    const Array& move = p.moves[2];
    Number change = drop(pair, weight_move), kept = drop(pair, weight(pair));
    int64_t from = key_offset(value, pair.at);
    for (int64_t c = 0; c < p.V; ++c) out[c] += change * Number{tame(value, from + c)};
    if (!moves(move)) return;
    from = key_offset(move, pair.at);
    for (int64_t c = 0; c < p.V; ++c) out[c] += kept * Number{tame(move, from + c)};
  }

  // ------------------------------------------------------------------------------------------------------
  // Backward

  Number lse_cotangent(const Place& at) const {
    const Array& a = p.lse_cotangent;
    return {a ? tame(a, query_offset(a, at)) : 0};
  }

  // The cotangent of a row's weights, summed with those weights; and what the log-sum-exp takes from it.
  Number excess(const Place& at) const {
    Sum sum;
    if (p.out_cotangent) {
      int64_t left = query_offset(p.out_cotangent, at), right = query_offset(p.out, at);
      for (int64_t c = 0; c < p.V; ++c)
        sum += Number{tame(p.out_cotangent, left + c)} * Number{number(p.out, right + c)};
    }
    sum += -lse_cotangent(at);
    return sum;
  }

  // A cotangent that is missing is zero, and may be treated as so many zeros or as none.
  bool has_out_cotangent() const { return p.out_cotangent || possible; }

  double out_cotangent(const Place& at, int64_t c) const {
    const Array& a = p.out_cotangent;
    return a ? tame(a, query_offset(a, at) + c) : 0;
  }

  Number weight_cotangent(const Pair& pair) const {
    Sum sum;
    if (!has_out_cotangent() || !counts(pair)) return sum;
    int64_t from = key_offset(value, pair.at);
    for (int64_t c = 0; c < p.V; ++c)
      sum += Number{out_cotangent(pair.at, c)} * Number{tame(value, from + c)};
    return drop(pair, sum);
  }

  Number score_cotangent(const Pair& pair, Number excess) const {
    Number change = weight_cotangent(pair) - excess;
    if (!one_key) return weight(pair) * change;
    Number exact = p.lse_cotangent ? weight(pair) * lse_cotangent(pair.at) : Number{};
    return possible ? exact + Number{0 * change.value} + Number{0 * weight(pair).value} : exact;
  }

  void backward_row(const Row& row, std::vector<Sums>& results) const {
    if (row.pairs.empty()) return;
    enter(row);
    Number row_excess = excess(row.at);
    for (const Pair& pair : row.pairs) {
      add_value_gradient(pair, results[2]);
      if (one_key && !p.lse_cotangent && !possible) continue;
      Number cotangent = score_cotangent(pair, row_excess);
      Number raw = add_score_gradients(pair, cotangent, results) * Number{p.scale};
      add_product_gradients(pair, raw, results);
    }
  }

  void add_value_gradient(const Pair& pair, Sums& sums) const {
    const Array& gradient = p.gradients[2];
    if (!gradient || !has_out_cotangent() || !counts(pair)) return;
    Number kept = drop(pair, weight(pair));
    int64_t to = key_offset(gradient, pair.at);
    cell(sums, to + p.V - 1);
    for (int64_t c = 0; c < p.V; ++c) sums[to + c] += kept * Number{out_cotangent(pair.at, c)};
  }

  // From the cotangent of a pair's score to that of its product, through the steps in reverse.
  Number add_score_gradients(const Pair& pair, Number cotangent, std::vector<Sums>& results) const {
    for (size_t n = p.score.size(); n-- > 0;) {
      const ScoreStep& step = p.score[n];
      Number before = pair.before[n], a = operand(step, pair.at), own = cotangent;
      if (step.op == ScoreOp::multiply) own = cotangent * before, cotangent = cotangent * a;
      if (step.op == ScoreOp::soft_cap) {
        own = cotangent * cap_slope(before, a);
        cotangent = cotangent * tanh_slope(before / a);
      }
      if (step.a < 0 || !p.gradients[step.a]) continue;
      cell(results[step.a], score_offset(step, p.gradients[step.a], pair.at)) += own;
    }
    return cotangent;
  }

  void add_product_gradients(const Pair& pair, Number cotangent, std::vector<Sums>& results) const {
    const Array &dq = p.gradients[0], &dk = p.gradients[1];
    int64_t left = query_offset(query, pair.at), right = key_offset(key, pair.at);
    if (dq) {
      int64_t to = query_offset(dq, pair.at);
      cell(results[0], to + p.D - 1);
      for (int64_t d = 0; d < p.D; ++d) results[0][to + d] += cotangent * Number{tame(key, right + d)};
    }
    if (dk) {
      int64_t to = key_offset(dk, pair.at);
      cell(results[1], to + p.D - 1);
      for (int64_t d = 0; d < p.D; ++d) results[1][to + d] += cotangent * Number{tame(query, left + d)};
    }
  }
};

}  // namespace probjax::fuzz
