// The score program: biases, factors and soft caps of one tile, their tangents and their gradients.
//
// A tile is [count][stride] with count <= kKeys keys and the lanes of one panel from column 0 on.
#pragma once

#include <vector>

#include "attention/mask.h"

namespace probjax::PROBJAX_ISA {

template <class T>
using TileOf = T[kKeys * kPanel<T>];

// Calls visit(k, j) for every vector of a tile.
template <class T, class Visit>
PROBJAX_INLINE void each_vector(int64_t count, int width, const Visit& visit) {
  for (int64_t k = 0; k < count; ++k) {
    for (int j = 0; j < width; j += kLanes<T>) visit(k, j);
  }
}

// a * b, and 0 where a is 0 whatever b is: what is hidden has derivative 0 even where its score is NaN.
template <class T>
PROBJAX_INLINE Vector<T> times(Vector<T> a, Vector<T> b) {
  return a == 0 ? Vector<T>{} : a * b;
}

// Where the gradient of one step goes, for one batch entry and head at a time.
template <class T>
struct StepGradient {
  enum class Kind {
    none,
    scalar,       // one number
    by_key,       // [S]
    by_query,     // [T]
    by_distance,  // [T + S - 1]
    written,      // the array itself: each of its numbers belongs to one tile
    rows,         // [kPanel][S]: sums for the rows of one panel
  };
  Kind kind = Kind::none;
  double* scalar = nullptr;
  T* sums = nullptr;
  const Array* array = nullptr;
};

template <class T>
class ScoreOf {
 public:
  ScoreOf(const Problem& p, const Entry& entry) : p_(p), entry_(entry) {}

  bool exists() const { return !p_.score.empty(); }

  // Whether a score may become minus infinity, which hides the pair.
  bool may_hide() const {
    for (const ScoreStep& step : p_.score) {
      if (step.op == ScoreOp::add_dense || step.op == ScoreOp::add_diagonal) return true;
    }
    return false;
  }

  // Applies all steps. `saved`, if given, receives the input of each step: one tile [count][kPanel] per step.
  void apply(const Panel<T>& panel, int64_t first, int64_t count, T* s, int64_t stride, T* saved) const {
    int width = panel.width();
    for (const ScoreStep& step : p_.score) {
      if (saved) {
        each_vector<T>(count, width, [&](int64_t k, int j) {
          store(saved + k * kPanel<T> + j, load(s + k * stride + j));
        });
        saved += kKeys * kPanel<T>;
      }
      if (step.op == ScoreOp::multiply) {
        T factor[kPanel<T>];
        per_head(p_.operands[size_t(step.a)], panel, factor);
        each_vector<T>(count, width, [&](int64_t k, int j) {
          store(s + k * stride + j, load(s + k * stride + j) * load(factor + j));
        });
      } else if (step.op == ScoreOp::soft_cap) {
        T cap = cap_of(step);
        each_vector<T>(count, width, [&](int64_t k, int j) {
          store(s + k * stride + j, tanh<T>(load(s + k * stride + j) / cap) * cap);
        });
      } else {
        add(step.op, p_.operands[size_t(step.a)], panel, first, count, s, stride);
      }
    }
  }

  // The same, with the derivative `ds` of the scores along the tangents of the operands (`p.moves`).
  void apply_moving(const Panel<T>& panel, int64_t first, int64_t count, T* s, T* ds, int64_t stride) const {
    int width = panel.width();
    for (const ScoreStep& step : p_.score) {
      const Array* move = step.a >= 0 && p_.moves[size_t(step.a)] ? &p_.moves[size_t(step.a)] : nullptr;
      if (step.op == ScoreOp::multiply) {
        T factor[kPanel<T>], change[kPanel<T>] = {};
        per_head(p_.operands[size_t(step.a)], panel, factor);
        if (move) per_head(*move, panel, change);
        each_vector<T>(count, width, [&](int64_t k, int j) {
          Vector<T> x = load(s + k * stride + j);
          store(ds + k * stride + j, load(ds + k * stride + j) * load(factor + j) + x * load(change + j));
          store(s + k * stride + j, x * load(factor + j));
        });
      } else if (step.op == ScoreOp::soft_cap) {
        T cap = cap_of(step), change = move ? widen_one<T>(move->data, move->type, entry_.offset(*move)) : T(0);
        each_vector<T>(count, width, [&](int64_t k, int j) {
          Vector<T> x = load(s + k * stride + j) / cap, t = tanh<T>(x), slope = 1 - t * t;
          Vector<T> moved = load(ds + k * stride + j) * slope;
          if (move) moved += change * (t - times<T>(slope, x));
          store(ds + k * stride + j, moved);
          store(s + k * stride + j, t * cap);
        });
      } else {
        add(step.op, p_.operands[size_t(step.a)], panel, first, count, s, stride);
        if (move) add(step.op, *move, panel, first, count, ds, stride);
      }
    }
  }

  // Turns derivatives by the final scores into derivatives by the first ones, and collects the gradients of the
  // steps. Lanes that are idle must hold 0.
  void pull(const Panel<T>& panel, int64_t first, int64_t count, T* ds, int64_t stride, const T* saved,
            const std::vector<StepGradient<T>>& gradients) const {
    int width = panel.width();
    for (size_t i = p_.score.size(); i-- > 0;) {
      const ScoreStep& step = p_.score[i];
      const StepGradient<T>& gradient = gradients[i];
      const T* input = saved + int64_t(i) * kKeys * kPanel<T>;
      if (step.op == ScoreOp::multiply) {
        T factor[kPanel<T>];
        per_head(p_.operands[size_t(step.a)], panel, factor);
        Vector<T> total{};
        each_vector<T>(count, width, [&](int64_t k, int j) {
          Vector<T> d = load(ds + k * stride + j);
          total += times<T>(d, load(input + k * kPanel<T> + j));
          store(ds + k * stride + j, times<T>(d, load(factor + j)));
        });
        if (gradient.scalar) *gradient.scalar += sum<T>(total);
      } else if (step.op == ScoreOp::soft_cap) {
        T cap = cap_of(step);
        Vector<T> total{};
        each_vector<T>(count, width, [&](int64_t k, int j) {
          Vector<T> d = load(ds + k * stride + j);
          Vector<T> x = load(input + k * kPanel<T> + j) / cap, t = tanh<T>(x), slope = 1 - t * t;
          total += times<T>(d, t - times<T>(slope, x));
          store(ds + k * stride + j, times<T>(d, slope));
        });
        if (gradient.scalar) *gradient.scalar += sum<T>(total);
      } else if (gradient.kind != StepGradient<T>::Kind::none) {
        collect(gradient, panel, first, count, ds, stride);
      }
    }
  }

 private:
  T cap_of(const ScoreStep& step) const {
    if (step.a < 0) return T(step.constant);
    const Array& x = p_.operands[size_t(step.a)];
    return widen_one<T>(x.data, x.type, entry_.offset(x));
  }

  void per_head(const Array& x, const Panel<T>& panel, T* out) const {
    int64_t offset = entry_.offset(x);
    for (int j = 0; j < kPanel<T>; ++j) {
      out[j] = widen_one<T>(x.data, x.type, offset + head_of(p_, x, panel.head[j]) * x.axis[0]);
    }
  }

  void add(ScoreOp op, const Array& x, const Panel<T>& panel, int64_t first, int64_t count, T* s,
           int64_t stride) const {
    if (op == ScoreOp::add_diagonal) {
      add_diagonal(x, panel, first, count, s, stride);
    } else {
      add_dense(x, panel, first, count, s, stride);
    }
  }

  void add_dense(const Array& x, const Panel<T>& panel, int64_t first, int64_t count, T* s, int64_t stride) const {
    int64_t base = entry_.offset(x);
    int width = panel.width();
    auto row = [&](int j) { return base + head_of(p_, x, panel.head[j]) * x.axis[0] + panel.query[j] * x.axis[1]; };
    if (x.axis[2] == 0) {
      T term[kPanel<T>];
      for (int j = 0; j < width; ++j) term[j] = widen_one<T>(x.data, x.type, row(j));
      each_vector<T>(count, width, [&](int64_t k, int j) {
        store(s + k * stride + j, load(s + k * stride + j) + load(term + j));
      });
    } else if (x.axis[1] == 0 && panel.run) {
      T term[kKeys];
      widen<T>(x.data, x.type, row(0) + first, count, term);
      each_vector<T>(count, width, [&](int64_t k, int j) {
        store(s + k * stride + j, load(s + k * stride + j) + term[k]);
      });
    } else {
      alignas(64) TileOf<T> rows;
      alignas(64) TileOf<T> terms;
      for (int j = 0; j < width; ++j) widen<T>(x.data, x.type, row(j) + first, count, rows + j * kKeys);
      transpose_block(rows, kKeys, width, round_up(count, kLanes<T>), terms, kPanel<T>);
      each_vector<T>(count, width, [&](int64_t k, int j) {
        store(s + k * stride + j, load(s + k * stride + j) + load(terms + k * kPanel<T> + j));
      });
    }
  }

  void add_diagonal(const Array& x, const Panel<T>& panel, int64_t first, int64_t count, T* s,
                    int64_t stride) const {
    int64_t base = entry_.offset(x);
    int width = panel.width();
    if (panel.run) {
      // In a run of queries the numbers of one key follow each other.
      T strip[kKeys + kPanel<T>] = {};
      int64_t start = base + head_of(p_, x, panel.head[0]) * x.axis[0] + p_.S - first - count + panel.first;
      widen<T>(x.data, x.type, start, count - 1 + panel.count, strip);
      each_vector<T>(count, width, [&](int64_t k, int j) {
        store(s + k * stride + j, load(s + k * stride + j) + load(strip + count - 1 - k + j));
      });
    } else {
      for (int64_t k = 0; k < count; ++k) {
        for (int j = 0; j < panel.count; ++j) {
          int64_t at = base + head_of(p_, x, panel.head[j]) * x.axis[0] + p_.S - 1 - first - k + panel.query[j];
          s[k * stride + j] += widen_one<T>(x.data, x.type, at);
        }
      }
    }
  }

  void collect(const StepGradient<T>& to, const Panel<T>& panel, int64_t first, int64_t count, const T* ds,
               int64_t stride) const {
    using Kind = typename StepGradient<T>::Kind;
    int width = panel.width();
    if (to.kind == Kind::scalar) {
      Vector<T> total{};
      each_vector<T>(count, width, [&](int64_t k, int j) { total += load(ds + k * stride + j); });
      *to.scalar += sum<T>(total);
    } else if (to.kind == Kind::by_key) {
      for (int64_t k = 0; k < count; ++k) {
        Vector<T> total = load(ds + k * stride);
        if (width > kLanes<T>) total += load(ds + k * stride + kLanes<T>);
        to.sums[first + k] += sum<T>(total);
      }
    } else if (to.kind == Kind::by_query) {
      for (int64_t k = 0; k < count; ++k) {
        for (int j = 0; j < panel.count; ++j) to.sums[panel.query[j]] += ds[k * stride + j];
      }
    } else if (to.kind == Kind::by_distance) {
      T strip[kKeys + kPanel<T>] = {};
      for (int64_t k = 0; k < count; ++k) {
        T* row = strip + count - 1 - k;
        for (int j = 0; j < width; j += kLanes<T>) store(row + j, load(row + j) + load(ds + k * stride + j));
      }
      T* sums = to.sums + p_.S - first - count + panel.first;
      for (int64_t i = 0; i < count - 1 + panel.count; ++i) sums[i] += strip[i];
    } else {
      alignas(64) TileOf<T> rows;
      transpose_block(ds, stride, count, width, rows, kKeys);
      for (int j = 0; j < panel.count; ++j) {
        if (to.kind == Kind::rows) {
          T* out = to.sums + j * p_.S + first;
          for (int64_t k = 0; k < count; ++k) out[k] += rows[j * kKeys + k];
        } else {
          const Array& x = *to.array;
          int64_t at = entry_.offset(x) + head_of(p_, x, panel.head[j]) * x.axis[0] +
                       panel.query[j] * x.axis[1] + first * x.axis[2];
          narrow<T>(rows + j * kKeys, count, x.data, x.type, at);
        }
      }
    }
  }

  const Problem& p_;
  const Entry& entry_;
};

// --------------------------------------------------------------------------------------------------------------
// Dropout: probjax.attention.dropout defines the hash.

template <class T>
class DropoutOf {
 public:
  DropoutOf(const Problem& p, const Entry& entry) : p_(p) {
    if (!exists()) return;
    const Array &words = p.operands[size_t(p.dropout)], &batch = p.operands[size_t(p.batch_index)];
    const uint32_t* word = static_cast<const uint32_t*>(words.data) + entry.offset(words);
    second_ = word[1];
    batch_ = mix(word[0] + uint32_t(integer_at(batch, entry.offset(batch))) * 0x9E3779B1u);
    heads_ = static_cast<const int32_t*>(p.operands[size_t(p.head_index)].data);
    heads_ += entry.offset(p.operands[size_t(p.head_index)]);
    head_stride_ = p.operands[size_t(p.head_index)].axis[0];
  }

  bool exists() const { return p_.dropout >= 0; }

  // Sets what is dropped of each given tile [count][stride] to 0.
  template <class... Tile>
  void drop(const Panel<T>& panel, int64_t first, int64_t count, int64_t stride, Tile*... tiles) const {
    uint32_t row[kPanel<T>];
    for (int j = 0; j < kPanel<T>; ++j) {
      uint32_t head = mix(batch_ + uint32_t(heads_[panel.head[j] * head_stride_]) * 0x85EBCA77u);
      row[j] = mix(head + uint32_t(panel.query[j]) * 0xC2B2AE3Du);
    }
    for (int64_t k = 0; k < count; ++k) {
      uint32_t key = uint32_t(first + k) * 0x27D4EB2Fu;
      for (int j = 0; j < kPanel<T>; ++j) {
        bool keep = mix(mix(row[j] + key) ^ second_ ^ row[j]) >= p_.dropout_threshold && !p_.dropout_all;
        ((tiles[k * stride + j] = keep ? tiles[k * stride + j] : T(0)), ...);
      }
    }
  }

 private:
  static PROBJAX_INLINE uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
  }

  const Problem& p_;
  uint32_t batch_ = 0, second_ = 0;
  const int32_t* heads_ = nullptr;
  int64_t head_stride_ = 0;
};

}  // namespace probjax::PROBJAX_ISA
