// The kernels of one instruction set: this file is compiled once per set, with PROBJAX_ISA its name.
#include "recurrence/kernels.h"

#include "recurrence/linear_scan.h"
#include "recurrence/selective_backward.h"
#include "recurrence/selective_scan.h"

namespace probjax::PROBJAX_ISA {

namespace {

template <template <class> class Pass, class Problem>
void run(const Problem& problem, Executor& executor) {
  if (problem.is_double) {
    Pass<double>(problem, executor).run();
  } else {
    Pass<float>(problem, executor).run();
  }
}

}  // namespace

extern const RecurrenceKernels recurrence_table;
const RecurrenceKernels recurrence_table = {
    run<recurrence::LinearForward>, run<recurrence::LinearBackward>, run<recurrence::SelectiveForward>,
    run<recurrence::SelectiveTangent>, run<recurrence::SelectiveBackward>};

}  // namespace probjax::PROBJAX_ISA
