// The kernels of one instruction set, and the choice among them.
#pragma once

#include "common/parallel.h"
#include "attention/problem.h"

namespace probjax {

struct RecurrenceKernels;

struct Kernels {
  const char* name;  // "baseline", "avx2", "avx512", "neon"
  void (*forward)(const Problem&, Executor&);
  void (*tangent)(const Problem&, Executor&);
  void (*backward)(const Problem&, Executor&);
  const RecurrenceKernels* recurrence;  // of the same instruction set
};

// The best kernels this processor can run. The environment variable PROBJAX_ISA may name lesser ones; a
// name that is unknown or that this processor lacks is ignored.
const Kernels& kernels();

// All that this processor can run, best first; the list ends with a null pointer.
const Kernels* const* all_kernels();

}  // namespace probjax
