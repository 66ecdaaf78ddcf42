// The kernels as XLA custom calls. The arguments are those of probjax.attention.native: all operands, then what the
// pass adds; attributes describe the call.
#include <cstring>
#include <string>

#include "attention/kernels.h"
#include "common/pool.h"
#include "xla/ffi/api/ffi.h"

namespace probjax {
namespace {

namespace ffi = xla::ffi;
using Integers = ffi::Span<const int64_t>;

// What an operand's axes after the batch axes are.
enum class Axes { query, key, lse, per_batch, per_head, per_query, per_key, scores, distances, words, whole };

ffi::Error bad(const std::string& what) { return ffi::Error::InvalidArgument("probjax attention: " + what); }

bool type_of(ffi::DataType from, Type* to) {
  switch (from) {
    case ffi::DataType::F32: *to = Type::f32; return true;
    case ffi::DataType::F64: *to = Type::f64; return true;
    case ffi::DataType::BF16: *to = Type::bf16; return true;
    case ffi::DataType::F16: *to = Type::f16; return true;
    case ffi::DataType::PRED: *to = Type::boolean; return true;
    case ffi::DataType::U8: *to = Type::boolean; return true;
    case ffi::DataType::S32: *to = Type::s32; return true;
    case ffi::DataType::U32: *to = Type::s32; return true;
    case ffi::DataType::S64: *to = Type::s64; return true;
    default: return false;
  }
}

// Builds a Problem from the buffers of one call.
class Builder {
 public:
  Problem p;

  ffi::Error begin(const ffi::RemainingArgs& args, int64_t batch_rank, int64_t operand_count, double scale,
                   Integers mask, Integers score, int64_t sinks, Integers dropout, double dropout_scale) {
    for (size_t i = 0; i < args.size(); ++i) buffers_.push_back(args.get<ffi::AnyBuffer>(i).value());
    if (batch_rank > kMaxBatchRank) return bad("too many batch axes");
    if (operand_count < 3 || size_t(operand_count) > buffers_.size()) return bad("operands are missing");
    if (mask.size() % 5 || score.size() % 3) return bad("a program is cut off");
    if (!fits_stack(mask)) return bad("the mask program does not fit its stack");
    p.batch_rank = int(batch_rank);
    p.scale = scale;
    p.sinks = sinks;
    for (int64_t i = 0; i < operand_count; ++i) {
      auto dims = buffers_[size_t(i)].dimensions();
      for (int64_t a = 0; a < batch_rank && size_t(a) < dims.size() && !is_whole(i, mask); ++a) {
        p.batch_shape[size_t(a)] = std::max(p.batch_shape[size_t(a)], dims[size_t(a)]);
      }
    }
    for (int64_t a = 0; a < batch_rank; ++a) p.batch *= p.batch_shape[size_t(a)];
    auto q = tail(0), k = tail(1), v = tail(2);
    if (q.size() != 3 || k.size() != 3 || v.size() != 3) return bad("query, key and value have three axes after the batch");
    p.T = q[0], p.N = q[1], p.D = q[2], p.S = k[0], p.K = k[1], p.V = v[2];

    axes_.assign(size_t(operand_count), Axes::query);
    axes_[1] = axes_[2] = Axes::key;
    for (size_t i = 0; i < mask.size(); i += 5) add_mask({MaskOp(mask[i]), mask[i + 1], mask[i + 2], mask[i + 3], mask[i + 4]});
    for (size_t i = 0; i < score.size(); i += 3) {
      double constant;
      std::memcpy(&constant, &score[i + 2], sizeof(constant));
      add_score({ScoreOp(score[i]), score[i + 1], constant});
    }
    if (sinks >= 0) axes_[size_t(sinks)] = Axes::per_head;
    if (dropout.size() == 5) {
      p.dropout = dropout[0];
      p.batch_index = dropout[1];
      p.head_index = dropout[2];
      p.dropout_threshold = uint32_t(dropout[3]);
      p.dropout_all = dropout[4] != 0;
      p.dropout_scale = dropout_scale;
      axes_[size_t(p.dropout)] = Axes::words;
      axes_[size_t(p.batch_index)] = Axes::per_batch;
      axes_[size_t(p.head_index)] = Axes::per_head;
    }
    for (size_t i = 0; i < axes_.size(); ++i) p.operands.push_back(array(buffers_[i], axes_[i]));
    p.moves.resize(axes_.size());
    p.gradients.resize(axes_.size());
    next_ = axes_.size();
    return unsupported_ ? bad("a dtype is not supported") : ffi::Error::Success();
  }

  bool take(Axes axes, Array* out) {
    if (next_ >= buffers_.size()) return false;
    *out = array(buffers_[next_++], axes);
    return true;
  }

  Axes axes_of(int64_t operand) const { return axes_[size_t(operand)]; }
  bool has(int64_t operand) const { return operand >= 0 && size_t(operand) < axes_.size(); }
  bool unsupported() const { return unsupported_; }

  Array array(const ffi::AnyBuffer& buffer, Axes axes) {
    Array out;
    out.data = buffer.untyped_data();
    if (!type_of(buffer.element_type(), &out.type)) unsupported_ = true;
    auto dims = buffer.dimensions();
    std::vector<int64_t> strides(dims.size(), 0);
    int64_t stride = 1;
    for (size_t i = dims.size(); i-- > 0;) {
      strides[i] = dims[i] == 1 ? 0 : stride;
      stride *= dims[i];
    }
    if (axes == Axes::whole) return out;
    for (int i = 0; i < p.batch_rank; ++i) out.batch[size_t(i)] = strides[size_t(i)];
    size_t at = size_t(p.batch_rank);
    // Rows of one number have a stride too: a size of 1 is then the full size.
    for (size_t i = 0; at + i < dims.size() && i < 3; ++i) out.axis[i] = strides[at + i];
    bool by_head = axes == Axes::per_head || axes == Axes::scores || axes == Axes::distances;
    if (by_head) out.heads = dims[at];
    return out;
  }

 private:
  static bool is_whole(int64_t operand, Integers mask) {
    for (size_t i = 0; i < mask.size(); i += 5) {
      if (MaskOp(mask[i]) == MaskOp::table && (mask[i + 1] == operand || mask[i + 2] == operand)) return true;
    }
    return false;
  }

  static bool fits_stack(Integers mask) {
    int height = 0;
    for (size_t i = 0; i < mask.size(); i += 5) {
      MaskOp op = MaskOp(mask[i]);
      if (op == MaskOp::all_of || op == MaskOp::any_of) --height;
      else if (op != MaskOp::none_of) ++height;
      if (height < 1 || height > kMaskDepth) return false;
    }
    return mask.size() == 0 || height == 1;
  }

  std::vector<int64_t> tail(size_t i) const {
    auto dims = buffers_[i].dimensions();
    return {dims.begin() + p.batch_rank, dims.end()};
  }

  void add_mask(MaskStep step) {
    p.mask.push_back(step);
    switch (step.op) {
      case MaskOp::prefix:
      case MaskOp::key_lengths:
      case MaskOp::query_lengths: axes_[size_t(step.a)] = Axes::per_batch; break;
      case MaskOp::segments:
        axes_[size_t(step.a)] = Axes::per_query;
        axes_[size_t(step.b)] = Axes::per_key;
        break;
      case MaskOp::dense: axes_[size_t(step.a)] = Axes::scores; break;
      case MaskOp::table: axes_[size_t(step.a)] = axes_[size_t(step.b)] = Axes::whole; break;
      default: break;
    }
  }

  void add_score(ScoreStep step) {
    p.score.push_back(step);
    if (step.a < 0) return;
    Axes axes[] = {Axes::scores, Axes::distances, Axes::per_head, Axes::per_batch};
    axes_[size_t(step.a)] = axes[int64_t(step.op)];
  }

  std::vector<ffi::AnyBuffer> buffers_;
  std::vector<Axes> axes_;
  size_t next_ = 0;
  bool unsupported_ = false;
};

Array result(Builder& builder, const ffi::RemainingRets& rets, size_t i, Axes axes) {
  return builder.array(*rets.get<ffi::AnyBuffer>(i).value(), axes);
}

ffi::Error Forward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch_rank,
                   int64_t operand_count, double scale, Integers mask, Integers score, int64_t sinks,
                   Integers dropout, double dropout_scale) {
  Builder b;
  if (auto error = b.begin(args, batch_rank, operand_count, scale, mask, score, sinks, dropout, dropout_scale);
      error.failure()) {
    return error;
  }
  if (rets.size() != 2) return bad("forward has two results");
  b.p.out = result(b, rets, 0, Axes::query);
  b.p.lse = result(b, rets, 1, Axes::lse);
  Pool executor(pool);
  kernels().forward(b.p, executor);
  return ffi::Error::Success();
}

ffi::Error Tangent(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch_rank,
                   int64_t operand_count, double scale, Integers mask, Integers score, int64_t sinks,
                   Integers dropout, double dropout_scale, Integers active) {
  Builder b;
  if (auto error = b.begin(args, batch_rank, operand_count, scale, mask, score, sinks, dropout, dropout_scale);
      error.failure()) {
    return error;
  }
  if (rets.size() != 2) return bad("tangent has two results");
  bool complete = b.take(Axes::query, &b.p.out) && b.take(Axes::lse, &b.p.lse);
  for (int64_t i : active) complete = complete && b.has(i) && b.take(b.axes_of(i), &b.p.moves[size_t(i)]);
  if (!complete) return bad("tangents are missing");
  b.p.out_move = result(b, rets, 0, Axes::query);
  b.p.lse_move = result(b, rets, 1, Axes::lse);
  if (b.unsupported()) return bad("a dtype is not supported");
  Pool executor(pool);
  kernels().tangent(b.p, executor);
  return ffi::Error::Success();
}

ffi::Error Backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch_rank,
                    int64_t operand_count, double scale, Integers mask, Integers score, int64_t sinks,
                    Integers dropout, double dropout_scale, int64_t cotangents, Integers wanted, int64_t key_chunk) {
  Builder b;
  if (auto error = b.begin(args, batch_rank, operand_count, scale, mask, score, sinks, dropout, dropout_scale);
      error.failure()) {
    return error;
  }
  bool complete = b.take(Axes::query, &b.p.out) && b.take(Axes::lse, &b.p.lse);
  if (cotangents & 1) complete = complete && b.take(Axes::query, &b.p.out_cotangent);
  if (cotangents & 2) complete = complete && b.take(Axes::lse, &b.p.lse_cotangent);
  if (!complete || rets.size() < wanted.size() || key_chunk < 1) return bad("arguments of backward are missing");
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!b.has(wanted[i])) return bad("there is no such operand");
    b.p.gradients[size_t(wanted[i])] = result(b, rets, i, b.axes_of(wanted[i]));
  }
  b.p.key_chunk = key_chunk;
  if (rets.size() > wanted.size()) b.p.workspace = rets.get<ffi::AnyBuffer>(wanted.size()).value()->untyped_data();
  if (b.unsupported()) return bad("a dtype is not supported");
  Pool executor(pool);
  kernels().backward(b.p, executor);
  return ffi::Error::Success();
}

auto Common() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("batch_rank")
      .Attr<int64_t>("operand_count")
      .Attr<double>("scale")
      .Attr<Integers>("mask")
      .Attr<Integers>("score")
      .Attr<int64_t>("sinks")
      .Attr<Integers>("dropout")
      .Attr<double>("dropout_scale");
}

}  // namespace
}  // namespace probjax

#define PROBJAX_EXPORT __attribute__((visibility("default")))

extern "C" {

// The version of what Python and this library agree on.
PROBJAX_EXPORT int probjax_abi() { return 2; }
PROBJAX_EXPORT const char* probjax_isa() { return probjax::kernels().name; }
}

// The library hides its symbols but for what Python looks up.
#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbjaxAttentionForward, probjax::Forward, probjax::Common());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbjaxAttentionTangent, probjax::Tangent, probjax::Common().Attr<probjax::Integers>("active"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbjaxAttentionBackward, probjax::Backward,
                              probjax::Common()
                                  .Attr<int64_t>("cotangents")
                                  .Attr<probjax::Integers>("wanted")
                                  .Attr<int64_t>("key_chunk"));
#pragma GCC visibility pop
