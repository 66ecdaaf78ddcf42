// selective_scan, backward: from the last chunk to the first, from the states that forward kept.
//
// Per chunk and n, decays and states are computed again into cache, then the adjoint state g runs against the order of
// processing: g_t = dy_t C_t + a_{t+1} g_{t+1}. Sums over n (u, dt) and over time (A) need nothing across lanes.
// Sums over channels (B, C) are kept in part lane by lane for all tiles of a block, and reduced once.
#pragma once

#include "recurrence/selective_scan.h"

namespace probjax::PROBJAX_ISA::recurrence {

template <class T>
class SelectiveBackward : public SelectivePass<T> {
 public:
  using SelectivePass<T>::SelectivePass;

  void run() {
    this->each(8, [this](const Item& item) { walk(item); });
  }

 private:
  using SelectivePass<T>::p_;
  using SelectivePass<T>::lanes;
  using SelectivePass<T>::kTile;

  // What a tile has in a chunk: [step][lane] each.
  struct Tile {
    T *u, *dt, *dy, *du, *ddt;
    int used;  // lanes that have a channel
  };

  // For each of the n worked on together: decays, states (that before the chunk first), and the terms of the
  // gradients of B and C: in a mixed call [step][lane]; else those of kFolded steps lie in the lanes of one vector,
  // step by step, as the first rounds of `sums` leave them.
  struct Steps {
    T *a, *h, *dB, *dC;
  };

  static constexpr int kFolded = lanes < kStepsUnit ? lanes : kStepsUnit;
  static constexpr int64_t kStates = kTile + lanes;  // numbers of one n in Steps::h

  // A gradient of B or C.
  struct Factor {
    T* out;                     // slot and batch entry of this item; or null
    int64_t groups, slots;      // of the whole array
    int64_t time, group, n, slot;  // strides
    T* rows;                    // [n][step], or [n] for a sum over time, of a block with one group
  };

  Factor make(const Array& x, const Item& item, int64_t groups, int64_t slots, int64_t slot) const {
    Factor f{};
    f.out = this->result(x, item);
    f.groups = groups;
    f.slots = slots;
    f.time = p_.L == 1 ? 0 : x.axis[0];
    f.group = x.axis[1];
    f.n = x.axis[2];
    f.slot = slot;
    return f;
  }

  int64_t row_size(const Factor& f) const { return (f.n ? p_.N : 1) * kChunk; }

  void walk(const Item& item) const {
    const bool mixed = p_.mixed;
    const int64_t states = item.tiles * p_.N * lanes, factors = mixed ? kTile : p_.N * kChunk;
    Factor dB = make(p_.gradients.B, item, p_.B_groups, p_.B_slots, p_.B_slot);
    Factor dC = make(p_.gradients.C, item, p_.C_groups, p_.C_slots, p_.C_slot);
    const int64_t tiled = item.tiles * kTile;
    Scratch scratch(4 * Scratch::need<T>(states) + 2 * Scratch::need<T>(factors) + 5 * Scratch::need<T>(tiled) +
                    3 * Scratch::need<T>(kTogether * kTile) + Scratch::need<T>(kTogether * kStates) +
                    Scratch::need<T>(kChunk) + Scratch::need<T>(row_size(dB)) + Scratch::need<T>(row_size(dC)));
    T *A = scratch.take<T>(states), *dA = scratch.take<T>(states), *g = scratch.take<T>(states);
    T* start = scratch.take<T>(states);
    T *B = scratch.take<T>(factors), *C = scratch.take<T>(factors), *cut = scratch.take<T>(kChunk);
    dB.rows = scratch.take<T>(row_size(dB));
    dC.rows = scratch.take<T>(row_size(dC));
    Steps w{scratch.take<T>(kTogether * kTile), scratch.take<T>(kTogether * kStates),
            scratch.take<T>(kTogether * kTile), scratch.take<T>(kTogether * kTile)};
    Tile all{scratch.take<T>(tiled), scratch.take<T>(tiled), scratch.take<T>(tiled), scratch.take<T>(tiled),
             scratch.take<T>(tiled), lanes};

    this->read_states(p_.x.A, item, A);
    for (int64_t i = 0; i < states; ++i) A[i] *= kLog2E<T>;
    this->read_states(p_.last_cotangent, item, g);
    std::fill(dA, dA + states, T(0));
    Array kept = p_.starts;
    kept.axis = {p_.starts.axis[1], p_.starts.axis[2], 0};
    T *du = this->result(p_.gradients.u, item), *ddt = this->result(p_.gradients.dt, item);
    for (int64_t m = this->chunks() - 1; m >= 0; --m) {
      const Chunk c = this->chunk(m);
      this->read_states(kept, item, start, m * p_.D * p_.N);
      this->read_resets(item, c, cut);
      if (!mixed) {
        this->read_shared(p_.x.B, p_.B_groups, item, c, B);
        this->read_shared(p_.x.C, p_.C_groups, item, c, C);
      }
      for (int64_t tile = 0; tile < item.tiles; ++tile) {
        this->read_tile(p_.x.u, item, tile, c, all.u + tile * kTile);
        this->read_tile(p_.x.dt, item, tile, c, all.dt + tile * kTile);
        this->read_tile(p_.y_cotangent, item, tile, c, all.dy + tile * kTile);
      }
      std::fill(all.du, all.du + tiled, T(0));
      std::fill(all.ddt, all.ddt + tiled, T(0));
      for (int64_t n = 0; n < p_.N;) {
        const int together = this->together(n);
        const T *Bn = mixed ? B : B + n * kChunk, *Cn = mixed ? C : C + n * kChunk;
        for (int64_t tile = 0; tile < item.tiles; ++tile) {
          if (mixed) {
            this->read_mixed(p_.x.B, p_.B_groups, item, tile, c, n, B);
            this->read_mixed(p_.x.C, p_.C_groups, item, tile, c, n, C);
          }
          const int64_t at = tile * kTile, s = (tile * p_.N + n) * lanes;
          const Tile t{all.u + at, all.dt + at, all.dy + at, all.du + at, all.ddt + at, int(this->count(item, tile))};
          const bool first = mixed || tile == 0;
          auto run = mixed           ? adjoint<1, true, true>
                     : together == 1 ? (first ? adjoint<1, false, true> : adjoint<1, false, false>)
                                     : (first ? adjoint<kTogether, false, true> : adjoint<kTogether, false, false>);
          run(c.steps, A + s, Bn, Cn, cut, start + s, t, w, g + s, dA + s);
          if (mixed) {
            add_mixed(dB, item, tile, c, n, m == chunks_last(), w.dB);
            add_mixed(dC, item, tile, c, n, m == chunks_last(), w.dC);
          }
        }
        for (int k = 0; !mixed && k < together; ++k) {
          add_shared(dB, c, n + k, m == chunks_last(), w.dB + k * kTile);
          add_shared(dC, c, n + k, m == chunks_last(), w.dC + k * kTile);
        }
        n += together;
      }
      for (int64_t tile = 0; tile < item.tiles; ++tile) {
        if (du) this->write_tile(all.du + tile * kTile, item, tile, c, du);
        if (ddt) this->write_tile(all.ddt + tile * kTile, item, tile, c, ddt, 1 / kLog2E<T>);
      }
      if (!mixed) {
        write_rows(dB, item, c);
        write_rows(dC, item, c);
      }
    }
    if (T* out = this->result(p_.gradients.A, item)) this->write_states(dA, item, out);
    if (T* out = this->result(p_.gradients.initial, item)) this->write_states(g, item, out);
    clear_rest(dB, item);
    clear_rest(dC, item);
  }

  int64_t chunks_last() const { return this->chunks() - 1; }

  // All steps of a chunk, for some n. Carried: `g`, the adjoint of the state that leaves the chunk, then of that which
  // enters it; and `dA`. Added to: du, ddt, and unless `first` also dB and dC.
  template <int together, bool mixed, bool first>
  static PROBJAX_NOINLINE void adjoint(int64_t count, const T* A, const T* B, const T* C, const T* cut, const T* start,
                                       const Tile& t, const Steps& w, T* g, T* dA) {
    Vector<T> A_n[together], h[together];
    for (int k = 0; k < together; ++k) {
      A_n[k] = load(A + k * lanes);
      h[k] = load(start + k * lanes);
      store(w.h + k * kStates, h[k]);
    }
    for (int64_t s = 0; s < count; ++s) {
      const int64_t at = s * lanes;
      const Vector<T> u = load(t.u + at), dt = load(t.dt + at);
#pragma GCC unroll 4
      for (int k = 0; k < together; ++k) {
        const Vector<T> a = decay<T>(dt * A_n[k] + cut[s]);
        h[k] = a * h[k] + u * factor<T, mixed>(B + k * kChunk, s);
        store(w.a + k * kTile + at, a);
        store(w.h + k * kStates + lanes + at, h[k]);
      }
    }
    const int64_t padded = round_up(count, kStepsUnit);
    for (int64_t at = count * lanes; at < padded * lanes; at += lanes) {
      for (int k = 0; k < together; ++k) {
        store(w.a + k * kTile + at, broadcast<T>(1));
        store(w.h + k * kStates + lanes + at, h[k]);
      }
    }
    Vector<T> carry[together], total[together];
    for (int k = 0; k < together; ++k) {
      carry[k] = load(g + k * lanes);
      total[k] = Vector<T>{};
    }
    // A lane without a channel has terms of 0, unless B or C is not finite.
    IntVector<T> used{};
    for (int i = 0; i < lanes; ++i) used[i] = -int(i < t.used);
    for (int64_t s = padded; s > 0; s -= kFolded) {
      Vector<T> dB[together][kFolded], dC[together][kFolded];
#pragma GCC unroll 4
      for (int i = kFolded - 1; i >= 0; --i) {
        const int64_t step = s - kFolded + i, at = step * lanes;
        const Vector<T> u = load(t.u + at), dt = load(t.dt + at), dy = load(t.dy + at);
        Vector<T> du = load(t.du + at), ddt = load(t.ddt + at);
#pragma GCC unroll 4
        for (int k = 0; k < together; ++k) {
          const int64_t f = k * kChunk;
          const Vector<T> adjoint = carry[k] + dy * factor<T, mixed>(C + f, step);
          du = du + adjoint * factor<T, mixed>(B + f, step);
          dB[k][i] = (Vector<T>)((IntVector<T>)(adjoint * u) & used);
          dC[k][i] = (Vector<T>)((IntVector<T>)(dy * h[k]) & used);
          carry[k] = adjoint * load(w.a + k * kTile + at);
          h[k] = load(w.h + k * kStates + at);
          const Vector<T> through = carry[k] * h[k];
          total[k] = total[k] + through * dt;
          ddt = ddt + through * A_n[k];
        }
        store(t.du + at, du);
        store(t.ddt + at, ddt);
      }
#pragma GCC unroll 4
      for (int k = 0; k < together; ++k) {
        put_terms<mixed, first>(w.dB + k * kTile, s - kFolded, dB[k]);
        put_terms<mixed, first>(w.dC + k * kTile, s - kFolded, dC[k]);
      }
    }
    for (int k = 0; k < together; ++k) {
      store(g + k * lanes, carry[k]);
      store(dA + k * lanes, load(dA + k * lanes) + total[k]);
    }
  }

  template <bool mixed, bool first>
  static PROBJAX_INLINE void put_terms(T* terms, int64_t step, Vector<T> (&of_steps)[kFolded]) {
    if constexpr (mixed) {
#pragma GCC unroll 4
      for (int i = 0; i < kFolded; ++i) store(terms + (step + i) * lanes, of_steps[i]);
    } else {
      const Vector<T> folded = sums<1>(of_steps);
      T* to = terms + step / kFolded * lanes;
      store(to, first ? folded : load(to) + folded);
    }
  }

  // Sum of [step][lane] over the steps.
  static Vector<T> over_time(const T* terms, int64_t count) {
    Vector<T> total[2] = {};
    for (int64_t s = 0; s < count; ++s) total[s & 1] = total[s & 1] + load(terms + s * lanes);
    return total[0] + total[1];
  }

  // Adds the terms of one n to the rows of a block of one group.
  PROBJAX_NOINLINE void add_shared(const Factor& f, Chunk c, int64_t n, bool fresh, const T* terms) const {
    if (!f.out) return;
    const bool add = f.n == 0 && n > 0;
    if (f.time == 0) {
      T* row = f.rows + (f.n ? n : 0);
      const T more = sum<T>(over_time(terms, (c.steps + kFolded - 1) / kFolded));
      *row = fresh && !add ? more : *row + more;
      return;
    }
    T* row = f.rows + (f.n ? n * kChunk : 0);
    for (int64_t s = 0; s < c.steps; s += lanes) {
      Vector<T> v[lanes / kFolded];
#pragma GCC unroll 16
      for (int i = 0; i < lanes / kFolded; ++i) v[i] = load(terms + (s / kFolded + i) * lanes);
      Vector<T> total = sums<kFolded>(v);
      store(row + s, add ? load(row + s) + total : total);
    }
  }

  // The rows of a chunk into the gradient; those that are sums over time so far, again and again.
  PROBJAX_NOINLINE void write_rows(const Factor& f, const Item& item, Chunk c) const {
    if (!f.out) return;
    const int64_t group = item.channel / (p_.D / f.groups);
    T* out = f.out + slot(f, item, group) * f.slot + group * f.group;
    const int64_t columns = f.n ? p_.N : 1;
    if (f.time == 0) {
      std::copy(f.rows, f.rows + columns, out);
    } else {
      scatter(f.rows, kChunk, c.steps, columns, out + this->time(c.first) * f.time, this->forwards(f.time));
    }
  }

  // Adds the terms [step][lane] of one n and tile to the gradient, group by group.
  PROBJAX_NOINLINE void add_mixed(const Factor& f, const Item& item, int64_t tile, Chunk c, int64_t n, bool fresh, const T* terms) const {
    if (!f.out) return;
    const int64_t size = p_.D / f.groups;
    const int width = int(this->count(item, tile));
    Vector<T> total{};
    if (f.time == 0) total = over_time(terms, c.steps);
    for (int lane = 0; lane < width;) {
      const int64_t channel = item.channel + tile * lanes + lane, group = channel / size;
      const int end = int(std::min<int64_t>(width, lane + (group + 1) * size - channel));
      // The first to reach this place of the gradient sets it.
      const bool add = (tile > 0 && lane == 0 && channel > group * size) || (f.n == 0 && n > 0);
      T* out = f.out + slot(f, item, group) * f.slot + group * f.group + n * f.n;
      if (f.time == 0) {
        T more = 0;
        for (int i = lane; i < end; ++i) more += total[i];
        *out = fresh && !add ? more : *out + more;
      } else {
        out += this->time(c.first) * f.time;
        const int64_t step = this->forwards(f.time);
        for (int64_t s = 0; s < c.steps; ++s) {
          T more = 0;
          for (int i = lane; i < end; ++i) more += terms[s * lanes + i];
          out[s * step] = add ? out[s * step] + more : more;
        }
      }
      lane = end;
    }
  }

  int64_t slot(const Factor& f, const Item& item, int64_t group) const {
    return item.block - p_.block_of(group * (p_.D / f.groups));
  }

  // Slots that a group has no block for: the last of its blocks sets them to 0.
  PROBJAX_NOINLINE void clear_rest(const Factor& f, const Item& item) const {
    if (!f.out) return;
    const int64_t size = p_.D / f.groups;
    for (int64_t group = item.channel / size; group <= (item.channel + item.width - 1) / size; ++group) {
      if (p_.block_of((group + 1) * size - 1) != item.block) continue;
      for (int64_t i = slot(f, item, group) + 1; i < f.slots; ++i) {
        for (int64_t t = 0; t < (f.time ? p_.L : 1); ++t) {
          T* out = f.out + i * f.slot + t * f.time + group * f.group;
          std::fill(out, out + (f.n ? p_.N : 1), T(0));
        }
      }
    }
  }
};

}  // namespace probjax::PROBJAX_ISA::recurrence
