// Random problems. Case n of seed s is always the same one.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "attention/problem.h"
#include "fuzz/buffer.h"
#include "fuzz/random.h"
#include "fuzz/reference.h"

namespace probjax::fuzz {

struct Case {
  Problem problem;  // its arrays are those of the buffers
  std::vector<Buffer> operands, moves, gradients;  // by operand; without memory where there is none
  Buffer out, lse, out_move, lse_move, out_cotangent, lse_cotangent;
  int64_t workspace_bytes = 0;
  bool poisoned = false;
};

class Draw {
 public:
  explicit Draw(Random& random) : random_(random) {}

  Case operator()() {
    draw_sizes();
    case_.operands.resize(3);
    shapes_.resize(3);
    if (random_.chance(0.7)) draw_mask(random_.pick({0, 0, 1, 2, 3}));
    for (int64_t n = random_.pick({0, 0, 0, 1, 1, 2, 3}); n > 0; --n) draw_score_step();
    if (random_.chance(0.2)) draw_sinks();
    if (random_.chance(0.2)) draw_dropout();
    draw_inputs();
    draw_moves();
    draw_gradients();
    case_.poisoned = random_.chance(0.4);
    if (case_.poisoned) poison();
    return std::move(case_);
  }

 private:
  Random& random_;
  Case case_;
  Problem& p_ = case_.problem;
  std::vector<Shape> shapes_;  // of operands
  std::vector<bool> covered_ = std::vector<bool>(kMaxBatchRank);  // batch axes that some operand has in full
  bool hides_ = false;       // a score of minus infinity is possible so far
  bool hides_scaled_ = false;  // and has been multiplied by an operand
  bool lowest_ = false;      // a score near the lowest finite number is
  std::set<int64_t> fixed_;  // factors of such scores: their tangents would overflow

  // ------------------------------------------------------------------------------------------------------
  // Sizes

  // Small ones and those around the sizes of vectors and tiles are frequent.
  int64_t draw_size(int64_t limit) {
    static const std::vector<int64_t> edges = {1,  2,  3,  4,  7,   8,   9,   15,  16,  17,  31, 32,
                                               33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300};
    double kind = random_.uniform();
    if (kind < 0.3) return random_.between(1, std::min<int64_t>(limit, 16));
    if (kind < 0.5) return random_.between(1, limit);
    size_t count = 0;
    while (count < edges.size() && edges[count] <= limit) ++count;
    return edges[random_.below(static_cast<int64_t>(count))];
  }

  double work() const {
    return static_cast<double>(p_.T * p_.S * p_.N * p_.batch) * static_cast<double>(p_.D + p_.V);
  }

  void draw_sizes() {
    static const std::vector<Type> types = {Type::f32, Type::f32,  Type::f32, Type::f64,
                                            Type::f64, Type::bf16, Type::f16};
    type_ = random_.pick(types);
    p_.batch_rank = static_cast<int>(random_.pick({0, 1, 1, 1, 2, 3}));
    for (int r = 0; r < p_.batch_rank; ++r) p_.batch *= p_.batch_shape[r] = random_.between(1, 3);
    p_.K = random_.pick({1, 1, 2, 3});
    p_.N = p_.K * random_.pick({1, 1, 1, 2, 3, 4, 7, 8});
    p_.T = draw_size(300);
    p_.S = draw_size(300);
    p_.D = draw_size(300);
    p_.V = draw_size(300);
    if (random_.chance(0.03)) {  // decoding: kernels may split so many keys among threads
      p_.T = random_.between(1, 4);
      p_.S = random_.between(300, 5000);
    }
    double budget = random_.chance(0.02) ? 2e7 : std::exp(std::log(1e2) + random_.uniform() * std::log(2e4));
    while (work() > budget) shrink();
    p_.scale = random_.chance(0.7) ? 1 / std::sqrt(p_.D) : random_.pick({0.3, 1.0, -0.25, 0.0});
  }

  void shrink() {
    int64_t* sizes[] = {&p_.T, &p_.S, &p_.D, &p_.V};
    int64_t which = random_.below(6);
    if (which < 4) {
      *sizes[which] = draw_size(std::max<int64_t>(*sizes[which] / 2, 1));
    } else if (which == 4) {
      p_.N = p_.K;
    } else if (p_.batch_rank > 0) {
      int64_t& size = p_.batch_shape[random_.below(p_.batch_rank)];
      p_.batch = p_.batch / size;
      size = 1;
    }
  }

  // ------------------------------------------------------------------------------------------------------
  // Operands

  Type type_ = Type::f32;

  Type sums() const { return type_ == Type::f64 ? Type::f64 : Type::f32; }

  Type float_type() { return random_.pick({Type::f32, Type::f64, Type::bf16, Type::f16}); }

  std::vector<int64_t> full_batch() const { return {p_.batch_shape.begin(), p_.batch_shape.begin() + p_.batch_rank}; }

  // Each batch axis in full, or 1.
  std::vector<int64_t> some_batch(double full) {
    std::vector<int64_t> batch = full_batch();
    for (size_t r = 0; r < batch.size(); ++r) {
      if (random_.chance(full)) {
        covered_[r] = true;
      } else {
        batch[r] = 1;
      }
    }
    return batch;
  }

  int64_t some_heads() { return random_.pick({int64_t{1}, p_.K, p_.N}); }

  int64_t some(int64_t size, double full) { return random_.chance(full) ? size : 1; }

  int64_t add(const std::string& name, Type type, const Shape& shape) {
    shapes_.push_back(shape);
    case_.operands.push_back(make_buffer(random_, name, type, shape));
    return static_cast<int64_t>(case_.operands.size()) - 1;
  }

  // An operand without batch axes of its own.
  int64_t add_shared(const std::string& name, Type type, std::vector<int64_t> named) {
    Shape shape{std::vector<int64_t>(p_.batch_rank, 1), std::move(named)};
    shape.compact = true;
    return add(name, type, shape);
  }

  Buffer& operand(int64_t i) { return case_.operands[i]; }

  template <class Value>
  void fill(const Buffer& buffer, const Value& value) {
    each_cell(buffer, [&](int64_t offset) { store(buffer.array, offset, value()); });
  }

  void fill_normal(const Buffer& buffer, double size) {
    fill(buffer, [&] { return size * random_.normal(); });
  }

  // ------------------------------------------------------------------------------------------------------
  // Mask

  void draw_mask(int64_t depth) {
    if (depth == 0 || random_.chance(0.2)) return draw_leaf();
    MaskOp op = random_.pick({MaskOp::all_of, MaskOp::all_of, MaskOp::any_of, MaskOp::none_of});
    draw_mask(depth - 1);
    if (op != MaskOp::none_of) draw_mask(depth - 1);
    p_.mask.push_back({op});
  }

  void draw_leaf() {
    switch (random_.below(9)) {
      case 0:
      case 1: return draw_band();
      case 2: p_.mask.push_back({MaskOp::block, draw_size(p_.T + p_.S)}); return;
      case 3: return draw_prefix();
      case 4: return draw_segments();
      case 5: return draw_lengths(MaskOp::key_lengths, p_.S);
      case 6: return draw_lengths(MaskOp::query_lengths, p_.T);
      case 7: return draw_dense_mask();
      default: return draw_table();
    }
  }

  void draw_band() {
    constexpr int64_t far = int64_t{1} << 40;
    int64_t shift = random_.pick({int64_t{0}, int64_t{0}, p_.S - p_.T, random_.between(-p_.T, p_.S)});
    int64_t left = random_.pick({far, far, int64_t{0}, draw_size(64), draw_size(300)});
    int64_t right = random_.pick({int64_t{0}, int64_t{0}, far, draw_size(64), -draw_size(16)});
    p_.mask.push_back({MaskOp::band, shift - left, shift + right});
  }

  void draw_prefix() {
    int64_t shift = random_.pick({int64_t{0}, p_.S - p_.T, -draw_size(64)});
    p_.mask.push_back({MaskOp::prefix, add_lengths("prefix", p_.S), shift});
  }

  void draw_lengths(MaskOp op, int64_t size) { p_.mask.push_back({op, add_lengths("lengths", size)}); }

  int64_t add_lengths(const std::string& name, int64_t size) {
    int64_t i = add(name, Type::s32, {some_batch(0.7), {}});
    fill(operand(i), [&] { return random_.pick({int64_t{0}, size, random_.between(0, size + 3)}); });
    return i;
  }

  void draw_segments() {
    Type type = random_.pick({Type::s32, Type::s64}), other = random_.chance(0.1) ? Type::s64 : type;
    double first = type == Type::s64 && other == type && random_.chance(0.5) ? 0x1p40 : 0;
    bool sorted = random_.chance(0.7);
    int64_t length = draw_size(std::max(p_.T, p_.S));
    int64_t a = add_ids("query_ids", type, p_.T, first, sorted, length);
    int64_t b = add_ids("key_ids", other, p_.S, first, sorted, length);
    p_.mask.push_back({MaskOp::segments, a, b});
  }

  int64_t add_ids(const std::string& name, Type type, int64_t size, double first, bool sorted, int64_t length) {
    int64_t i = add(name, type, {some_batch(0.7), {some(size, 0.95)}});
    each_row(operand(i), [&](int64_t row) {
      double id = first;
      for (int64_t k = 0; k < row_size(operand(i)); ++k) {
        if (!sorted) id = first + static_cast<double>(random_.below(3));
        store(operand(i).array, row + k * operand(i).axes.back().stride, id);
        if (sorted && random_.chance(1.0 / static_cast<double>(length))) ++id;
      }
    });
    return i;
  }

  void draw_dense_mask() {
    int64_t heads = some_heads();
    int64_t i = add("mask", Type::boolean, {some_batch(0.6), {heads, some(p_.T, 0.75), some(p_.S, 0.8)}});
    operand(i).array.heads = heads;
    double density = random_.pick({0.0, 0.1, 0.5, 0.9, 1.0}), lines = random_.pick({0.0, 0.0, 0.2});
    fill_lines(operand(i), [&] { return random_.chance(density) ? 1.0 : 0.0; }, lines, 0.0);
    p_.mask.push_back({MaskOp::dense, i});
  }

  // Fills an array whose last axes are queries and keys; some rows and columns in whole with one number.
  template <class Value>
  void fill_lines(const Buffer& buffer, const Value& value, double lines, double number) {
    Axis rows = buffer.axes[buffer.axes.size() - 2], columns = buffer.axes.back();
    std::vector<bool> whole_row(rows.size), whole_column(columns.size);
    for (int64_t i = 0; i < rows.size; ++i) whole_row[i] = random_.chance(lines);
    for (int64_t j = 0; j < columns.size; ++j) whole_column[j] = random_.chance(lines);
    auto outer = buffer.axes;
    outer.resize(outer.size() - 2);
    detail::each_cell(outer, 0, 0, [&](int64_t base) {
      for (int64_t i = 0; i < rows.size; ++i)
        for (int64_t j = 0; j < columns.size; ++j) {
          double x = whole_row[i] || whole_column[j] ? number : value();
          store(buffer.array, base + i * rows.stride + j * columns.stride, x);
        }
    });
  }

  void draw_table() {
    auto [c, d] = random_.pick({std::pair<int64_t, int64_t>{64, 64}, {64, 64}, {32, 32}, {16, 48}});
    int64_t count = random_.between(1, 3);
    int64_t rows = (p_.T + c - 1) / c, columns = (p_.S + d - 1) / d;
    int64_t table = add_shared("table", Type::s32, {rows, columns});
    int64_t tiles = add_shared("tiles", Type::boolean, {count, c, d});
    int64_t most = random_.pick({int64_t{1}, count + 1});
    fill(operand(table), [&] { return random_.between(0, most); });
    double density = random_.pick({0.0, 0.2, 0.8});
    fill(operand(tiles), [&] { return random_.chance(density); });
    p_.mask.push_back({MaskOp::table, table, tiles, c, d});
  }

  // ------------------------------------------------------------------------------------------------------
  // Scores

  void draw_score_step() {
    switch (random_.below(4)) {
      case 0: return draw_bias(ScoreOp::add_dense);
      case 1: return draw_bias(ScoreOp::add_diagonal);
      case 2: return draw_multiply();
      default: return draw_soft_cap();
    }
  }

  void draw_bias(ScoreOp op) {
    int64_t heads = some_heads();
    std::vector<int64_t> named = {heads, p_.T + p_.S - 1};
    if (op == ScoreOp::add_dense) named = {heads, some(p_.T, 0.75), some(p_.S, 0.8)};
    Type type = float_type();
    int64_t i = add("bias", type, {some_batch(0.5), named});
    operand(i).array.heads = heads;
    double size = random_.pick({0.3, 1.0, 3.0}), lines = 0, special = 0, rate = 0;
    if (random_.chance(0.35)) {
      bool hide = lowest_ || random_.chance(0.5);
      special = hide ? -kInfinity : -format(type).most;
      hides_ |= hide || (type == Type::f64 && type_ != Type::f64);
      lowest_ |= !hide;
      rate = random_.pick({0.05, 0.5, 1.0});
      lines = random_.pick({0.0, 0.0, 0.2});
    }
    auto value = [&] { return rate > 0 && random_.chance(rate) ? special : size * random_.normal(); };
    fill_lines(operand(i), value, op == ScoreOp::add_dense ? lines : 0, special);
    p_.score.push_back({op, i});
  }

  void draw_multiply() {
    int64_t heads = some_heads();
    int64_t i = add("factor", float_type(), {some_batch(0.5), {heads}});
    operand(i).array.heads = heads;
    // What hides a pair must not turn into a NaN or show it.
    bool careful = hides_ || lowest_;
    fill(operand(i), [&] { return careful ? random_.between(3, 8) / 8.0 : random_.normal(); });
    hides_scaled_ |= hides_;
    if (lowest_) fixed_.insert(i);
    p_.score.push_back({ScoreOp::multiply, i});
  }

  void draw_soft_cap() {
    if (hides_scaled_) return;  // the derivative by that factor would be 0 times infinity
    ScoreStep step{ScoreOp::soft_cap};
    if (hides_ || lowest_ || random_.chance(0.5)) {
      step.constant = random_.pick({0.5, 1.0, 5.0, 30.0, 50.0});
    } else {
      step.a = add("cap", float_type(), {some_batch(0.3), {}});
      fill(operand(step.a), [&] { return 0.5 + 30 * random_.uniform(); });
    }
    hides_ = lowest_ = false;  // all are finite again
    p_.score.push_back(step);
  }

  void draw_sinks() {
    p_.sinks = add("sinks", sums(), {some_batch(0.3), {p_.N}});
    operand(p_.sinks).array.heads = p_.N;
    fill(operand(p_.sinks), [&] { return random_.chance(0.1) ? -kInfinity : 3 * random_.normal(); });
  }

  // ------------------------------------------------------------------------------------------------------
  // Dropout

  void draw_dropout() {
    auto integer = [&] { return static_cast<int32_t>(random_.bits()); };
    Shape words{some_batch(0.3), {2}}, batch{some_batch(0.7), {}};
    words.compact = true;
    p_.dropout = add("words", Type::s32, words);
    fill(operand(p_.dropout), integer);
    p_.batch_index = add("batch_index", Type::s32, batch);
    int next = 0;
    bool plain = random_.chance(0.5);
    fill(operand(p_.batch_index), [&] { return plain ? next++ : integer(); });
    p_.head_index = add_shared("head_index", Type::s32, {p_.N});
    next = 0;
    fill(operand(p_.head_index), [&] { return plain ? next++ : integer(); });
    double rate = random_.pick({0.0, 0.1, 0.5, 0.9, 1.0});
    p_.dropout_all = rate == 1;
    p_.dropout_threshold = static_cast<uint32_t>(std::min(rate * 0x1p32, 0x1p32 - 1));
    p_.dropout_scale = rate == 1 ? 0 : 1 / (1 - rate);
  }

  // ------------------------------------------------------------------------------------------------------
  // Inputs and results

  Shape row_shape(std::vector<int64_t> batch, std::vector<int64_t> named) {
    Shape shape{std::move(batch), std::move(named)};
    shape.rows = true;
    shape.heads_outside = random_.chance(0.5);
    return shape;
  }

  void set_input(int64_t i, const std::string& name, const Shape& shape, double size) {
    shapes_[i] = shape;
    operand(i) = make_buffer(random_, name, type_, shape);
    operand(i).array.heads = shape.named[1];
    fill_normal(operand(i), size);
  }

  void draw_inputs() {
    double size = random_.pick({1.0, 1.0, 1.0, 0.1, 4.0});
    set_input(1, "key", row_shape(some_batch(0.8), {p_.S, p_.K, p_.D}), size);
    set_input(2, "value", row_shape(some_batch(0.8), {p_.S, p_.K, p_.V}), random_.pick({1.0, 1.0, 20.0}));
    std::vector<int64_t> batch = some_batch(0.85);
    for (int r = 0; r < p_.batch_rank; ++r)  // some operand has the full size
      if (!covered_[r]) batch[r] = p_.batch_shape[r];
    set_input(0, "query", row_shape(batch, {p_.T, p_.N, p_.D}), size);
    for (const Buffer& x : case_.operands) p_.operands.push_back(x.array);
    p_.out = (case_.out = like_out("out")).array;
    p_.lse = (case_.lse = like_lse("lse")).array;
  }

  Buffer like_out(const std::string& name) {
    Buffer out = make_buffer(random_, name, type_, row_shape(full_batch(), {p_.T, p_.N, p_.V}));
    out.array.heads = p_.N;
    return out;
  }

  Buffer like_lse(const std::string& name) {
    Shape shape{full_batch(), {p_.T, p_.N}};
    shape.heads_outside = random_.chance(0.5);
    Buffer lse = make_buffer(random_, name, sums(), shape);
    lse.array.heads = p_.N;
    return lse;
  }

  // Some of the operands that have derivatives. Sinks have tangents only: their gradient needs nothing but the
  // log-sum-exp and the cotangents, so it is not the kernels' work.
  std::vector<int64_t> some_operands(bool with_sinks) {
    std::vector<int64_t> all = {0, 1, 2}, chosen;
    for (const ScoreStep& step : p_.score)
      if (step.a >= 0) all.push_back(step.a);
    if (with_sinks && p_.sinks >= 0) all.push_back(p_.sinks);
    for (int64_t i : all)
      if (random_.chance(0.6)) chosen.push_back(i);
    if (chosen.empty()) chosen.push_back(random_.pick(all));
    return chosen;
  }

  Buffer like_operand(int64_t i, const std::string& prefix, const Shape& shape) {
    Buffer buffer = make_buffer(random_, prefix + operand(i).name, operand(i).array.type, shape);
    buffer.array.heads = operand(i).array.heads;
    return buffer;
  }

  void draw_moves() {
    case_.moves.resize(case_.operands.size());
    for (int64_t i : some_operands(true)) {
      if (fixed_.count(i)) continue;
      case_.moves[i] = like_operand(i, "move of ", shapes_[i]);
      fill_normal(case_.moves[i], 1);
    }
    for (const Buffer& x : case_.moves) p_.moves.push_back(x.array);
    p_.out_move = (case_.out_move = like_out("out_move")).array;
    p_.lse_move = (case_.lse_move = like_lse("lse_move")).array;
  }

  void draw_gradients() {
    int64_t kinds = random_.pick({1, 1, 2, 3});
    if (kinds & 1) fill_normal(case_.out_cotangent = like_out("out_cotangent"), 1);
    if (kinds & 2) fill_normal(case_.lse_cotangent = like_lse("lse_cotangent"), 1);
    p_.out_cotangent = case_.out_cotangent.array;
    p_.lse_cotangent = case_.lse_cotangent.array;

    std::vector<int64_t> shared = full_batch();  // batch axes of the gradients of key and value
    for (int r = 0; r < p_.batch_rank; ++r)
      if (shapes_[1].batch[r] == 1 && shapes_[2].batch[r] == 1 && random_.chance(0.8)) shared[r] = 1;
    case_.gradients.resize(case_.operands.size());
    for (int64_t i : some_operands(false)) {
      Shape shape = shapes_[i];
      if (i <= 2) shape.batch = i == 0 ? full_batch() : shared;
      case_.gradients[i] = like_operand(i, "gradient of ", shape);
    }
    for (const Buffer& x : case_.gradients) p_.gradients.push_back(x.array);

    p_.key_chunk = p_.S;
    if (random_.chance(0.5)) p_.key_chunk = random_.between(1, 4) * random_.pick({16, 32, 48, 64});
    if (p_.key_chunk < p_.S) {
      int64_t chunks = (p_.S + p_.key_chunk - 1) / p_.key_chunk;
      case_.workspace_bytes = chunks * p_.batch * p_.T * p_.N * p_.D * size_of(sums());
    }
  }

  // ------------------------------------------------------------------------------------------------------
  // Poison: NaN, infinities and numbers whose products overflow

  using Place = Reference::Place;

  // Rows, or single numbers, of a buffer, and which of them some visible pair uses.
  struct Target {
    Buffer* buffer;
    int64_t count;  // numbers per row
    bool only_nan;  // an infinity would mean something here
    bool by_mask;   // hidden pairs are those that the mask hides, not those of a score of minus infinity
    std::function<int64_t(const Place&)> offset;
    std::vector<bool> used;
  };

  std::vector<Target> targets(const Reference& reference) {
    std::vector<Target> list;
    auto add = [&](Buffer& x, int64_t count, bool only_nan, bool by_mask, auto offset) {
      if (!x.array) return;
      auto of_place = [&reference, &x, offset](const Place& at) { return (reference.*offset)(x.array, at); };
      list.push_back({&x, count, only_nan, by_mask, of_place, {}});
    };
    for (std::vector<Buffer>* buffers : {&case_.operands, &case_.moves}) {
      add((*buffers)[0], p_.D, false, true, &Reference::query_offset);
      add((*buffers)[1], p_.D, false, true, &Reference::key_offset);
      add((*buffers)[2], p_.V, false, false, &Reference::key_offset);
      for (const ScoreStep& step : p_.score) {
        if (step.op != ScoreOp::add_dense && step.op != ScoreOp::add_diagonal) continue;
        Buffer& x = (*buffers)[step.a];
        auto of_place = [&reference, &x, &step](const Place& at) {
          return reference.score_offset(step, x.array, at);
        };
        if (x.array) list.push_back({&x, 1, true, true, of_place, {}});
      }
    }
    add(case_.out_cotangent, p_.V, false, false, &Reference::query_offset);
    add(case_.lse_cotangent, 1, false, false, &Reference::query_offset);
    return list;
  }

  void mark_used(const Reference& reference, std::vector<Target>& list) {
    for (Target& target : list) target.used.resize(target.buffer->memory.bytes());
    reference.each_query([&](Place at) {
      for (at.j = 0; at.j < p_.S; ++at.j) {
        if (!reference.visible(at)) continue;
        bool attends = reference.attends(at);
        for (Target& target : list)
          if (attends || target.by_mask) target.used[target.offset(at)] = true;
      }
    });
  }

  void poison() {
    Reference reference(p_);
    std::vector<Target> list = targets(reference);
    mark_used(reference, list);
    for (Target& target : list)
      if (random_.chance(0.6)) poison_unused(target, random_.pick({0.1, 0.5, 1.0}));
    if (random_.chance(0.5)) return;
    for (int64_t n = random_.between(1, 2); n > 0; --n) poison_used(list[random_.below(list.size())]);
  }

  void poison_unused(const Target& target, double rate) {
    bool nan = random_.chance(0.3);
    each_target_row(target, [&](int64_t row) {
      if (!target.used[row] && random_.chance(rate)) poison_row(target, row, nan);
    });
  }

  void poison_used(const Target& target) {
    std::vector<int64_t> rows;
    each_target_row(target, [&](int64_t row) { rows.push_back(row); });
    poison_row(target, random_.pick(rows), target.only_nan || random_.chance(0.7));
  }

  template <class Body>
  static void each_target_row(const Target& target, const Body& body) {
    if (target.count > 1) return each_row(*target.buffer, body);
    each_cell(*target.buffer, body);
  }

  void poison_row(const Target& target, int64_t row, bool nan) {
    const Array& array = target.buffer->array;
    // So large that products overflow even where they are hidden. Reference::overflows knows them.
    double huge = array.type == Type::f64 ? 1e300 : array.type == Type::f16 ? 65504 : 3e38;
    double x = nan ? kNan : random_.pick({kNan, kInfinity, -kInfinity, huge, -huge});
    int64_t one = random_.chance(0.5) ? random_.below(target.count) : -1;
    for (int64_t k = 0; k < target.count; ++k)
      if (one < 0 || k == one) store(array, row + k, x);
  }
};

}  // namespace probjax::fuzz
