// Tangent: the derivative of output and log-sum-exp along tangents of the operands, from the log-sum-exp of forward.
#pragma once

#include "attention/forward.h"

namespace probjax::PROBJAX_ISA {

// Where the log-sum-exp of a row is larger than this, its rounding error is no longer small against 1, and weights
// computed from it do not add up to 1: they are divided by their sum.
template <class T>
constexpr T kCoarse = sizeof(T) == 4 ? T(1024) : T(1e10);

// Sums of e**(score - lse) over all keys that the lanes of a panel see, and that of the sink; 1 where the lse is fine
// enough. `queries` is the panel as `pack_panel` leaves it.
template <class T>
inline void weight_sums(const Problem& p, const Entry& entry, const Panel<T>& panel, int64_t kv_head,
                        const T* queries, const T* lse, T* out) {
  int64_t padded = round_up(p.D, kLanes<T>);
  std::vector<T> memory(size_t(kKeys * (2 * padded + kPanel<T>) + kKeys));
  T *rows = memory.data(), *keys = rows + kKeys * padded, *s = keys + kKeys * padded;
  std::vector<int8_t> visible(size_t(kKeys * kPanel<T>));
  const MaskOf<T> mask(p, entry);
  const ScoreOf<T> score(p, entry);
  const Array& key = p.operands[1];
  T sums[kPanel<T>] = {};
  Range r = mask.range(panel);
  for (int64_t first = r.lo; first < r.hi; first += kKeys) {
    int64_t n = std::min<int64_t>(kKeys, r.hi - first);
    int64_t at = entry.offset(key) + kv_head * key.axis[1] + first * key.axis[0];
    pack_rows<T>(key, at, key.axis[0], n, p.D, T(1), rows);
    transpose_block(rows, padded, n, padded, keys, kKeys);
    product<T, false>(n, p.D, keys, kKeys, queries, kPanel<T>, s, kPanel<T>, panel.width());
    if (score.exists()) score.apply(panel, first, n, s, kPanel<T>, nullptr);
    hide_part(mask, panel, r, first, first + n, visible.data(), s, kPanel<T>);
    for (int64_t k = 0; k < n; ++k) {
      for (int j = 0; j < panel.count; ++j) sums[j] += std::exp(s[k * kPanel<T> + j] - lse[j]);
    }
  }
  for (int j = 0; j < kPanel<T>; ++j) {
    out[j] = 1;
    if (j >= panel.count || !(std::fabs(lse[j]) > kCoarse<T>) || std::fabs(lse[j]) == kInfinity<T>) continue;
    if (p.sinks >= 0) {
      const Array& sinks = p.operands[size_t(p.sinks)];
      int64_t at = entry.offset(sinks) + panel.head[j] * sinks.axis[0];
      sums[j] += std::exp(widen_one<T>(sinks.data, sinks.type, at) - lse[j]);
    }
    if (sums[j] > 0) out[j] = 1 / sums[j];
  }
}

// Whether any of the log-sum-exps is coarse.
template <class T>
inline bool is_coarse(const T* lse, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::fabs(lse[i]) > kCoarse<T> && std::fabs(lse[i]) < kInfinity<T>) return true;
  }
  return false;
}

template <class T>
class Tangent {
 public:
  Tangent(const Problem& p, Executor& executor)
      : p_(p), executor_(executor), plan_(p, executor.threads(), false), Dp_(round_up(p.D, kLanes<T>)),
        Vp_(round_up(p.V, kLanes<T>)) {}

  void run() {
    double work = 5.0 * double(p_.batch * p_.N) * double(p_.T) * double(p_.S) * double(p_.D + p_.V);
    parallel_for(executor_, plan_.items(p_), useful_threads(work), [&](int64_t i) { item(i); });
  }

 private:
  struct State {
    T *lse, *norm, *change, *sums;  // [kPanel] each, [V][kPanel]
  };

  void item(int64_t number) {
    FlushDenormals flush;
    int64_t most = QueryItem<T>::most_panels(p_, plan_);
    int64_t size = most * kPanel<T> * (2 * Dp_ + Vp_ + 3) + 4 * kKeys * (Dp_ + Vp_) +
                   kPanel<T> * (2 * std::max(Dp_, Vp_) + 2 * kKeys);
    Scratch scratch(Scratch::need<Panel<T>>(most) + Scratch::need<T>(size + 1024) +
                    2 * Scratch::need<int8_t>(kKeys * kPanel<T>));
    QueryItem<T> item(p_, plan_, number, scratch.take<Panel<T>>(most));
    Entry entry(p_, item.entry);
    const MaskOf<T> mask(p_, entry);
    const ScoreOf<T> score(p_, entry);
    const DropoutOf<T> dropout(p_, entry);

    T* rows = scratch.take<T>(kPanel<T> * std::max(Dp_, Vp_));
    T* row = scratch.take<T>(Vp_);
    T* s = scratch.take<T>(kKeys * kPanel<T>);
    T* ds = scratch.take<T>(kKeys * kPanel<T>);
    int8_t* visible = scratch.take<int8_t>(kKeys * kPanel<T>);
    int8_t* seen = scratch.take<int8_t>(kKeys * kPanel<T>);
    T* queries = scratch.take<T>(item.panels * Dp_ * kPanel<T>);
    T* query_moves = scratch.take<T>(item.panels * Dp_ * kPanel<T>);
    T* state = scratch.take<T>(item.panels * (Vp_ + 3) * kPanel<T>);
    KeyTiles keys(p_.operands[1], entry, item.kv_head, p_.D, true, scratch);
    KeyTiles key_moves(p_.moves[1], entry, item.kv_head, p_.D, true, scratch);
    KeyTiles values(p_.operands[2], entry, item.kv_head, p_.V, false, scratch);
    KeyTiles value_moves(p_.moves[2], entry, item.kv_head, p_.V, false, scratch);
    auto state_of = [&](int64_t i) {
      T* base = state + i * (Vp_ + 3) * kPanel<T>;
      return State{base, base + kPanel<T>, base + 2 * kPanel<T>, base + 3 * kPanel<T>};
    };

    int64_t lo = p_.S, hi = 0;
    for (int64_t i = 0; i < item.panels; ++i) {
      const Panel<T>& panel = item.panel[i];
      int64_t at = i * Dp_ * kPanel<T>;
      pack_panel<T>(p_.operands[0], entry, panel, p_.D, T(p_.scale), rows, queries + at);
      if (p_.moves[0]) pack_panel<T>(p_.moves[0], entry, panel, p_.D, T(p_.scale), rows, query_moves + at);
      State st = state_of(i);
      read_lse(entry, panel, st.lse);
      std::fill_n(st.norm, kPanel<T>, T(1));
      if (is_coarse(st.lse, panel.count)) {
        weight_sums(p_, entry, panel, item.kv_head, queries + at, st.lse, st.norm);
      }
      std::fill_n(st.change, (Vp_ + 1) * kPanel<T>, T(0));
      Range r = mask.range(panel);
      if (r.lo < r.hi) {
        lo = std::min(lo, r.lo / kKeys * kKeys);
        hi = std::max(hi, r.hi);
      }
    }

    for (int64_t k0 = lo; k0 < hi; k0 += kKeys) {
      int64_t count = std::min<int64_t>(kKeys, hi - k0);
      for (KeyTiles* tiles : {&keys, &key_moves, &values, &value_moves}) tiles->read(k0, count);
      for (int64_t i = 0; i < item.panels; ++i) {
        const Panel<T>& panel = item.panel[i];
        Range r = mask.range(panel);
        int64_t first = std::max(k0, r.lo), last = std::min(k0 + count, r.hi);
        if (first >= last) continue;
        int64_t n = last - first, skip = first - k0;
        int width = panel.width();
        const T* q = queries + i * Dp_ * kPanel<T>;
        const T* qm = query_moves + i * Dp_ * kPanel<T>;
        product<T, false>(n, p_.D, keys.columns + skip, kKeys, q, kPanel<T>, s, kPanel<T>, width);
        if (p_.moves[0]) {
          product<T, false>(n, p_.D, keys.columns + skip, kKeys, qm, kPanel<T>, ds, kPanel<T>, width);
        } else {
          std::fill_n(ds, n * kPanel<T>, T(0));
        }
        if (p_.moves[1]) {
          product<T, true>(n, p_.D, key_moves.columns + skip, kKeys, q, kPanel<T>, ds, kPanel<T>, width);
        }
        if (score.exists()) score.apply_moving(panel, first, n, s, ds, kPanel<T>);
        bool hidden = hide_part(mask, panel, r, first, last, visible, s, kPanel<T>);
        hidden |= score.may_hide();
        bool exact = hidden && !(values.finite() && value_moves.finite());
        if (exact) find_seen(s, kPanel<T>, n, seen);
        State st = state_of(i);
        weigh(st, n, width, s, ds);
        if (dropout.exists()) dropout.drop(panel, first, n, kPanel<T>, s, ds);
        add_values(values, skip, n, ds, exact, seen, st.sums, width);
        if (p_.moves[2]) add_values(value_moves, skip, n, s, exact, seen, st.sums, width);
      }
    }
    for (int64_t i = 0; i < item.panels; ++i) finish(entry, item.panel[i], state_of(i), rows, row);
  }

  // Tiles of keys or values of one head.
  struct KeyTiles {
    const Array& x;
    int64_t base, size, padded, count = 0;
    bool transposed;
    T *packed = nullptr, *columns = nullptr;
    Rows<T> rows{nullptr, 0};
    int known_finite = -1;

    KeyTiles(const Array& x, const Entry& entry, int64_t head, int64_t size, bool transposed, Scratch& scratch)
        : x(x), base(entry.offset(x) + head * x.axis[1]), size(size), padded(round_up(size, kLanes<T>)),
          transposed(transposed) {
      if (!x) return;
      packed = scratch.take<T>(kKeys * padded);
      if (transposed) columns = scratch.take<T>(kKeys * padded);
    }

    void read(int64_t first, int64_t n) {
      if (!x) return;
      count = n;
      known_finite = -1;
      rows = rows_of<T>(x, base + first * x.axis[0], x.axis[0], n, size, transposed, packed);
      if (transposed) transpose_block(rows.data, rows.stride, n, padded, columns, kKeys);
    }

    bool finite() {
      if (!x) return true;
      if (known_finite < 0) known_finite = all_finite(rows, count, size);
      return known_finite != 0;
    }
  };

  // Log-sum-exp per lane; plus infinity where nothing is visible, so that weights are 0.
  void read_lse(const Entry& entry, const Panel<T>& panel, T* out) {
    const T* lse = static_cast<const T*>(p_.lse.data) + entry.offset(p_.lse);
    for (int j = 0; j < kPanel<T>; ++j) {
      T x = lse[panel.query[j] * p_.lse.axis[0] + panel.head[j] * p_.lse.axis[1]];
      out[j] = x == -kInfinity<T> ? kInfinity<T> : x;
    }
  }

  // Weights in place of scores, their changes in place of the derivatives of scores, and the sums of those.
  static void weigh(const State& st, int64_t n, int width, T* s, T* ds) {
    for (int j = 0; j < width; j += kLanes<T>) {
      Vector<T> lse = load(st.lse + j), norm = load(st.norm + j), change{};
      for (int64_t k = 0; k < n; ++k) {
        Vector<T> x = load(s + k * kPanel<T> + j);
        IntVector<T> hidden = (x == -kInfinity<T>) | (lse == kInfinity<T>);
        Vector<T> weight = hidden ? Vector<T>{} : exp<T>(x - lse) * norm;
        Vector<T> moved = hidden ? Vector<T>{} : weight * load(ds + k * kPanel<T> + j);
        change += moved;
        store(s + k * kPanel<T> + j, weight);
        store(ds + k * kPanel<T> + j, moved);
      }
      store(st.change + j, load(st.change + j) + change);
    }
  }

  void add_values(const KeyTiles& values, int64_t skip, int64_t n, const T* weights, bool exact, const int8_t* seen,
                  T* sums, int width) {
    const T* v = values.rows.data + skip * values.rows.stride;
    if (exact) {
      seen_product(p_.V, n, v, values.rows.stride, weights, kPanel<T>, seen, sums, width);
    } else {
      product<T, true>(p_.V, n, v, values.rows.stride, weights, kPanel<T>, sums, kPanel<T>, width);
    }
  }

  void finish(const Entry& entry, const Panel<T>& panel, const State& st, T* rows, T* out_row) {
    T factor[kPanel<T>];
    std::fill_n(factor, kPanel<T>, T(p_.dropout >= 0 ? p_.dropout_scale : 1));
    for_each_lane<T>(st.sums, p_.V, panel, factor, rows, [&](int j, T* row) {
      int64_t query = panel.query[j], head = panel.head[j];
      T change = st.change[j];
      if (p_.sinks >= 0 && p_.moves[size_t(p_.sinks)] && st.lse[j] != kInfinity<T>) {
        const Array &sinks = p_.operands[size_t(p_.sinks)], &moves = p_.moves[size_t(p_.sinks)];
        T sink = widen_one<T>(sinks.data, sinks.type, entry.offset(sinks) + head * sinks.axis[0]);
        change += std::exp(sink - st.lse[j]) * st.norm[j] *
                  widen_one<T>(moves.data, moves.type, entry.offset(moves) + head * moves.axis[0]);
      }
      int64_t at = entry.offset(p_.out) + query * p_.out.axis[0] + head * p_.out.axis[1];
      widen<T>(p_.out.data, p_.out.type, at, p_.V, out_row);
      for (int64_t d = 0; d < p_.V; ++d) row[d] -= change * out_row[d];
      if (st.lse[j] == kInfinity<T>) std::fill_n(row, p_.V, T(0));
      at = entry.offset(p_.out_move) + query * p_.out_move.axis[0] + head * p_.out_move.axis[1];
      narrow<T>(row, p_.V, p_.out_move.data, p_.out_move.type, at);
      T* lse_move = static_cast<T*>(p_.lse_move.data) + entry.offset(p_.lse_move);
      lse_move[query * p_.lse_move.axis[0] + head * p_.lse_move.axis[1]] = change;
    });
  }

  const Problem& p_;
  Executor& executor_;
  QueryPlan<T> plan_;
  int64_t Dp_, Vp_;
};

}  // namespace probjax::PROBJAX_ISA
