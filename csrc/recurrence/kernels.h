// The kernels of the recurrences of one instruction set; probjax::Kernels says which.
#pragma once

#include "common/parallel.h"
#include "recurrence/problem.h"

namespace probjax {

struct RecurrenceKernels {
  void (*linear_scan_forward)(const recurrence::LinearScan&, Executor&);
  void (*linear_scan_backward)(const recurrence::LinearScan&, Executor&);
  void (*selective_scan_forward)(const recurrence::SelectiveScan&, Executor&);
  void (*selective_scan_tangent)(const recurrence::SelectiveScan&, Executor&);
  void (*selective_scan_backward)(const recurrence::SelectiveScan&, Executor&);
};

}  // namespace probjax
