// The recurrences as XLA custom calls. The arguments are those of probjax.recurrence.native: operands, then what the
// pass adds; attributes describe the call. All five have the same attributes: each signature more is 8 KB more.
#include <array>
#include <string>
#include <vector>

#include "attention/kernels.h"
#include "common/pool.h"
#include "recurrence/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace probjax {
namespace {

namespace ffi = xla::ffi;
using Integers = ffi::Span<const int64_t>;
using recurrence::Array;
using recurrence::LinearScan;
using recurrence::SelectiveScan;

ffi::Error bad(const std::string& what) { return ffi::Error::InvalidArgument("probjax recurrence: " + what); }

// The buffers of one call.
class Buffers {
 public:
  Buffers(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, int64_t batch_rank)
      : rank_(size_t(batch_rank)) {
    for (size_t i = 0; i < args.size(); ++i) args_.push_back(args.get<ffi::AnyBuffer>(i).value());
    for (size_t i = 0; i < rets.size(); ++i) rets_.push_back(*rets.get<ffi::AnyBuffer>(i).value());
  }

  bool are(size_t args, size_t rets) const { return args_.size() == args && rets_.size() == rets; }
  size_t args() const { return args_.size(); }
  size_t rets() const { return rets_.size(); }

  Array arg(size_t i) const { return array(args_[i], 0); }
  // `lead` axes come before the batch axes; they have no stride in the array.
  Array ret(size_t i, size_t lead = 0) const { return array(rets_[i], lead); }
  ffi::DataType type() const { return args_[0].element_type(); }
  int64_t first_size(size_t ret) const { return rets_[ret].dimensions()[0]; }

  // Sizes of an argument or a result with all its axes in full.
  struct Sizes {
    recurrence::Batch batch;
    std::array<int64_t, 3> axis{};
  };

  Sizes arg_sizes(size_t i) const { return sizes(args_[i]); }
  Sizes ret_sizes(size_t i) const { return sizes(rets_[i]); }
  int64_t arg_size(size_t i, size_t axis) const { return args_[i].dimensions()[rank_ + axis]; }

 private:
  Array array(const ffi::AnyBuffer& buffer, size_t lead) const {
    Array out;
    out.data = buffer.untyped_data();
    auto dims = buffer.dimensions();
    int64_t stride = 1;
    for (size_t i = dims.size(); i-- > lead;) {
      size_t at = i - lead;
      int64_t own = dims[i] == 1 ? 0 : stride;
      if (at < rank_) {
        out.batch[at] = own;
      } else if (at - rank_ < out.axis.size()) {
        out.axis[at - rank_] = own;
      }
      stride *= dims[i];
    }
    return out;
  }

  Sizes sizes(const ffi::AnyBuffer& buffer) const {
    Sizes out;
    auto dims = buffer.dimensions();
    out.batch.rank = int(rank_);
    for (size_t i = 0; i < dims.size() && i < rank_ + out.axis.size(); ++i) {
      if (i < rank_) {
        out.batch.shape[i] = dims[i];
        out.batch.count *= dims[i];
      } else {
        out.axis[i - rank_] = dims[i];
      }
    }
    return out;
  }

  size_t rank_;
  std::vector<ffi::AnyBuffer> args_, rets_;
};

bool rank_fits(int64_t batch_rank) { return batch_rank >= 0 && batch_rank <= kMaxBatchRank; }

// `full` has the sizes of h.
ffi::Error linear(const Buffers& buffers, const Buffers::Sizes& full, bool reverse, LinearScan* p) {
  switch (buffers.type()) {
    case ffi::DataType::F32: break;
    case ffi::DataType::F64: p->is_double = true; break;
    case ffi::DataType::C64: p->complex = true; break;
    case ffi::DataType::C128: p->is_double = p->complex = true; break;
    default: return bad("a dtype is not supported");
  }
  p->reverse = reverse;
  p->batch = full.batch;
  p->L = full.axis[0], p->C = full.axis[1];
  return ffi::Error::Success();
}

// Arguments: a, b, initial. Result: h.
ffi::Error LinearForward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch_rank,
                         bool reverse, Integers, Integers) {
  Buffers buffers(args, rets, batch_rank);
  if (!rank_fits(batch_rank) || !buffers.are(3, 1)) return bad("arguments of linear_scan are missing");
  LinearScan p;
  if (auto error = linear(buffers, buffers.ret_sizes(0), reverse, &p); error.failure()) return error;
  p.a = buffers.arg(0), p.b = buffers.arg(1), p.initial = buffers.arg(2), p.h = buffers.ret(0);
  Pool executor(pool);
  kernels().recurrence->linear_scan_forward(p, executor);
  return ffi::Error::Success();
}

// Arguments: a, initial, h, cotangent of h. Results: those gradients of a, b, initial that are wanted.
ffi::Error LinearBackward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch_rank,
                          bool reverse, Integers, Integers wanted) {
  Buffers buffers(args, rets, batch_rank);
  if (!rank_fits(batch_rank) || !buffers.are(4, wanted.size())) return bad("arguments of linear_scan are missing");
  LinearScan p;
  if (auto error = linear(buffers, buffers.arg_sizes(2), reverse, &p); error.failure()) return error;
  p.a = buffers.arg(0), p.initial = buffers.arg(1), p.h = buffers.arg(2), p.h_cotangent = buffers.arg(3);
  Array* gradients[] = {&p.a_gradient, &p.b_gradient, &p.initial_gradient};
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] < 0 || wanted[i] > 2) return bad("there is no such operand");
    *gradients[wanted[i]] = buffers.ret(i);
  }
  Pool executor(pool);
  kernels().recurrence->linear_scan_backward(p, executor);
  return ffi::Error::Success();
}

// What the three passes have in common. The operands are the first six arguments, and the seventh if there are resets;
// `states` has the sizes of an array of states, whose axes from `axis` on are D and N; `sizes` are L, run and block.
ffi::Error selective(const Buffers& buffers, const Buffers::Sizes& states, size_t axis, bool reverse,
                     Integers sizes, bool reset, SelectiveScan* p) {
  if (sizes.size() != 3) return bad("sizes are missing");
  p->is_double = buffers.type() == ffi::DataType::F64;
  if (!p->is_double && buffers.type() != ffi::DataType::F32) return bad("a dtype is not supported");
  p->reverse = reverse;
  p->batch = states.batch;
  p->L = sizes[0], p->D = states.axis[axis], p->N = states.axis[axis + 1];
  p->x = {buffers.arg(0), buffers.arg(1), buffers.arg(2), buffers.arg(3), buffers.arg(4), buffers.arg(5)};
  if (reset) p->reset = buffers.arg(6);
  p->B_groups = buffers.arg_size(3, 1), p->C_groups = buffers.arg_size(4, 1);
  p->run = sizes[1], p->block = sizes[2];
  if (p->run < 1 || p->block < 1 || p->D % p->run || p->D % p->B_groups || p->D % p->C_groups) {
    return bad("runs or groups do not divide D");
  }
  p->mixed = p->D / p->B_groups % p->run != 0 || p->D / p->C_groups % p->run != 0;
  return ffi::Error::Success();
}

// Results: y, last, and starts where backward is to follow.
ffi::Error SelectiveForward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch_rank,
                            bool reverse, Integers sizes, Integers) {
  Buffers buffers(args, rets, batch_rank);
  bool reset = buffers.args() == 7;
  const bool keep = rets.size() == 3;
  if (!rank_fits(batch_rank) || !buffers.are(reset ? 7 : 6, keep ? 3 : 2)) {
    return bad("arguments of selective_scan are missing");
  }
  SelectiveScan p;
  auto error = selective(buffers, buffers.ret_sizes(1), 0, reverse, sizes, reset, &p);
  if (error.failure()) return error;
  p.y = buffers.ret(0), p.last = buffers.ret(1);
  if (keep) p.starts = buffers.ret(2);
  Pool executor(pool);
  kernels().recurrence->selective_scan_forward(p, executor);
  return ffi::Error::Success();
}

// Arguments: the operands, then as many tangents. Results: the tangents of y and last.
ffi::Error SelectiveTangent(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch_rank,
                            bool reverse, Integers sizes, Integers) {
  Buffers buffers(args, rets, batch_rank);
  bool reset = buffers.args() == 13;
  if (!rank_fits(batch_rank) || !buffers.are(reset ? 13 : 12, 2)) return bad("arguments of selective_scan are missing");
  SelectiveScan p;
  auto error = selective(buffers, buffers.ret_sizes(1), 0, reverse, sizes, reset, &p);
  if (error.failure()) return error;
  size_t at = reset ? 7 : 6;
  p.moves = {buffers.arg(at),     buffers.arg(at + 1), buffers.arg(at + 2),
             buffers.arg(at + 3), buffers.arg(at + 4), buffers.arg(at + 5)};
  p.y = buffers.ret(0), p.last = buffers.ret(1);
  Pool executor(pool);
  kernels().recurrence->selective_scan_tangent(p, executor);
  return ffi::Error::Success();
}

// Arguments: the operands, starts, the cotangents of y and last. Results: the gradients of the operands in `wanted`.
ffi::Error SelectiveBackward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t batch_rank,
                             bool reverse, Integers sizes, Integers wanted) {
  Buffers buffers(args, rets, batch_rank);
  bool reset = buffers.args() == 10;
  if (!rank_fits(batch_rank) || !buffers.are(reset ? 10 : 9, wanted.size())) {
    return bad("arguments of selective_scan are missing");
  }
  SelectiveScan p;
  size_t at = reset ? 7 : 6;
  auto error = selective(buffers, buffers.arg_sizes(at), 1, reverse, sizes, reset, &p);
  if (error.failure()) return error;
  p.starts = buffers.arg(at), p.y_cotangent = buffers.arg(at + 1), p.last_cotangent = buffers.arg(at + 2);
  auto& g = p.gradients;
  Array* gradients[] = {&g.u, &g.dt, &g.A, &g.B, &g.C, &g.initial};
  for (size_t i = 0; i < wanted.size(); ++i) {
    int64_t operand = wanted[i];
    if (operand < 0 || operand > 5) return bad("there is no such operand");
    bool slots = operand == 3 || operand == 4;
    *gradients[operand] = buffers.ret(i, slots ? 1 : 0);
    if (!slots) continue;
    int64_t count = buffers.first_size(i);
    int64_t stride = int64_t(rets.get<ffi::AnyBuffer>(i).value()->element_count()) / count;
    (operand == 3 ? p.B_slots : p.C_slots) = count;
    (operand == 3 ? p.B_slot : p.C_slot) = stride;
  }
  Pool executor(pool);
  kernels().recurrence->selective_scan_backward(p, executor);
  return ffi::Error::Success();
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("batch_rank")
      .Attr<bool>("reverse")
      .Attr<Integers>("sizes")
      .Attr<Integers>("wanted");
}

}  // namespace
}  // namespace probjax

// The library hides its symbols but for what Python looks up.
#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbjaxLinearScanForward, probjax::LinearForward, probjax::Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbjaxLinearScanBackward, probjax::LinearBackward, probjax::Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbjaxSelectiveScanForward, probjax::SelectiveForward, probjax::Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbjaxSelectiveScanTangent, probjax::SelectiveTangent, probjax::Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ProbjaxSelectiveScanBackward, probjax::SelectiveBackward, probjax::Binding());
#pragma GCC visibility pop
