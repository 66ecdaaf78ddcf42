// selective_scan, forward and tangent: channels in the lanes. The state of one n stays in registers for a chunk of steps.
//
// What a tile of channels (one vector of them) has at the steps of a chunk is copied into [step][lane], in the order of
// processing: there the direction of time, strides, broadcasting and tiles that are not full are dealt with, once
// for all n.
#pragma once

#include "recurrence/linear_scan.h"

namespace probjax::PROBJAX_ISA::recurrence {

// States that are worked on together. They share what is read, and hide each other's latency.
constexpr int kTogether = 2;

// 2**y, all of it: 0 for -inf, infinity beyond the range; exactly 1 at 0.
template <class T>
PROBJAX_INLINE Vector<T> decay(Vector<T> y) {
#if defined(__AVX512F__)
  // y = f + n with n the nearest integer. Infinities go through n: f is 0 there.
  if constexpr (sizeof(T) == 4) {
    Vector<T> f = _mm512_maskz_reduce_ps(__mmask16(-1), y, 8);
    return _mm512_maskz_scalef_ps(__mmask16(-1), polynomial<T>(Coefficients<T>::kExp2, f), y - f);
  } else {
    Vector<T> f = _mm512_maskz_reduce_pd(__mmask8(-1), y, 8);
    return _mm512_maskz_scalef_pd(__mmask8(-1), polynomial<T>(Coefficients<T>::kExp2, f), y - f);
  }
#else
  return exp2<T, false>(y);
#endif
}

// Steps that a chunk is padded to a multiple of, with steps that leave the state as it is.
constexpr int kStepsUnit = 4;

// The sums over the lanes of as many vectors as there are lanes, as one vector; `v` is overwritten. Round by round,
// vectors are added in pairs, and the lane's next bit tells which of the two a partial sum belongs to. From round
// `step` on there are lanes / step vectors left, and of fewer than those the last rounds are missing.
template <int step, class V, int count>
PROBJAX_INLINE V sums(V (&v)[count]) {
  if constexpr (count > 1) {
    constexpr int lanes = sizeof(V) / sizeof(v[0][0]);
    V next[count / 2];
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; ++i) {
      exchange<step>(v[2 * i], v[2 * i + 1], std::make_index_sequence<lanes>());
      next[i] = v[2 * i] + v[2 * i + 1];
    }
    return sums<2 * step>(next);
  } else {
    return v[0];
  }
}

// out[j * out_step + i] = in[i * row + j * column] for i < rows, j < columns.
template <class T>
void gather(const T* in, int64_t row, int64_t column, int64_t rows, int64_t columns, T* out, int64_t out_step) {
  constexpr int lanes = kLanes<T>;
  const int64_t whole_rows = column == 1 ? rows / lanes * lanes : 0, whole_columns = columns / lanes * lanes;
  for (int64_t i = 0; i < whole_rows; i += lanes) {
    for (int64_t j = 0; j < whole_columns; j += lanes) {
      Vector<T> block[lanes];
#pragma GCC unroll 16
      for (int k = 0; k < lanes; ++k) block[k] = load(in + (i + k) * row + j);
      transpose(block);
#pragma GCC unroll 16
      for (int k = 0; k < lanes; ++k) store(out + (j + k) * out_step + i, block[k]);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) {
      out[j * out_step + i] = in[i * row + j * column];
    }
  }
}

// out[i * row + j] = in[j * in_step + i] for i < rows, j < columns.
template <class T>
void scatter(const T* in, int64_t in_step, int64_t rows, int64_t columns, T* out, int64_t row) {
  constexpr int lanes = kLanes<T>;
  const int64_t whole_rows = rows / lanes * lanes, whole_columns = columns / lanes * lanes;
  for (int64_t i = 0; i < whole_rows; i += lanes) {
    for (int64_t j = 0; j < whole_columns; j += lanes) {
      Vector<T> block[lanes];
#pragma GCC unroll 16
      for (int k = 0; k < lanes; ++k) block[k] = load(in + (j + k) * in_step + i);
      transpose(block);
#pragma GCC unroll 16
      for (int k = 0; k < lanes; ++k) store(out + (i + k) * row + j, block[k]);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) out[i * row + j] = in[j * in_step + i];
  }
}

// An item of work: a block of channels of a batch entry, in tiles of one vector.
struct Item {
  int64_t entry, block, channel, width, tiles;
};

// The steps of one chunk: the first of them, and how many.
struct Chunk {
  int64_t first, steps;
};

// What the three passes share.
template <class T>
class SelectivePass {
 public:
  static constexpr int lanes = kLanes<T>;
  static constexpr int64_t kTile = kChunk * lanes;  // numbers of a tile in a chunk

  SelectivePass(const SelectiveScan& problem, Executor& executor) : p_(problem), executor_(executor) {}

 protected:
  // `cost` in nanoseconds for a vector of states.
  void each(double cost, const std::function<void(const Item&)>& body) {
    const int64_t blocks = p_.blocks();
    double work = double(p_.batch.count) * double(p_.L) * double(p_.D) * double(p_.N) / lanes * cost;
    parallel_for(executor_, p_.batch.count * blocks, useful_threads(work), [&](int64_t number) {
      FlushDenormals flush;
      Item item;
      item.entry = number / blocks;
      item.block = number % blocks;
      int64_t within = item.block % p_.blocks_per_run() * p_.block;
      item.channel = item.block / p_.blocks_per_run() * p_.run + within;
      item.width = std::min(p_.block, p_.run - within);
      item.tiles = (item.width + lanes - 1) / lanes;
      body(item);
    });
  }

  // How many n are worked on together, from n on.
  int together(int64_t n) const { return !p_.mixed && p_.N - n >= kTogether ? kTogether : 1; }

  int64_t chunks() const { return (p_.L + kChunk - 1) / kChunk; }
  Chunk chunk(int64_t m) const { return {m * kChunk, std::min(kChunk, p_.L - m * kChunk)}; }
  static int64_t padded_steps(Chunk c) { return round_up(c.steps, kStepsUnit); }
  int64_t time(int64_t step) const { return p_.reverse ? p_.L - 1 - step : step; }
  int64_t forwards(int64_t stride) const { return p_.reverse ? -stride : stride; }

  static int64_t count(const Item& item, int64_t tile) {
    return std::min<int64_t>(lanes, item.width - tile * lanes);
  }

  template <class U = T>
  const U* entry(const Array& x, const Item& item) const {
    return static_cast<const U*>(x.data) + p_.batch.offset(x, item.entry);
  }

  T* result(const Array& x, const Item& item) const {
    return x ? static_cast<T*>(x.data) + p_.batch.offset(x, item.entry) : nullptr;
  }

  // [(D, N)], from number `skip` on, as [tile][n][lane]; idle lanes get 0.
  PROBJAX_NOINLINE void read_states(const Array& x, const Item& item, T* out, int64_t skip = 0) const {
    const T* in = entry(x, item) + skip + item.channel * x.axis[0];
    for (int64_t tile = 0; tile < item.tiles; ++tile, out += p_.N * lanes) {
      if (count(item, tile) < lanes) std::fill(out, out + p_.N * lanes, T(0));
      gather(in + tile * lanes * x.axis[0], x.axis[0], x.axis[1], count(item, tile), p_.N, out, lanes);
    }
  }

  // The reverse, into a dense array, that begins for this batch entry at `out`.
  PROBJAX_NOINLINE void write_states(const T* in, const Item& item, T* out) const {
    for (int64_t tile = 0; tile < item.tiles; ++tile, in += p_.N * lanes) {
      scatter(in, lanes, count(item, tile), p_.N, out + (item.channel + tile * lanes) * p_.N, p_.N);
    }
  }

  // [(L, D)] as [step][lane].
  PROBJAX_NOINLINE void read_tile(const Array& x, const Item& item, int64_t tile, Chunk c, T* out) const {
    const T* in = entry(x, item) + time(c.first) * x.axis[0] + (item.channel + tile * lanes) * x.axis[1];
    const int64_t step = forwards(x.axis[0]), lane = x.axis[1];
    const int width = int(count(item, tile));
    for (int64_t s = 0; s < c.steps; ++s, in += step, out += lanes) {
      if (width == lanes && lane == 1) {
        store(out, load(in));
      } else {
        for (int i = 0; i < lanes; ++i) out[i] = i < width ? in[i * lane] : T(0);
      }
    }
    std::fill(out, out + (padded_steps(c) - c.steps) * lanes, T(0));
  }

  // The reverse, into a dense array of this batch entry, times `factor`.
  PROBJAX_NOINLINE void write_tile(const T* in, const Item& item, int64_t tile, Chunk c, T* out, T factor = 1) const {
    out += time(c.first) * p_.D + item.channel + tile * lanes;
    const int64_t step = forwards(p_.D);
    const int width = int(count(item, tile));
    for (int64_t s = 0; s < c.steps; ++s, in += lanes, out += step) {
      Vector<T> x = load(in) * factor;
      if (width == lanes) {
        store(out, x);
      } else {
        for (int i = 0; i < width; ++i) out[i] = x[i];
      }
    }
  }

  // What is added to the exponent of each step.
  PROBJAX_NOINLINE void read_resets(const Item& item, Chunk c, T* cut) const {
    if (!p_.reset) {
      std::fill(cut, cut + kChunk, T(0));
      return;
    }
    const uint8_t* in = entry<uint8_t>(p_.reset, item);
    std::fill(cut, cut + kChunk, T(0));
    for (int64_t s = 0; s < c.steps; ++s) cut[s] = in[time(c.first + s) * p_.reset.axis[0]] ? -kInfinity<T> : T(0);
  }

  // [(L, groups, N)] of the group of all these channels as [n][step].
  PROBJAX_NOINLINE void read_shared(const Array& x, int64_t groups, const Item& item, Chunk c, T* out) const {
    int64_t group = item.channel / (p_.D / groups);
    const T* in = entry(x, item) + time(c.first) * x.axis[0] + group * x.axis[1];
    gather(in, forwards(x.axis[0]), x.axis[2], c.steps, p_.N, out, kChunk);
    for (int64_t s = c.steps; s < padded_steps(c); ++s) {
      for (int64_t n = 0; n < p_.N; ++n) out[n * kChunk + s] = 0;
    }
  }

  // [(L, groups, N)] at one n as [step][lane], where channels of a tile have groups of their own.
  PROBJAX_NOINLINE void read_mixed(const Array& x, int64_t groups, const Item& item, int64_t tile, Chunk c, int64_t n, T* out) const {
    const T* in = entry(x, item) + time(c.first) * x.axis[0] + n * x.axis[2];
    const int width = int(count(item, tile));
    int64_t group[lanes] = {};
    for (int i = 0; i < width; ++i) group[i] = (item.channel + tile * lanes + i) / (p_.D / groups) * x.axis[1];
    const int64_t step = forwards(x.axis[0]);
    for (int64_t s = 0; s < c.steps; ++s, in += step) {
      for (int i = 0; i < lanes; ++i) out[s * lanes + i] = in[group[i]];
    }
    std::fill(out + c.steps * lanes, out + padded_steps(c) * lanes, T(0));
  }

  const SelectiveScan& p_;
  Executor& executor_;
};

// A factor of B or C at a step: of [step][lane], or one number of [step] for all lanes.
template <class T, bool mixed>
PROBJAX_INLINE Vector<T> factor(const T* x, int64_t step) {
  if constexpr (mixed) {
    return load(x + step * kLanes<T>);
  } else {
    return broadcast<T>(x[step]);
  }
}

template <class T>
class SelectiveForward : public SelectivePass<T> {
 public:
  using SelectivePass<T>::SelectivePass;

  void run() {
    this->each(4, [this](const Item& item) { walk(item); });
  }

 private:
  using SelectivePass<T>::p_;
  using SelectivePass<T>::lanes;
  using SelectivePass<T>::kTile;

  void walk(const Item& item) const {
    const bool mixed = p_.mixed;
    const int64_t states = item.tiles * p_.N * lanes, factors = mixed ? kTile : p_.N * kChunk;
    Scratch scratch(2 * Scratch::need<T>(states) + 2 * Scratch::need<T>(factors) + 3 * Scratch::need<T>(kTile) +
                    Scratch::need<T>(kChunk));
    T *A = scratch.take<T>(states), *h = scratch.take<T>(states);
    T *B = scratch.take<T>(factors), *C = scratch.take<T>(factors), *cut = scratch.take<T>(kChunk);
    T *u = scratch.take<T>(kTile), *dt = scratch.take<T>(kTile), *y = scratch.take<T>(kTile);
    this->read_states(p_.x.A, item, A);
    for (int64_t i = 0; i < states; ++i) A[i] *= kLog2E<T>;
    this->read_states(p_.x.initial, item, h);
    T *starts = this->result(p_.starts, item), *out = this->result(p_.y, item);
    for (int64_t m = 0; m < this->chunks(); ++m) {
      const Chunk c = this->chunk(m);
      if (starts) this->write_states(h, item, starts + m * p_.D * p_.N);
      this->read_resets(item, c, cut);
      if (!mixed) {
        this->read_shared(p_.x.B, p_.B_groups, item, c, B);
        this->read_shared(p_.x.C, p_.C_groups, item, c, C);
      }
      for (int64_t tile = 0; tile < item.tiles; ++tile) {
        this->read_tile(p_.x.u, item, tile, c, u);
        this->read_tile(p_.x.dt, item, tile, c, dt);
        std::fill(y, y + kTile, T(0));
        const T* At = A + tile * p_.N * lanes;
        T* ht = h + tile * p_.N * lanes;
        for (int64_t n = 0; n < p_.N;) {
          const int together = this->together(n);
          if (mixed) {
            this->read_mixed(p_.x.B, p_.B_groups, item, tile, c, n, B);
            this->read_mixed(p_.x.C, p_.C_groups, item, tile, c, n, C);
          }
          const int64_t at = mixed ? 0 : n * kChunk;
          auto run = mixed ? steps<1, true> : together == 1 ? steps<1, false> : steps<kTogether, false>;
          run(c.steps, At + n * lanes, B + at, C + at, cut, u, dt, ht + n * lanes, y);
          n += together;
        }
        this->write_tile(y, item, tile, c, out);
      }
    }
    this->write_states(h, item, this->result(p_.last, item));
  }

  template <int together, bool mixed>
  static PROBJAX_NOINLINE void steps(int64_t count, const T* A, const T* B, const T* C, const T* cut, const T* u,
                                              const T* dt, T* state, T* y) {
    Vector<T> a[together], h[together];
    for (int k = 0; k < together; ++k) {
      a[k] = load(A + k * lanes);
      h[k] = load(state + k * lanes);
    }
    for (int64_t s = 0; s < count; ++s) {
      const Vector<T> ut = load(u + s * lanes), dtt = load(dt + s * lanes);
      Vector<T> sum = load(y + s * lanes);
#pragma GCC unroll 4
      for (int k = 0; k < together; ++k) {
        const int64_t at = k * kChunk;
        h[k] = decay<T>(dtt * a[k] + cut[s]) * h[k] + ut * factor<T, mixed>(B + at, s);
        sum = sum + h[k] * factor<T, mixed>(C + at, s);
      }
      store(y + s * lanes, sum);
    }
    for (int k = 0; k < together; ++k) store(state + k * lanes, h[k]);
  }
};

// The states of the operands and their tangents side by side.
template <class T>
class SelectiveTangent : public SelectivePass<T> {
 public:
  using SelectivePass<T>::SelectivePass;

  void run() {
    this->each(6, [this](const Item& item) { walk(item); });
  }

 private:
  using SelectivePass<T>::p_;
  using SelectivePass<T>::lanes;
  using SelectivePass<T>::kTile;

  // Of the operands and of their tangents.
  struct Pair {
    T *x, *move;

    Pair(Scratch& scratch, int64_t count) : x(scratch.take<T>(count)), move(scratch.take<T>(count)) {}
    Pair(T* x, T* move) : x(x), move(move) {}
    Pair operator+(int64_t i) const { return {x + i, move + i}; }
  };

  void walk(const Item& item) const {
    const bool mixed = p_.mixed;
    const int64_t states = item.tiles * p_.N * lanes, factors = mixed ? kTile : p_.N * kChunk;
    Scratch scratch(4 * Scratch::need<T>(states) + 4 * Scratch::need<T>(factors) + 5 * Scratch::need<T>(kTile) +
                    Scratch::need<T>(kChunk));
    Pair A(scratch, states), h(scratch, states), B(scratch, factors), C(scratch, factors), u(scratch, kTile),
        dt(scratch, kTile);
    T *y = scratch.take<T>(kTile), *cut = scratch.take<T>(kChunk);
    this->read_states(p_.x.A, item, A.x);
    this->read_states(p_.moves.A, item, A.move);
    this->read_states(p_.x.initial, item, h.x);
    this->read_states(p_.moves.initial, item, h.move);
    T* out = this->result(p_.y, item);
    for (int64_t m = 0; m < this->chunks(); ++m) {
      const Chunk c = this->chunk(m);
      this->read_resets(item, c, cut);
      if (!mixed) {
        this->read_shared(p_.x.B, p_.B_groups, item, c, B.x);
        this->read_shared(p_.moves.B, p_.B_groups, item, c, B.move);
        this->read_shared(p_.x.C, p_.C_groups, item, c, C.x);
        this->read_shared(p_.moves.C, p_.C_groups, item, c, C.move);
      }
      for (int64_t tile = 0; tile < item.tiles; ++tile) {
        this->read_tile(p_.x.u, item, tile, c, u.x);
        this->read_tile(p_.moves.u, item, tile, c, u.move);
        this->read_tile(p_.x.dt, item, tile, c, dt.x);
        this->read_tile(p_.moves.dt, item, tile, c, dt.move);
        std::fill(y, y + kTile, T(0));
        for (int64_t n = 0; n < p_.N; ++n) {
          if (mixed) {
            this->read_mixed(p_.x.B, p_.B_groups, item, tile, c, n, B.x);
            this->read_mixed(p_.moves.B, p_.B_groups, item, tile, c, n, B.move);
            this->read_mixed(p_.x.C, p_.C_groups, item, tile, c, n, C.x);
            this->read_mixed(p_.moves.C, p_.C_groups, item, tile, c, n, C.move);
          }
          const int64_t state = (tile * p_.N + n) * lanes, at = mixed ? 0 : n * kChunk;
          (mixed ? steps<true> : steps<false>)(c.steps, A + state, B + at, C + at, cut, u, dt, h + state, y);
        }
        this->write_tile(y, item, tile, c, out);
      }
    }
    this->write_states(h.move, item, this->result(p_.last, item));
  }

  template <bool mixed>
  static PROBJAX_NOINLINE void steps(int64_t count, Pair A, Pair B, Pair C, const T* cut, Pair u, Pair dt, Pair state,
                                              T* y) {
    const Vector<T> A_x = load(A.x), A_move = load(A.move), scaled = A_x * kLog2E<T>;
    Vector<T> h = load(state.x), h_move = load(state.move);
    for (int64_t s = 0; s < count; ++s) {
      const int64_t at = s * lanes;
      const Vector<T> b = factor<T, mixed>(B.x, s), b_move = factor<T, mixed>(B.move, s);
      const Vector<T> c = factor<T, mixed>(C.x, s), c_move = factor<T, mixed>(C.move, s);
      const Vector<T> a = decay<T>(load(dt.x + at) * scaled + cut[s]);
      const Vector<T> moved = load(dt.move + at) * A_x + load(dt.x + at) * A_move;
      h_move = a * (moved * h + h_move) + (load(u.move + at) * b + load(u.x + at) * b_move);
      h = a * h + load(u.x + at) * b;
      store(y + at, load(y + at) + (c_move * h + c * h_move));
    }
    store(state.x, h);
    store(state.move, h_move);
  }
};

}  // namespace probjax::PROBJAX_ISA::recurrence
