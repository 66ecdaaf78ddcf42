// Forward: softmax over tiles of keys with a running maximum and sum (Dao et al., arXiv:2205.14135), for a panel
// of queries at a time, one query per lane. Maximum, exponential and sum then need nothing across lanes, and both
// products read their operands in the order they lie in.
#pragma once

#include "common/parallel.h"
#include "attention/product.h"
#include "attention/score.h"

namespace probjax::PROBJAX_ISA {

// At most this many rows (queries times heads of a group) of one key/value head are worked on one by one, with
// the numbers of a key in the lanes.
constexpr int kFewRows = 8;

// Queries of an item: keys and values are packed once for all of them.
constexpr int64_t kMostQueries = 512;

// Operations below which one more thread costs more than it brings.
constexpr double kWorkPerThread = 5e5;

inline int64_t useful_threads(double operations) {
  return std::max<int64_t>(1, int64_t(std::min(operations / kWorkPerThread, 1e6)));
}

// Which pairs of a tile [count][stride] are visible: 0 or -1 in `seen` [count][kPanel].
template <class T>
inline void find_seen(const T* s, int64_t stride, int64_t count, int8_t* seen) {
  for (int64_t k = 0; k < count; ++k) {
    for (int j = 0; j < kPanel<T>; ++j) seen[k * kPanel<T> + j] = -int8_t(s[k * stride + j] != -kInfinity<T>);
  }
}

// The sum C(i, j) += A(i, k) * B(k, j) over those k that lane j sees: where A is not finite, a weight of 0 does
// not hide it. A(i, k) is at a[k * a_stride + i], B and C are [..][kPanel] with strides. Where all is finite, the
// result is that of `product` to the bit.
template <class T>
inline void seen_product(int64_t rows, int64_t depth, const T* a, int64_t a_stride, const T* b, int64_t b_stride,
                         const int8_t* seen, T* c, int width) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int j = 0; j < width; j += kLanes<T>) {
      Vector<T> total{};
      for (int64_t k = 0; k < depth; ++k) {
        Vector<T> next = total + load(b + k * b_stride + j) * a[k * a_stride + i];
        total = widen_bytes<T>(seen + k * kPanel<T> + j) ? next : total;
      }
      store(c + i * kPanel<T> + j, load(c + i * kPanel<T> + j) + total);
    }
  }
}

// Decides how a call is cut into work items; the same for forward and tangent.
template <class T>
struct QueryPlan {
  bool grouped;            // lanes hold several heads of a group: few queries, which would leave lanes idle
  bool few;                // few enough rows to be worked on one by one
  int64_t heads_per_panel;
  int64_t heads;           // query heads per item, if grouped
  int64_t block;           // queries per item
  int64_t blocks;          // items per batch entry and head (or key/value head, if grouped)
  int64_t parts;           // pieces of the keys, joined at the end; depends on sizes alone, so that sums do
  int64_t part_keys;

  QueryPlan(const Problem& p, int64_t threads, bool may_split) {
    int64_t group = p.N / p.K;
    grouped = group > 1 && 2 * p.T <= kPanel<T>;
    few = may_split && group * p.T <= std::min(kFewRows, kPanel<T>);
    grouped |= few;
    heads_per_panel = grouped ? std::min(group, kPanel<T> / p.T) : 1;
    heads = std::min(group, 8 * heads_per_panel);
    if (few) {
      heads_per_panel = kPanel<T> / (group * p.T) * group;
      heads = p.N;
    }
    block = grouped ? p.T : kMostQueries;
    int64_t per_query = p.batch * p.N;
    while (!grouped && block > 32 && block > kPanel<T> &&
           per_query * ((p.T + block - 1) / block) < 4 * threads) {
      block /= 2;
    }
    blocks = few ? 1 : grouped ? (group + heads - 1) / heads : (p.T + block - 1) / block;
    int64_t rows = few ? p.batch : grouped ? p.batch * p.K : p.batch * p.N * ((p.T + 63) / 64);
    int64_t least = few ? 128 : 512;  // keys of a part
    parts = 1;
    if (may_split && rows < 64 && p.S >= 2 * least) parts = std::min((63 + rows) / rows, p.S / least);
    part_keys = round_up((p.S + parts - 1) / parts, kKeys);
    parts = (p.S + part_keys - 1) / part_keys;
  }

  int64_t outer(const Problem& p) const { return few ? 1 : grouped ? p.K : p.N; }
  int64_t items(const Problem& p) const { return p.batch * outer(p) * blocks * parts; }
};

// One item: some panels of queries that share a key/value head, and a piece of the keys.
template <class T>
struct QueryItem {
  int64_t entry, kv_head, part;
  int64_t panels = 0;
  Panel<T>* panel;

  // The last blocks first: with a causal mask those have most to do.
  QueryItem(const Problem& p, const QueryPlan<T>& plan, int64_t number, Panel<T>* storage) : panel(storage) {
    part = number % plan.parts;
    number /= plan.parts;
    int64_t head = number % plan.outer(p);
    number /= plan.outer(p);
    entry = number % p.batch;
    int64_t block = plan.blocks - 1 - number / p.batch;
    int64_t group = p.N / p.K;
    if (plan.few) {
      kv_head = 0;
      for (int64_t h = 0; h < p.N; h += plan.heads_per_panel) {
        panel[panels++] = Panel<T>::of_heads(p, h, std::min(plan.heads_per_panel, p.N - h));
      }
    } else if (plan.grouped) {
      kv_head = head;
      int64_t end = std::min(group, (block + 1) * plan.heads);
      for (int64_t h = block * plan.heads; h < end; h += plan.heads_per_panel) {
        panel[panels++] = Panel<T>::of_heads(p, kv_head * group + h, std::min(plan.heads_per_panel, end - h));
      }
    } else {
      kv_head = head / group;
      int64_t end = std::min(p.T, (block + 1) * plan.block);
      for (int64_t t = block * plan.block; t < end; t += kPanel<T>) {
        panel[panels++] = Panel<T>::of(head, t, std::min<int64_t>(kPanel<T>, end - t));
      }
    }
  }

  static int64_t most_panels(const Problem& p, const QueryPlan<T>& plan) {
    if (plan.few) return (p.N + plan.heads_per_panel - 1) / plan.heads_per_panel;
    return std::max<int64_t>(8, kMostQueries / kPanel<T>);
  }
};

// Rows of the queries (or of another array of that shape) in a panel, transposed: `out` [round_up(size)][kPanel].
template <class T>
inline void pack_panel(const Array& x, const Entry& entry, const Panel<T>& panel, int64_t size,
                       T scale, T* rows, T* out) {
  int64_t padded = round_up(size, kLanes<T>), base = entry.offset(x);
  for (int j = 0; j < panel.count; ++j) {
    int64_t at = base + panel.query[j] * x.axis[0] + panel.head[j] * x.axis[1];
    pack_rows<T>(x, at, 0, 1, size, scale, rows + j * padded);
  }
  transpose_block(rows, padded, panel.count, padded, out, kPanel<T>);
}

template <class T>
class Forward {
 public:
  Forward(const Problem& p, Executor& executor)
      : p_(p), executor_(executor), plan_(p, executor.threads(), true), Dp_(round_up(p.D, kLanes<T>)),
        Vp_(round_up(p.V, kLanes<T>)) {}

  void run() {
    int64_t rows = p_.batch * p_.T * p_.N;
    if (plan_.parts > 1) {
      tops_.resize(size_t(plan_.parts * rows));
      totals_.resize(size_t(plan_.parts * rows));
      sums_.resize(size_t(plan_.parts * rows * Vp_));
    }
    double work = 2.0 * double(rows) * double(p_.S) * double(p_.D + p_.V);
    int64_t threads = useful_threads(work);
    parallel_for(executor_, plan_.items(p_), threads, [&](int64_t i) { item(i); });
    if (plan_.parts > 1) {
      parallel_for(executor_, (rows + 63) / 64, threads, [&](int64_t i) {
        FlushDenormals flush;
        for (int64_t row = i * 64; row < std::min(rows, (i + 1) * 64); ++row) join(row);
      });
    }
  }

 private:
  struct State {
    T *shift, *total, *sums;  // [kPanel], [kPanel], [V][kPanel]
  };

  void item(int64_t number) {
    FlushDenormals flush;
    int64_t most = QueryItem<T>::most_panels(p_, plan_);
    int64_t size = most * kPanel<T> * (Dp_ + Vp_ + 2 + (plan_.few ? kKeys : 0)) + 2 * kKeys * (Dp_ + Vp_) + kPanel<T> * (Dp_ + Vp_ + kKeys);
    Scratch scratch(Scratch::need<Panel<T>>(most) + Scratch::need<T>(size + 1024) +
                    (1 + most) * Scratch::need<int8_t>(kKeys * kPanel<T>) + Scratch::need<bool>(most));
    QueryItem<T> item(p_, plan_, number, scratch.take<Panel<T>>(most));
    Entry entry(p_, item.entry);
    int64_t lo = item.part * plan_.part_keys, hi = std::min(p_.S, lo + plan_.part_keys);
    if (plan_.few) {
      few_rows(item, entry, lo, hi, scratch);
    } else {
      panels(item, entry, lo, hi, scratch);
    }
  }

  void panels(const QueryItem<T>& item, const Entry& entry, int64_t lo, int64_t hi, Scratch& scratch) {
    const MaskOf<T> mask(p_, entry);
    const ScoreOf<T> score(p_, entry);
    const DropoutOf<T> dropout(p_, entry);
    const Array &key = p_.operands[1], &value = p_.operands[2];
    int64_t key_base = entry.offset(key) + item.kv_head * key.axis[1];
    int64_t value_base = entry.offset(value) + item.kv_head * value.axis[1];

    T* rows = scratch.take<T>(kPanel<T> * std::max(Dp_, Vp_));
    T* key_rows = scratch.take<T>(kKeys * Dp_);
    T* keys = scratch.take<T>(kKeys * Dp_);
    T* value_rows = scratch.take<T>(kKeys * Vp_);
    T* s = scratch.take<T>(kKeys * kPanel<T>);
    int8_t* visible = scratch.take<int8_t>(kKeys * kPanel<T>);
    int8_t* seen = scratch.take<int8_t>(kKeys * kPanel<T>);
    T* queries = scratch.take<T>(item.panels * Dp_ * kPanel<T>);
    T* state = scratch.take<T>(item.panels * (Vp_ + 2) * kPanel<T>);
    bool* started = scratch.take<bool>(item.panels);  // whether the sums of a panel hold anything
    auto state_of = [&](int64_t i) {
      T* base = state + i * (Vp_ + 2) * kPanel<T>;
      return State{base, base + kPanel<T>, base + 2 * kPanel<T>};
    };

    Range whole{p_.S, 0, 0, 0};
    for (int64_t i = 0; i < item.panels; ++i) {
      const Panel<T>& panel = item.panel[i];
      pack_panel<T>(p_.operands[0], entry, panel, p_.D, T(p_.scale), rows, queries + i * Dp_ * kPanel<T>);
      State st = state_of(i);
      std::fill_n(st.shift, kPanel<T>, -kInfinity<T>);
      std::fill_n(st.total, kPanel<T>, T(0));
      started[i] = false;
      Range r = mask.range(panel);
      if (r.lo < r.hi) whole = {std::min(whole.lo, r.lo), std::max(whole.hi, r.hi), 0, 0};
    }

    lo = std::max(lo, whole.lo / kKeys * kKeys);
    hi = std::min(hi, whole.hi);
    for (int64_t k0 = lo; k0 < hi; k0 += kKeys) {
      int64_t count = std::min<int64_t>(kKeys, hi - k0);
      Rows<T> kr = rows_of<T>(key, key_base + k0 * key.axis[0], key.axis[0], count, p_.D, true, key_rows);
      transpose_block(kr.data, kr.stride, count, Dp_, keys, kKeys);
      Rows<T> vr = rows_of<T>(value, value_base + k0 * value.axis[0], value.axis[0], count, p_.V, false, value_rows);
      int finite = -1;  // whether the values are finite: not known yet
      for (int64_t i = 0; i < item.panels; ++i) {
        const Panel<T>& panel = item.panel[i];
        Range r = mask.range(panel);
        int64_t first = std::max(k0, r.lo), last = std::min(k0 + count, r.hi);
        if (first >= last) continue;
        int64_t n = last - first;
        product<T, false>(n, p_.D, keys + (first - k0), kKeys, queries + i * Dp_ * kPanel<T>, kPanel<T>, s,
                          kPanel<T>, panel.width());
        if (score.exists()) score.apply(panel, first, n, s, kPanel<T>, nullptr);
        bool hidden = hide_part(mask, panel, r, first, last, visible, s, kPanel<T>);
        hidden |= score.may_hide();
        if (hidden && finite < 0) finite = all_finite(vr, count, p_.V);
        bool exact = hidden && finite == 0;
        if (exact) find_seen(s, kPanel<T>, n, seen);
        State st = state_of(i);
        for (int v = 0; v < panel.vectors(); ++v) {
          T fade[kPanel<T>];
          if (softmax(st, n, v, s, fade) && started[i]) scale_sums(st, v, fade);
        }
        if (dropout.exists()) dropout.drop(panel, first, n, kPanel<T>, s);
        const T* v = vr.data + (first - k0) * vr.stride;
        if (exact) {
          if (!started[i]) std::fill_n(st.sums, p_.V * kPanel<T>, T(0));
          seen_product(p_.V, n, v, vr.stride, s, kPanel<T>, seen, st.sums, panel.width());
        } else if (started[i]) {
          product<T, true>(p_.V, n, v, vr.stride, s, kPanel<T>, st.sums, kPanel<T>, panel.width());
        } else {
          product<T, false>(p_.V, n, v, vr.stride, s, kPanel<T>, st.sums, kPanel<T>, panel.width());
        }
        started[i] = true;
      }
    }
    for (int64_t i = 0; i < item.panels; ++i) {
      if (!started[i]) std::fill_n(state_of(i).sums, p_.V * kPanel<T>, T(0));
      finish(item, entry, item.panel[i], state_of(i), rows);
    }
  }

  // Vector v of a tile: weights in place of scores, relative to e**shift, and their sum. Returns whether the sums
  // so far have to be multiplied by `fade`.
  //
  // The shift follows the maximum only when it falls behind by more than kSlack: weights may then be as large as
  // e**kSlack, which costs no accuracy, and the sums are seldom scaled again.
  static bool softmax(const State& st, int64_t count, int v, T* s, T* fade) {
    int j = v * kLanes<T>;
    Vector<T> old = load(st.shift + j), top = broadcast<T>(-kInfinity<T>);
    for (int64_t k = 0; k < count; ++k) top = larger(load(s + k * kPanel<T> + j), top);
    Vector<T> shift = top > old + kSlack ? top : old;
    Vector<T> total = load(st.total + j);
    Vector<T> base = shift == -kInfinity<T> ? Vector<T>{} : shift;
    // (score - shift) * log2(e) in one operation: its rounding error, that of the product of the shift, is common to
    // all keys and harmless while it is small.
    Vector<T> scaled = base * kLog2E<T>;
    bool fused = !any<T>((base > kHuge) | (base < -kHuge));
    bool changed = any<T>(old != shift);
    if (changed) {
      Vector<T> factor = exp2<T>(fused ? old * kLog2E<T> - scaled : (old - base) * kLog2E<T>);
      total *= factor;
      store(fade + j, factor);
      store(st.shift + j, shift);
    }
    Vector<T> part{};
    for (int64_t k = 0; fused && k < count; ++k) {
      Vector<T> weight = exp2<T>(load(s + k * kPanel<T> + j) * kLog2E<T> - scaled);
      part += weight;
      store(s + k * kPanel<T> + j, weight);
    }
    for (int64_t k = 0; !fused && k < count; ++k) {
      Vector<T> weight = exp2<T>((load(s + k * kPanel<T> + j) - base) * kLog2E<T>);
      part += weight;
      store(s + k * kPanel<T> + j, weight);
    }
    store(st.total + j, total + part);
    return changed;
  }

  void scale_sums(const State& st, int v, const T* fade) {
    int j = v * kLanes<T>;
    Vector<T> factor = load(fade + j);
    for (int64_t d = 0; d < p_.V; ++d) store(st.sums + d * kPanel<T> + j, load(st.sums + d * kPanel<T> + j) * factor);
  }

  static constexpr T kSlack = 8;
  static constexpr T kHuge = T(1e5);

  void finish(const QueryItem<T>& item, const Entry& entry, const Panel<T>& panel, const State& st, T* rows) {
    T factor[kPanel<T>];
    std::fill_n(factor, kPanel<T>, T(1));
    for (int j = 0; j < panel.count && plan_.parts == 1; ++j) {
      factor[j] = finish_row(entry, panel.head[j], panel.query[j], st.shift[j], st.total[j]);
    }
    for_each_lane<T>(st.sums, p_.V, panel, factor, rows, [&](int j, T* row) {
      if (plan_.parts > 1) {
        keep_part(item, panel.head[j], panel.query[j], st.shift[j], st.total[j], row);
      } else {
        write_row(entry, panel.head[j], panel.query[j], st.total[j], row);
      }
    });
  }

  // Writes the log-sum-exp of one row, and returns what its sums are to be multiplied by. A row that sees nothing
  // has a total of 0.
  T finish_row(const Entry& entry, int64_t head, int64_t query, T shift, T total) {
    T factor = total == 0 ? T(0) : 1 / total, lse = shift + std::log(total);
    if (total == 0) lse = -kInfinity<T>;
    if (p_.sinks >= 0 && total != 0) {
      const Array& sinks = p_.operands[size_t(p_.sinks)];
      T sink = widen_one<T>(sinks.data, sinks.type, entry.offset(sinks) + head * sinks.axis[0]);
      T top = std::max(shift, sink), all = total * std::exp(shift - top) + std::exp(sink - top);
      factor = std::exp(shift - top) / all;
      lse = top + std::log(all);
    }
    T* out = static_cast<T*>(p_.lse.data) + entry.offset(p_.lse);
    out[query * p_.lse.axis[0] + head * p_.lse.axis[1]] = lse;
    return p_.dropout >= 0 ? factor * T(p_.dropout_scale) : factor;
  }

  void write_row(const Entry& entry, int64_t head, int64_t query, T total, T* row) {
    if (total == 0) std::fill_n(row, p_.V, T(0));
    int64_t at = entry.offset(p_.out) + query * p_.out.axis[0] + head * p_.out.axis[1];
    narrow<T>(row, p_.V, p_.out.data, p_.out.type, at);
  }

  void keep_part(const QueryItem<T>& item, int64_t head, int64_t query, T top, T total, const T* row) {
    size_t at = size_t(((item.part * p_.batch + item.entry) * p_.N + head) * p_.T + query);
    tops_[at] = top;
    totals_[at] = total;
    std::memcpy(&sums_[at * size_t(Vp_)], row, size_t(p_.V) * sizeof(T));
  }

  // Joins the parts of one row in their order.
  void join(int64_t row) {
    int64_t rows = p_.batch * p_.T * p_.N;
    int64_t query = row % p_.T, head = row / p_.T % p_.N;
    Entry entry(p_, row / p_.T / p_.N);
    T top = -kInfinity<T>, total = 0;
    for (int64_t part = 0; part < plan_.parts; ++part) top = std::max(top, tops_[size_t(part * rows + row)]);
    T shift = top == -kInfinity<T> ? T(0) : top;
    Scratch scratch(Scratch::need<T>(Vp_));
    T* sums = scratch.take<T>(Vp_);
    std::fill_n(sums, Vp_, T(0));
    for (int64_t part = 0; part < plan_.parts; ++part) {
      size_t at = size_t(part * rows + row);
      if (totals_[at] == 0) continue;  // sees nothing
      T fade = std::exp(tops_[at] - shift);
      total += fade * totals_[at];
      const T* from = &sums_[at * size_t(Vp_)];
      for (int64_t d = 0; d < p_.V; ++d) sums[d] += fade * from[d];
    }
    T factor = finish_row(entry, head, query, top, total);
    for (int64_t d = 0; d < p_.V; ++d) sums[d] *= factor;
    write_row(entry, head, query, total, sums);
  }

  // ----------------------------------------------------------------------------------------------------------
  // Few rows: one item has all heads of a batch entry, so that it reads keys and values in the order they lie in,
  // at the speed of memory. The lanes of a panel are the rows of some key/value heads.

  void few_rows(const QueryItem<T>& item, const Entry& entry, int64_t lo, int64_t hi, Scratch& scratch) {
    const MaskOf<T> mask(p_, entry);
    const ScoreOf<T> score(p_, entry);
    const DropoutOf<T> dropout(p_, entry);
    const Array &query = p_.operands[0], &key = p_.operands[1], &value = p_.operands[2];
    int64_t key_base = entry.offset(key), value_base = entry.offset(value);
    int64_t rows = p_.N * p_.T;

    T* queries = scratch.take<T>(rows * Dp_);
    T* sums = scratch.take<T>(rows * Vp_);
    T* s = scratch.take<T>(item.panels * kKeys * kPanel<T>);
    T* state = scratch.take<T>(item.panels * 2 * kPanel<T>);
    T* widened = scratch.take<T>(kKeys * std::max(Dp_, Vp_));
    int8_t* visible = scratch.take<int8_t>(kKeys * kPanel<T>);
    int8_t* seen = scratch.take<int8_t>(item.panels * kKeys * kPanel<T>);
    std::fill_n(queries, rows * Dp_, T(0));
    std::fill_n(sums, rows * Vp_, T(0));
    for (int64_t row = 0; row < rows; ++row) {
      int64_t at = entry.offset(query) + row % p_.T * query.axis[0] + row / p_.T * query.axis[1];
      pack_rows<T>(query, at, 0, 1, p_.D, T(p_.scale), queries + row * Dp_);
    }
    int64_t begin = hi, end = lo;
    for (int64_t i = 0; i < item.panels; ++i) {
      std::fill_n(state + i * 2 * kPanel<T>, kPanel<T>, -kInfinity<T>);
      std::fill_n(state + (i * 2 + 1) * kPanel<T>, kPanel<T>, T(0));
      Range r = mask.range(item.panel[i]);
      begin = std::min(begin, std::max(r.lo, lo));
      end = std::max(end, std::min(r.hi, hi));
    }

    Dots dots = dots_of(key);
    Weighted weighted = weighted_of(value);
    for (int64_t first = begin; first < end; first += kKeys) {
      int64_t n = std::min<int64_t>(kKeys, end - first);
      for (int64_t k = 0; k < n; ++k) {
        (this->*dots)(item, key, key_base + (first + k) * key.axis[0], queries, widened, s + k * kPanel<T>);
      }
      bool some_hidden = false;
      for (int64_t i = 0; i < item.panels; ++i) {
        const Panel<T>& panel = item.panel[i];
        T* tile = s + i * kKeys * kPanel<T>;
        T* panel_sums = sums + i * plan_.heads_per_panel * p_.T * Vp_;
        if (score.exists()) score.apply(panel, first, n, tile, kPanel<T>, nullptr);
        bool hidden = hide_part(mask, panel, mask.range(panel), first, first + n, visible, tile, kPanel<T>);
        hidden |= score.may_hide();
        find_seen(tile, kPanel<T>, n, seen + i * kKeys * kPanel<T>);
        some_hidden |= hidden;
        T fade[kPanel<T>];
        State st{state + i * 2 * kPanel<T>, state + (i * 2 + 1) * kPanel<T>, nullptr};
        for (int v = 0; v < panel.vectors(); ++v) {
          if (!softmax(st, n, v, tile, fade)) continue;
          for (int j = v * kLanes<T>; j < std::min((v + 1) * kLanes<T>, panel.count); ++j) {
            for (int64_t d = 0; d < p_.V; ++d) panel_sums[j * Vp_ + d] *= fade[j];
          }
        }
        if (dropout.exists()) dropout.drop(panel, first, n, kPanel<T>, tile);
      }
      int64_t at = value_base + first * value.axis[0];
      if (some_hidden && !values_finite(value, at, n, widened)) {
        for (int64_t i = 0; i < item.panels; ++i) {
          add_seen(item.panel[i], value, at, n, s + i * kKeys * kPanel<T>, seen + i * kKeys * kPanel<T>, widened,
                   sums + i * plan_.heads_per_panel * p_.T * Vp_);
        }
      } else {
        (this->*weighted)(item, value, at, n, widened, s, sums);
      }
    }
    for (int64_t i = 0; i < item.panels; ++i) {
      const Panel<T>& panel = item.panel[i];
      for (int j = 0; j < panel.count; ++j) {
        T* row = sums + (panel.head[j] * p_.T + panel.query[j]) * Vp_;
        T shift = state[i * 2 * kPanel<T> + j], total = state[(i * 2 + 1) * kPanel<T> + j];
        if (plan_.parts > 1) {
          keep_part(item, panel.head[j], panel.query[j], shift, total, row);
        } else {
          T factor = finish_row(entry, panel.head[j], panel.query[j], shift, total);
          for (int64_t d = 0; d < p_.V; ++d) row[d] *= factor;
          write_row(entry, panel.head[j], panel.query[j], total, row);
        }
      }
    }
  }

  // Whether the values of n keys are finite, of all heads.
  bool values_finite(const Array& value, int64_t at, int64_t n, T* widened) const {
    for (int64_t kv = 0; kv < p_.K; ++kv) {
      pack_rows<T>(value, at + kv * value.axis[1], value.axis[0], n, p_.V, T(1), widened);
      if (!all_finite(Rows<T>{widened, Vp_}, n, p_.V)) return false;
    }
    return true;
  }

  // Adds the weighted values of n keys to the rows of one panel, of what each sees only.
  void add_seen(const Panel<T>& panel, const Array& value, int64_t at, int64_t n, const T* weights,
                const int8_t* seen, T* widened, T* sums) const {
    for (int j = 0; j < panel.count; ++j) {
      int64_t head = at + panel.head[j] / (p_.N / p_.K) * value.axis[1];
      for (int64_t k = 0; k < n; ++k) {
        if (!seen[k * kPanel<T> + j]) continue;
        widen<T>(value.data, value.type, head + k * value.axis[0], p_.V, widened);
        for (int64_t d = 0; d < p_.V; ++d) sums[j * Vp_ + d] += weights[k * kPanel<T> + j] * widened[d];
      }
    }
  }

  // Reads whole vectors of an array, widened.
  struct Wide {
    static constexpr Type type = kTypeOf<T>;
    static PROBJAX_INLINE Vector<T> at(const T* p) { return load(p); }
  };
  struct Bf16 {
    static constexpr Type type = Type::bf16;
    static PROBJAX_INLINE Vector<T> at(const uint16_t* p) {
      typename VectorTypes<T>::Halves halves;
      std::memcpy(&halves, p, sizeof(halves));
      return (Vector<T>)(__builtin_convertvector(halves, UintVector) << 16);
    }
  };

  // Arrays of other types, or with a last vector that is not full, are widened into memory first.
  struct Packed : Wide {};
  template <class Read>
  static constexpr bool kPacked = std::is_same_v<Read, Packed>;

  using Dots = void (Forward::*)(const QueryItem<T>&, const Array&, int64_t, const T*, T*, T*);
  using Weighted = void (Forward::*)(const QueryItem<T>&, const Array&, int64_t, int64_t, T*, T*, T*);

  Dots dots_of(const Array& key) const {
    bool whole = p_.D % kLanes<T> == 0;
    if (whole && key.type == kTypeOf<T>) return &Forward::template dot_key<Wide>;
    if constexpr (sizeof(T) == 4) {
      if (whole && key.type == Type::bf16) return &Forward::template dot_key<Bf16>;
    }
    return &Forward::template dot_key<Packed>;
  }

  Weighted weighted_of(const Array& value) const {
    bool whole = p_.V % kLanes<T> == 0;
    if (whole && value.type == kTypeOf<T>) return &Forward::template weigh_values<Wide>;
    if constexpr (sizeof(T) == 4) {
      if (whole && value.type == Type::bf16) return &Forward::template weigh_values<Bf16>;
    }
    return &Forward::template weigh_values<Packed>;
  }

  // One key: its product with all queries, one lane each, at `s` (of the first panel).
  template <class Read>
  void dot_key(const QueryItem<T>& item, const Array& key, int64_t at, const T* queries, T* widened, T* s) {
    using Number = std::conditional_t<std::is_same_v<Read, Bf16>, uint16_t, T>;
    int64_t kv_per_panel = plan_.heads_per_panel * p_.K / p_.N, kv = 0, rows = p_.N / p_.K * p_.T;
    for (int64_t i = 0; i < item.panels; ++i, s += kKeys * kPanel<T>) {
      alignas(64) Vector<T> products[kPanel<T>];
      int lane = 0;
      for (int64_t end = std::min(p_.K, kv + kv_per_panel); kv < end; ++kv) {
        const Number* row = static_cast<const Number*>(key.data) + at + kv * key.axis[1];
        if constexpr (kPacked<Read>) {
          pack_rows<T>(key, at + kv * key.axis[1], 0, 1, p_.D, T(1), widened);
          row = widened;
        }
        const T* q = queries + kv * rows * Dp_;
        for (int64_t left = rows; left > 0;) {
          int done = left >= 4   ? dot_rows<Read, 4>(row, q, products + lane)
                     : left >= 2 ? dot_rows<Read, 2>(row, q, products + lane)
                                 : dot_rows<Read, 1>(row, q, products + lane);
          left -= done;
          lane += done;
          q += done * Dp_;
        }
      }
      for (; lane % kLanes<T>; ++lane) products[lane] = Vector<T>{};
      for (int j = 0; j < lane; j += kLanes<T>) store(s + j, sum_each(products + j));
    }
  }

  template <class Read, int rows, class Number>
  PROBJAX_INLINE int dot_rows(const Number* key, const T* queries, Vector<T>* out) {
    Vector<T> totals[rows] = {};
    for (int64_t d = 0; d < Dp_; d += kLanes<T>) {
      Vector<T> k = Read::at(key + d);
#pragma GCC unroll 4
      for (int j = 0; j < rows; ++j) totals[j] += k * load(queries + j * Dp_ + d);
    }
#pragma GCC unroll 4
    for (int j = 0; j < rows; ++j) out[j] = totals[j];
    return rows;
  }

  // The sums over lanes of kLanes vectors, as one vector.
  static PROBJAX_INLINE Vector<T> sum_each(const Vector<T>* in) {
    Vector<T> v[kLanes<T>];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) v[i] = in[i];
    sum_pairs<1>(v);
    return v[0];
  }

  template <int step>
  static PROBJAX_INLINE void sum_pairs(Vector<T> (&v)[kLanes<T>]) {
    constexpr int lanes = kLanes<T>;
    if constexpr (step < lanes) {
#pragma GCC unroll 16
      for (int i = 0; i < lanes; i += 2 * step) {
        exchange<step>(v[i], v[i + step], std::make_index_sequence<lanes>());
        v[i] += v[i + step];
      }
      sum_pairs<2 * step>(v);
    }
  }

  // Adds the weighted values of n keys to the sums of all rows, a few keys at a time.
  template <class Read>
  void weigh_values(const QueryItem<T>& item, const Array& value, int64_t at, int64_t n, T* widened, T* s, T* sums) {
    int64_t k = 0;
    for (; k + 4 <= n; k += 4) weigh_keys<Read, 4>(item, value, at + k * value.axis[0], widened, s + k * kPanel<T>, sums);
    for (; k < n; ++k) weigh_keys<Read, 1>(item, value, at + k * value.axis[0], widened, s + k * kPanel<T>, sums);
  }

  template <class Read, int keys>
  void weigh_keys(const QueryItem<T>& item, const Array& value, int64_t at, T* widened, const T* s, T* sums) {
    using Number = std::conditional_t<std::is_same_v<Read, Bf16>, uint16_t, T>;
    int64_t kv_per_panel = plan_.heads_per_panel * p_.K / p_.N, kv = 0, rows = p_.N / p_.K * p_.T;
    for (int64_t i = 0; i < item.panels; ++i, s += kKeys * kPanel<T>) {
      const T* weights = s;
      for (int64_t end = std::min(p_.K, kv + kv_per_panel); kv < end; ++kv) {
        const Number* row = static_cast<const Number*>(value.data) + at + kv * value.axis[1];
        int64_t stride = value.axis[0];
        if constexpr (kPacked<Read>) {
          pack_rows<T>(value, at + kv * value.axis[1], stride, keys, p_.V, T(1), widened);
          row = widened;
          stride = Vp_;
        }
        T* out = sums + kv * rows * Vp_;
        for (int64_t left = rows; left > 0;) {
          int done = left >= 4   ? weigh_rows<Read, keys, 4>(row, stride, weights, out)
                     : left >= 2 ? weigh_rows<Read, keys, 2>(row, stride, weights, out)
                                 : weigh_rows<Read, keys, 1>(row, stride, weights, out);
          left -= done;
          weights += done;
          out += done * Vp_;
        }
      }
    }
  }

  template <class Read, int keys, int rows, class Number>
  PROBJAX_INLINE int weigh_rows(const Number* value, int64_t stride, const T* weights, T* out) {
    for (int64_t d = 0; d < Vp_; d += kLanes<T>) {
      Vector<T> v[keys];
#pragma GCC unroll 4
      for (int k = 0; k < keys; ++k) v[k] = Read::at(value + k * stride + d);
#pragma GCC unroll 4
      for (int j = 0; j < rows; ++j) {
        Vector<T> total = v[0] * weights[j];
#pragma GCC unroll 4
        for (int k = 1; k < keys; ++k) total += v[k] * weights[k * kPanel<T> + j];
        store(out + j * Vp_ + d, load(out + j * Vp_ + d) + total);
      }
    }
    return rows;
  }

  const Problem& p_;
  Executor& executor_;
  QueryPlan<T> plan_;
  int64_t Dp_, Vp_;
  std::vector<T> tops_, totals_, sums_;  // of the parts
};

}  // namespace probjax::PROBJAX_ISA
