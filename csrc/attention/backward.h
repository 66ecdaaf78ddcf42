// Backward: gradients from output and log-sum-exp, with the weights computed again tile by tile.
//
// A work item is a key/value head and a chunk of the keys. It goes through all queries that see them, keeps the
// gradients of its keys and values, and adds to the gradient of the queries; with several chunks each has a copy of
// that gradient, and the copies are added up in their order. So results do not depend on who runs what when.
#pragma once

#include "attention/tangent.h"

namespace probjax::PROBJAX_ISA {

constexpr int64_t kSubChunk = 1024;  // keys whose tiles and gradients an item holds at a time: they stay in cache
constexpr int kQueries = kRowStride;

// One block of up to kQueries queries of one head: what its tiles need of the queries.
template <class T>
struct QueryBlock {
  int64_t panels = 0, count = 0;
  Panel<T>* panel;
  Range* range;
  T *rows, *cotangent_rows;            // [kQueries][round_up(D or V)], times scale / the scale of dropout
  T *queries, *cotangents;             // per panel [round_up(D or V)][kPanel]
  T *lse, *excess, *norm;              // [kQueries]; weights are e**(score - lse) * norm
  bool coarse = false;                 // whether any norm is not 1
  bool finite = true;                  // rows and cotangent rows

  QueryBlock(int64_t Dp, int64_t Vp, Scratch& scratch)
      : panel(scratch.take<Panel<T>>(kQueries / kPanel<T>)), range(scratch.take<Range>(kQueries / kPanel<T>)),
        rows(scratch.take<T>(kQueries * Dp)), cotangent_rows(scratch.take<T>(kQueries * Vp)),
        queries(scratch.take<T>(kQueries * Dp)), cotangents(scratch.take<T>(kQueries * Vp)),
        lse(scratch.take<T>(kQueries)), excess(scratch.take<T>(kQueries)), norm(scratch.take<T>(kQueries)) {}

  static size_t need(int64_t Dp, int64_t Vp) {
    return Scratch::need<Panel<T>>(kQueries / kPanel<T>) + Scratch::need<Range>(kQueries / kPanel<T>) +
           2 * Scratch::need<T>(kQueries * Dp) + 2 * Scratch::need<T>(kQueries * Vp) + 3 * Scratch::need<T>(kQueries);
  }
};

template <class T>
class Backward {
  using Gradient = StepGradient<T>;
  using Kind = typename Gradient::Kind;

 public:
  Backward(const Problem& p, Executor& executor)
      : p_(p), executor_(executor), Dp_(round_up(p.D, kLanes<T>)), Vp_(round_up(p.V, kLanes<T>)),
        chunks_((p.S + p.key_chunk - 1) / p.key_chunk), query_(p.gradients[0]), key_(p.gradients[1]),
        value_(p.gradients[2]) {
    certain_ = p.S == 1 && p.sinks < 0 && p.dropout < 0;
    workspace_ = static_cast<T*>(p.workspace);
    if (query_ && !workspace_ && (chunks_ > 1 || query_.type != kTypeOf<T>)) {
      own_workspace_.resize(size_t(chunks_ * p.batch * p.T * p.N * p.D));
      workspace_ = own_workspace_.data();
    }
    copies_ = query_ && workspace_;
    for (int i = 0; i < p.batch_rank; ++i) {
      bool shared = p.batch_shape[i] > 1 && ((key_ && key_.batch[i] == 0) || (value_ && value_.batch[i] == 0));
      (shared ? members_ : owners_) *= p.batch_shape[i];
      shared_[i] = shared;
    }
    plan_steps();
  }

  void run() {
    int64_t items = owners_ * p_.K * chunks_;
    int64_t threads = useful_threads(5.0 * double(p_.batch * p_.N) * double(p_.T) * double(p_.S) * double(p_.D + p_.V));
    if (query_ || key_ || value_ || steps_wanted_) {
      // The first chunks first: with a causal mask those have most to do.
      parallel_for(executor_, items, threads, [&](int64_t i) { item(i % (items / chunks_), i / (items / chunks_)); });
    }
    if (copies_) {
      int64_t rows = p_.batch * p_.N * p_.T;
      parallel_for(executor_, (rows + 63) / 64, threads, [&](int64_t i) { join(i * 64, std::min(rows, i * 64 + 64)); });
    }
    for (size_t i = 0; i < p_.score.size(); ++i) finish_step(i);
    for (size_t i = 0; i < p_.score.size(); ++i) {
      if (apart_[i]) {
        Owner owner(p_, p_.gradients[size_t(p_.score[i].a)]);
        int64_t panels = (p_.T + kPanel<T> - 1) / kPanel<T>;
        parallel_for(executor_, owner.count * panels, threads,
                     [&](int64_t n) { rows_apart(i, owner, n / panels, n % panels); });
      }
    }
  }

 private:
  // --------------------------------------------------------------------------------------------------------------
  // Gradients of the score program

  // Decides for each step where its gradient is collected. Most steps have few numbers: each (chunk, batch entry,
  // head) has sums of its own, added up at the end. A bias over both lengths is written as it is found where all its
  // numbers are distinct; where batch entries or heads share it, it takes a pass of its own, whose items are the
  // rows of the bias.
  void plan_steps() {
    size_t steps = p_.score.size();
    kinds_.assign(steps, Kind::none);
    sizes_.assign(steps, 0);
    copies_of_.assign(steps, 1);
    apart_.assign(steps, false);
    sums_.resize(steps);
    scalars_.resize(steps);
    for (size_t i = 0; i < steps; ++i) {
      const ScoreStep& step = p_.score[i];
      if (step.a < 0 || !p_.gradients[size_t(step.a)]) continue;
      const Array& g = p_.gradients[size_t(step.a)];
      if (step.op == ScoreOp::add_diagonal) {
        kinds_[i] = Kind::by_distance;
        sizes_[i] = p_.T + p_.S - 1;
        copies_of_[i] = chunks_;
      } else if (step.op == ScoreOp::add_dense && g.axis[1] != 0 && g.axis[2] != 0) {
        apart_[i] = !distinct(g);
        kinds_[i] = apart_[i] ? Kind::none : Kind::written;
      } else if (step.op == ScoreOp::add_dense && g.axis[2] != 0) {
        kinds_[i] = Kind::by_key;  // chunks have different keys: they share the sums
        sizes_[i] = p_.S;
      } else if (step.op == ScoreOp::add_dense && g.axis[1] != 0) {
        kinds_[i] = Kind::by_query;
        sizes_[i] = p_.T;
        copies_of_[i] = chunks_;
      } else {
        kinds_[i] = Kind::scalar;
        copies_of_[i] = chunks_;
        scalars_[i].assign(size_t(chunks_ * p_.batch * p_.N), 0.0);
      }
      if (sizes_[i]) sums_[i].assign(size_t(copies_of_[i] * p_.batch * p_.N * sizes_[i]), T(0));
      steps_wanted_ |= kinds_[i] != Kind::none;
    }
  }

  bool distinct(const Array& g) const {
    for (int i = 0; i < p_.batch_rank; ++i) {
      if (p_.batch_shape[i] > 1 && g.batch[i] == 0) return false;
    }
    return g.heads == p_.N;
  }

  std::vector<Gradient> gradients_for(int64_t chunk, int64_t entry, int64_t head) {
    std::vector<Gradient> out(p_.score.size());
    for (size_t i = 0; i < out.size(); ++i) {
      out[i].kind = kinds_[i];
      int64_t at = (chunk * p_.batch + entry) * p_.N + head;
      if (kinds_[i] == Kind::scalar) out[i].scalar = &scalars_[i][size_t(at)];
      if (kinds_[i] == Kind::by_key) at = entry * p_.N + head;
      if (sizes_[i]) out[i].sums = &sums_[i][size_t(at * sizes_[i])];
      if (kinds_[i] == Kind::written) out[i].array = &p_.gradients[size_t(p_.score[i].a)];
    }
    return out;
  }

  // Adds up the sums of all chunks, batch entries and heads that share a number.
  void finish_step(size_t i) {
    if (kinds_[i] != Kind::scalar && sizes_[i] == 0) return;
    const ScoreStep& step = p_.score[i];
    const Array& g = p_.gradients[size_t(step.a)];
    int64_t size = std::max<int64_t>(sizes_[i], 1);
    int64_t stride = kinds_[i] == Kind::by_key ? g.axis[2] : kinds_[i] == Kind::by_query ? g.axis[1] : 1;
    int64_t extent = 1 + (g.heads - 1) * g.axis[0] + (size - 1) * stride;
    for (int a = 0; a < p_.batch_rank; ++a) extent += (p_.batch_shape[a] - 1) * g.batch[a];
    std::vector<double> totals(size_t(extent), 0.0);
    auto each = [&](const auto& visit) {
      for (int64_t b = 0; b < p_.batch; ++b) {
        Entry entry(p_, b);
        for (int64_t h = 0; h < p_.N; ++h) visit(b, h, entry.offset(g) + head_of(p_, g, h) * g.axis[0]);
      }
    };
    for (int64_t c = 0; c < copies_of_[i]; ++c) {
      each([&](int64_t b, int64_t h, int64_t at) {
        size_t from = size_t((c * p_.batch + b) * p_.N + h);
        for (int64_t n = 0; n < size; ++n) {
          double part = kinds_[i] == Kind::scalar ? scalars_[i][from] : double(sums_[i][from * size_t(size) + size_t(n)]);
          totals[size_t(at + n * stride)] += part;
        }
      });
    }
    each([&](int64_t, int64_t, int64_t at) {
      for (int64_t n = 0; n < size; ++n) {
        T total = T(totals[size_t(at + n * stride)]);
        narrow<T>(&total, 1, g.data, g.type, at + n * stride);
      }
    });
  }

  // --------------------------------------------------------------------------------------------------------------
  // Which batch entries share a gradient

  // The batch entries and heads that add into one part of an array, in order.
  struct Owner {
    const Problem& p;
    const Array& x;
    int64_t count;  // parts

    Owner(const Problem& p, const Array& x) : p(p), x(x), count(x.heads) {
      for (int i = 0; i < p.batch_rank; ++i) {
        if (x.batch[i] != 0) count *= p.batch_shape[i];
      }
    }

    // Calls visit(entry number, head) for each that adds into part n.
    template <class Visit>
    void each(int64_t n, const Visit& visit) const {
      int64_t head = n % x.heads, group = p.N / x.heads;
      n /= x.heads;
      for (int64_t b = 0; b < p.batch; ++b) {
        Entry entry(p, b);
        int64_t own = 0;
        for (int i = 0; i < p.batch_rank; ++i) {
          if (x.batch[i] != 0) own = own * p.batch_shape[i] + entry.index[i];
        }
        if (own != n) continue;
        for (int64_t h = head * group; h < (head + 1) * group; ++h) visit(b, h);
      }
    }
  };

  // Number of the batch entry that is `owner` along the axes of which keys and values have their own, and `member`
  // along the axes they are shared on.
  int64_t entry_of(int64_t owner, int64_t member) const {
    std::array<int64_t, kMaxBatchRank> index{};
    for (int i = p_.batch_rank - 1; i >= 0; --i) {
      int64_t& from = shared_[i] ? member : owner;
      index[i] = from % p_.batch_shape[i];
      from /= p_.batch_shape[i];
    }
    int64_t number = 0;
    for (int i = 0; i < p_.batch_rank; ++i) number = number * p_.batch_shape[i] + index[i];
    return number;
  }

  // --------------------------------------------------------------------------------------------------------------
  // One item

  struct Keys {
    T *rows, *columns, *value_columns;  // [n][Dp]; per tile [Dp or Vp][kKeys]
    T *scratch;
    bool* finite;  // per tile, of the keys' rows
  };

  void read_keys(const Entry& entry, int64_t kv_head, int64_t lo, int64_t n, Keys& keys) {
    const Array &key = p_.operands[1], &value = p_.operands[2];
    int64_t key_at = entry.offset(key) + kv_head * key.axis[1] + lo * key.axis[0];
    int64_t value_at = entry.offset(value) + kv_head * value.axis[1] + lo * value.axis[0];
    pack_rows<T>(key, key_at, key.axis[0], n, p_.D, T(1), keys.rows);
    for (int64_t k = 0; k < n; k += kKeys) {
      int64_t count = std::min<int64_t>(kKeys, n - k);
      transpose_block(keys.rows + k * Dp_, Dp_, count, Dp_, keys.columns + k * Dp_, kKeys);
      Rows<T> vr = rows_of<T>(value, value_at + k * value.axis[0], value.axis[0], count, p_.V, true, keys.scratch);
      transpose_block(vr.data, vr.stride, count, Vp_, keys.value_columns + k * Vp_, kKeys);
      keys.finite[k / kKeys] = all_finite(Rows<T>{keys.rows + k * Dp_, Dp_}, count, p_.D);
    }
  }

  // Ranges of a block of queries; false if none of them sees a key of [lo, hi).
  bool find_ranges(QueryBlock<T>& block, const MaskOf<T>& mask, int64_t head, int64_t start, int64_t lo, int64_t hi) {
    block.count = std::min<int64_t>(kQueries, p_.T - start);
    block.panels = 0;
    bool sees = false;
    for (int64_t t = 0; t < block.count; t += kPanel<T>) {
      Panel<T> panel = Panel<T>::of(head, start + t, std::min<int64_t>(kPanel<T>, block.count - t));
      Range r = mask.range(panel);
      sees |= std::max(lo, r.lo) < std::min(hi, r.hi);
      block.range[block.panels] = r;
      block.panel[block.panels++] = panel;
    }
    return sees;
  }

  void read_block(QueryBlock<T>& block, const Entry& entry, int64_t head, int64_t start, T* row) {
    const Array &query = p_.operands[0], &ct = p_.out_cotangent;
    int64_t at = entry.offset(query) + head * query.axis[1] + start * query.axis[0];
    pack_rows<T>(query, at, query.axis[0], block.count, p_.D, T(p_.scale), block.rows);
    if (ct) {
      at = entry.offset(ct) + head * ct.axis[1] + start * ct.axis[0];
      pack_rows<T>(ct, at, ct.axis[0], block.count, p_.V, T(1), block.cotangent_rows);
    } else {
      std::fill_n(block.cotangent_rows, block.count * Vp_, T(0));
    }
    for (int64_t i = 0; i < kQueries; ++i) {
      block.lse[i] = kInfinity<T>;
      block.excess[i] = 0;
      if (i < block.count) read_sums(block, entry, head, start + i, i, row);
    }
    if (p_.dropout >= 0) {
      for (int64_t i = 0; i < block.count * Vp_; ++i) block.cotangent_rows[i] *= T(p_.dropout_scale);
    }
    block.finite = all_finite(Rows<T>{block.rows, Dp_}, block.count, p_.D) &&
                   all_finite(Rows<T>{block.cotangent_rows, Vp_}, block.count, p_.V);
    block.coarse = false;
    for (int64_t i = 0; i < block.panels; ++i) {
      int64_t from = i * kPanel<T>, n = block.panel[i].count;
      transpose_block(block.rows + from * Dp_, Dp_, n, Dp_, block.queries + from * Dp_, kPanel<T>);
      transpose_block(block.cotangent_rows + from * Vp_, Vp_, n, Vp_, block.cotangents + from * Vp_, kPanel<T>);
      block.coarse |= is_coarse(block.lse + from, n);
      // A second vector of lanes that is not in use is not written above.
      if (n <= kLanes<T>) {
        for (int64_t d = 0; d < Dp_; ++d) store(block.queries + from * Dp_ + d * kPanel<T> + kLanes<T>, Vector<T>{});
        for (int64_t d = 0; d < Vp_; ++d) store(block.cotangents + from * Vp_ + d * kPanel<T> + kLanes<T>, Vector<T>{});
      }
    }
    if (block.coarse) find_norms(block, entry, head);
  }

  void find_norms(QueryBlock<T>& block, const Entry& entry, int64_t head) {
    for (int64_t i = 0; i < block.panels; ++i) {
      int64_t from = i * kPanel<T>;
      weight_sums(p_, entry, block.panel[i], head / (p_.N / p_.K), block.queries + from * Dp_, block.lse + from,
                  block.norm + from);
    }
  }

  // Log-sum-exp and what is taken from the derivative of each weight. Softmax and log-sum-exp together have
  // d score = weight * (d weight - excess).
  void read_sums(QueryBlock<T>& block, const Entry& entry, int64_t head, int64_t query, int64_t i, T* row) {
    T lse = static_cast<const T*>(p_.lse.data)[entry.offset(p_.lse) + query * p_.lse.axis[0] + head * p_.lse.axis[1]];
    if (lse == -kInfinity<T>) return;  // sees nothing: weights 0
    T excess = 0;
    if (p_.out_cotangent && !certain_) {
      int64_t at = entry.offset(p_.out) + query * p_.out.axis[0] + head * p_.out.axis[1];
      widen<T>(p_.out.data, p_.out.type, at, p_.V, row);
      const T* ct = block.cotangent_rows + i * Vp_;
      for (int64_t d = p_.V; d < Vp_; ++d) row[d] = 0;
      Vector<T> total{};
      for (int64_t d = 0; d < Vp_; d += kLanes<T>) total += load(row + d) * load(ct + d);
      excess = sum<T>(total);
    }
    if (p_.lse_cotangent) {
      const Array& ct = p_.lse_cotangent;
      excess -= static_cast<const T*>(ct.data)[entry.offset(ct) + query * ct.axis[0] + head * ct.axis[1]];
    }
    block.lse[i] = lse;
    block.excess[i] = excess;
  }

  // Weights and derivatives of scores of panel i and keys [first, last), at `p` and `ds` [last - first][kRowStride].
  // `seen` is filled in, and true returned, if hidden pairs have to be kept out of sums.
  bool tile(const QueryBlock<T>& block, int64_t i, const MaskOf<T>& mask, const ScoreOf<T>& score,
            const DropoutOf<T>& dropout, const T* keys, const T* values, bool keys_finite, int64_t first, int64_t last,
            T* p, T* ds, T* saved, int8_t* visible, int8_t* seen, const std::vector<Gradient>& gradients) {
    const Panel<T>& panel = block.panel[i];
    int64_t n = last - first, from = i * kPanel<T>;
    int width = panel.width();
    product<T, false>(n, p_.D, keys, kKeys, block.queries + from * Dp_, kPanel<T>, p, kRowStride, width);
    product<T, false>(n, p_.V, values, kKeys, block.cotangents + from * Vp_, kPanel<T>, ds, kRowStride, width);
    if (score.exists()) score.apply(panel, first, n, p, kRowStride, saved);
    bool hidden = hide_part(mask, panel, block.range[i], first, last, visible, p, kRowStride);
    hidden |= score.may_hide();
    bool exact = hidden && !(keys_finite && block.finite);
    if (exact) find_seen(p, kRowStride, n, seen);
    if (dropout.exists()) dropout.drop(panel, first, n, kRowStride, ds);
    for (int j = 0; j < width; j += kLanes<T>) {
      Vector<T> lse = load(block.lse + from + j), excess = load(block.excess + from + j);
      for (int64_t k = 0; k < n; ++k) {
        Vector<T> x = load(p + k * kRowStride + j), d = load(ds + k * kRowStride + j);
        // A row whose log-sum-exp is NaN has that weight for what it sees only.
        IntVector<T> hidden = x == -kInfinity<T>;
        Vector<T> weight = hidden ? Vector<T>{} : exp<T>(x - lse);
        if (block.coarse) weight *= load(block.norm + from + j);
        Vector<T> derivative = weight * (d - excess);
        if (certain_) derivative = weight * d == weight * d ? -weight * excess : weight * d;
        store(p + k * kRowStride + j, weight);
        store(ds + k * kRowStride + j, hidden ? Vector<T>{} : derivative);
      }
    }
    if (panel.count < width) {
      for (int64_t k = 0; k < n; ++k) {
        for (int j = panel.count; j < width; ++j) p[k * kRowStride + j] = ds[k * kRowStride + j] = 0;
      }
    }
    if (dropout.exists()) dropout.drop(panel, first, n, kRowStride, p);
    if (score.exists()) score.pull(panel, first, n, ds, kRowStride, saved, gradients);
    return exact;
  }

  void item(int64_t number, int64_t chunk) {
    FlushDenormals flush;
    int64_t kv_head = number % p_.K, owner = number / p_.K;
    int64_t begin = chunk * p_.key_chunk, end = std::min(p_.S, begin + p_.key_chunk);
    int64_t most = std::min(kSubChunk, round_up(end - begin, kKeys));
    int64_t steps = int64_t(p_.score.size());
    Scratch scratch(QueryBlock<T>::need(Dp_, Vp_) +
                    Scratch::need<T>(most * (3 * Dp_ + 2 * Vp_) + kQueries * Dp_ + (kKeys + kPanel<T>) * (Dp_ + Vp_) +
                                     2 * kKeys * kRowStride + steps * kKeys * kPanel<T> + 1024) +
                    3 * Scratch::need<int8_t>(kKeys * kPanel<T>) + 4096);
    Keys keys{scratch.take<T>(most * Dp_), scratch.take<T>(most * Dp_), scratch.take<T>(most * Vp_),
              scratch.take<T>(kKeys * Vp_), scratch.take<bool>(kSubChunk / kKeys)};
    T* key_sums = scratch.take<T>(most * Dp_);
    T* value_sums = scratch.take<T>(most * Vp_);
    QueryBlock<T> block(Dp_, Vp_, scratch);
    T* query_sums = scratch.take<T>(kQueries * Dp_);
    T* rows = scratch.take<T>(kPanel<T> * std::max(Dp_, Vp_));
    T* weights = scratch.take<T>(kKeys * kRowStride);
    T* derivatives = scratch.take<T>(kKeys * kRowStride);
    T* saved = scratch.take<T>(std::max<int64_t>(steps, 1) * kKeys * kPanel<T>);
    int8_t* visible = scratch.take<int8_t>(kKeys * kPanel<T>);
    int8_t* seen = scratch.take<int8_t>(kKeys * kPanel<T>);

    for (int64_t lo = begin; lo < end; lo += kSubChunk) {
      int64_t n = std::min(kSubChunk, end - lo);
      std::fill_n(key_sums, n * Dp_, T(0));
      std::fill_n(value_sums, n * Vp_, T(0));
      for (int64_t member = 0; member < members_; ++member) {
        int64_t number_of_entry = entry_of(owner, member);
        Entry entry(p_, number_of_entry);
        const MaskOf<T> mask(p_, entry);
        const ScoreOf<T> score(p_, entry);
        const DropoutOf<T> dropout(p_, entry);
        read_keys(entry, kv_head, lo, n, keys);
        for (int64_t head = kv_head * (p_.N / p_.K); head < (kv_head + 1) * (p_.N / p_.K); ++head) {
          std::vector<Gradient> gradients = gradients_for(chunk, number_of_entry, head);
          if (mask.exists()) clear_written(gradients, entry, head, lo, n);
          for (int64_t start = 0; start < p_.T; start += kQueries) {
            bool sees = find_ranges(block, mask, head, start, lo, lo + n);
            if (sees) read_block(block, entry, head, start, rows);
            if (query_) std::fill_n(query_sums, kQueries * Dp_, T(0));
            for (int64_t k0 = lo; sees && k0 < lo + n; k0 += kKeys) {
              tile_of_keys(block, mask, score, dropout, keys, lo, k0, std::min<int64_t>(kKeys, lo + n - k0), weights,
                           derivatives, saved, visible, seen, gradients, query_sums, key_sums, value_sums);
            }
            if (query_) add_queries(entry, number_of_entry, chunk, head, block, lo == begin, sees, query_sums, rows);
          }
        }
      }
      Entry entry(p_, entry_of(owner, 0));
      if (key_) write_rows(key_, entry, kv_head, lo, n, p_.D, key_sums);
      if (value_) write_rows(value_, entry, kv_head, lo, n, p_.V, value_sums);
    }
  }

  // All panels of a block and one tile of keys, and what they add to the sums.
  void tile_of_keys(const QueryBlock<T>& block, const MaskOf<T>& mask, const ScoreOf<T>& score,
                    const DropoutOf<T>& dropout, const Keys& keys, int64_t lo, int64_t k0, int64_t count, T* weights,
                    T* derivatives, T* saved, int8_t* visible, int8_t* seen, const std::vector<Gradient>& gradients,
                    T* query_sums, T* key_sums, T* value_sums) {
    int64_t at = k0 - lo;
    // Neighbouring panels that see the same keys go into one product.
    int64_t from = 0, width = 0, first = 0, last = 0;
    auto flush = [&] {
      if (width == 0) return;
      int64_t skip = first - k0, row = at + skip;
      const T* p = weights + skip * kRowStride + from;
      const T* ds = derivatives + skip * kRowStride + from;
      if (value_) {
        add_row_product<T>(last - first, width, p, block.cotangent_rows + from * Vp_, Vp_, value_sums + row * Vp_, Vp_,
                           Vp_);
      }
      if (key_) {
        add_row_product<T>(last - first, width, ds, block.rows + from * Dp_, Dp_, key_sums + row * Dp_, Dp_, Dp_);
      }
      width = 0;
    };
    for (int64_t i = 0; i < block.panels; ++i) {
      const Range& r = block.range[i];
      int64_t f = std::max(k0, r.lo), l = std::min(k0 + count, r.hi);
      if (f >= l) {
        flush();
        continue;
      }
      int64_t skip = f - k0, lane = i * kPanel<T>;
      T* p = weights + skip * kRowStride + lane;
      T* ds = derivatives + skip * kRowStride + lane;
      bool exact = tile(block, i, mask, score, dropout, keys.columns + at * Dp_ + skip,
                        keys.value_columns + at * Vp_ + skip, keys.finite[at / kKeys], f, l, p, ds, saved, visible,
                        seen, gradients);
      const T* key_rows = keys.rows + (at + skip) * Dp_;
      T* sums = query_sums + lane * Dp_;
      int panel_width = block.panel[i].width();
      if (exact) {
        flush();
        if (query_) seen_product(p_.D, l - f, key_rows, Dp_, ds, kRowStride, seen, sums, panel_width);
        add_seen(block, lane, block.panel[i].count, l - f, p, ds, seen, key_sums + (at + skip) * Dp_,
                 value_sums + (at + skip) * Vp_);
        continue;
      }
      if (query_) {
        product<T, true>(p_.D, l - f, key_rows, Dp_, ds, kRowStride, sums, kPanel<T>, panel_width);
      }
      if (width == 0 || f != first || l != last) {
        flush();
        from = lane;
        first = f;
        last = l;
      }
      width += block.panel[i].count;
    }
    flush();
  }

  // Adds to the gradients of keys and values pair by pair, what is visible only.
  void add_seen(const QueryBlock<T>& block, int64_t lane, int count, int64_t n, const T* p, const T* ds,
                const int8_t* seen, T* key_sums, T* value_sums) {
    for (int64_t k = 0; k < n; ++k) {
      for (int j = 0; j < count; ++j) {
        if (!seen[k * kPanel<T> + j]) continue;
        const T* row = block.rows + (lane + j) * Dp_;
        const T* ct = block.cotangent_rows + (lane + j) * Vp_;
        for (int64_t d = 0; d < p_.D; ++d) key_sums[k * Dp_ + d] += ds[k * kRowStride + j] * row[d];
        for (int64_t d = 0; d < p_.V; ++d) value_sums[k * Vp_ + d] += p[k * kRowStride + j] * ct[d];
      }
    }
  }

  // What tiles that are skipped would have written.
  void clear_written(const std::vector<Gradient>& gradients, const Entry& entry, int64_t head, int64_t lo, int64_t n) {
    T zeros[kKeys] = {};
    for (const Gradient& gradient : gradients) {
      if (gradient.kind != Kind::written) continue;
      const Array& x = *gradient.array;
      int64_t base = entry.offset(x) + head_of(p_, x, head) * x.axis[0];
      for (int64_t t = 0; t < p_.T; ++t) {
        for (int64_t k = 0; k < n; k += kKeys) {
          narrow<T>(zeros, std::min<int64_t>(kKeys, n - k), x.data, x.type, base + t * x.axis[1] + (lo + k) * x.axis[2]);
        }
      }
    }
  }

  void add_queries(const Entry& entry, int64_t number, int64_t chunk, int64_t head, const QueryBlock<T>& block,
                   bool fresh, bool sees, const T* sums, T* rows) {
    if (!fresh && !sees) return;
    T factor[kPanel<T>];
    std::fill_n(factor, kPanel<T>, T(p_.scale));
    for (int64_t i = 0; i < block.panels; ++i) {
      for_each_lane<T>(sums + i * kPanel<T> * Dp_, p_.D, block.panel[i], factor, rows, [&](int j, const T* row) {
        int64_t query = block.panel[i].query[j];
        T* out = copies_ ? copy_of(chunk, number, head, query)
                         : static_cast<T*>(query_.data) + entry.offset(query_) + query * query_.axis[0] +
                               head * query_.axis[1];
        for (int64_t d = 0; d < p_.D; ++d) out[d] = fresh ? row[d] : out[d] + row[d];
      });
    }
  }

  T* copy_of(int64_t chunk, int64_t entry, int64_t head, int64_t query) const {
    return workspace_ + (((chunk * p_.batch + entry) * p_.N + head) * p_.T + query) * p_.D;
  }

  // Adds up the copies of rows [first, last) of the gradient of the queries.
  void join(int64_t first, int64_t last) {
    FlushDenormals flush;
    Scratch scratch(Scratch::need<T>(Dp_));
    T* total = scratch.take<T>(Dp_);
    for (int64_t row = first; row < last; ++row) {
      int64_t query = row % p_.T, head = row / p_.T % p_.N, number = row / p_.T / p_.N;
      Entry entry(p_, number);
      std::fill_n(total, Dp_, T(0));
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        const T* part = copy_of(chunk, number, head, query);
        for (int64_t d = 0; d < p_.D; ++d) total[d] += part[d];
      }
      narrow<T>(total, p_.D, query_.data, query_.type,
                entry.offset(query_) + query * query_.axis[0] + head * query_.axis[1]);
    }
  }

  void write_rows(const Array& x, const Entry& entry, int64_t head, int64_t lo, int64_t n, int64_t size,
                  const T* sums) {
    int64_t padded = round_up(size, kLanes<T>);
    for (int64_t k = 0; k < n; ++k) {
      narrow<T>(sums + k * padded, size, x.data, x.type,
                entry.offset(x) + head * x.axis[1] + (lo + k) * x.axis[0]);
    }
  }

  // --------------------------------------------------------------------------------------------------------------
  // The gradient of a bias that batch entries or heads share: the rows of one panel of queries, summed over all that
  // share them.
  void rows_apart(size_t step, const Owner& owner, int64_t part, int64_t panel_number) {
    FlushDenormals flush;
    int64_t steps = int64_t(p_.score.size());
    Scratch scratch(QueryBlock<T>::need(Dp_, Vp_) +
                    Scratch::need<T>(kPanel<T> * (p_.S + Dp_ + Vp_) + 2 * kKeys * (Dp_ + Vp_) +
                                     2 * kKeys * kRowStride + steps * kKeys * kPanel<T> + 1024) +
                    3 * Scratch::need<int8_t>(kKeys * kPanel<T>));
    T* totals = scratch.take<T>(kPanel<T> * p_.S);
    QueryBlock<T> block(Dp_, Vp_, scratch);
    T* rows = scratch.take<T>(kPanel<T> * std::max(Dp_, Vp_));
    T* key_rows = scratch.take<T>(kKeys * std::max(Dp_, Vp_));
    T* keys = scratch.take<T>(kKeys * Dp_);
    T* values = scratch.take<T>(kKeys * Vp_);
    T* weights = scratch.take<T>(kKeys * kRowStride);
    T* derivatives = scratch.take<T>(kKeys * kRowStride);
    T* saved = scratch.take<T>(steps * kKeys * kPanel<T>);
    int8_t* visible = scratch.take<int8_t>(kKeys * kPanel<T>);
    int8_t* seen = scratch.take<int8_t>(kKeys * kPanel<T>);
    std::fill_n(totals, kPanel<T> * p_.S, T(0));
    std::vector<Gradient> gradients(p_.score.size());
    gradients[step].kind = Kind::rows;
    gradients[step].sums = totals;
    int64_t start = panel_number * kPanel<T>;
    const Array& x = p_.gradients[size_t(p_.score[step].a)];
    int64_t out = -1;

    owner.each(part, [&](int64_t number, int64_t head) {
      Entry entry(p_, number);
      const MaskOf<T> mask(p_, entry);
      const ScoreOf<T> score(p_, entry);
      const DropoutOf<T> dropout(p_, entry);
      out = entry.offset(x) + head_of(p_, x, head) * x.axis[0];
      bool sees = find_ranges(block, mask, head, start, 0, p_.S);
      block.panels = 1;
      block.count = block.panel[0].count;
      if (!sees) return;
      read_block(block, entry, head, start, rows);
      const Array &key = p_.operands[1], &value = p_.operands[2];
      int64_t kv_head = head / (p_.N / p_.K);
      Range r = block.range[0];
      for (int64_t first = r.lo; first < r.hi; first += kKeys) {
        int64_t n = std::min<int64_t>(kKeys, r.hi - first);
        Rows<T> kr = rows_of<T>(key, entry.offset(key) + kv_head * key.axis[1] + first * key.axis[0], key.axis[0], n,
                                p_.D, true, key_rows);
        transpose_block(kr.data, kr.stride, n, Dp_, keys, kKeys);
        Rows<T> vr = rows_of<T>(value, entry.offset(value) + kv_head * value.axis[1] + first * value.axis[0],
                                value.axis[0], n, p_.V, true, key_rows);
        transpose_block(vr.data, vr.stride, n, Vp_, values, kKeys);
        tile(block, 0, mask, score, dropout, keys, values, true, first, first + n, weights, derivatives, saved, visible,
             seen, gradients);
      }
    });
    for (int64_t j = 0; j < std::min<int64_t>(kPanel<T>, p_.T - start); ++j) {
      narrow<T>(totals + j * p_.S, p_.S, x.data, x.type, out + (start + j) * x.axis[1]);
    }
  }

  const Problem& p_;
  Executor& executor_;
  int64_t Dp_, Vp_, chunks_;
  const Array &query_, &key_, &value_;  // gradients
  bool certain_ = false;                // one key: its weight is 1 whatever its score
  bool copies_ = false;                 // work on copies of the gradient of the queries, in sums' type
  T* workspace_ = nullptr;
  std::vector<T> own_workspace_;
  int64_t owners_ = 1, members_ = 1;
  std::array<bool, kMaxBatchRank> shared_{};

  bool steps_wanted_ = false;
  std::vector<Kind> kinds_;
  std::vector<int64_t> sizes_, copies_of_;
  std::vector<bool> apart_;
  std::vector<std::vector<T>> sums_;
  std::vector<std::vector<double>> scalars_;
};

}  // namespace probjax::PROBJAX_ISA
