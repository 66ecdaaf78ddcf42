// The kernels of one instruction set: this file is compiled once per set, with PROBJAX_ISA its name.
#include "attention/kernels.h"

#include "attention/backward.h"

#define PROBJAX_NAME_OF(x) #x
#define PROBJAX_NAME(x) PROBJAX_NAME_OF(x)

namespace probjax::PROBJAX_ISA {

namespace {

template <template <class> class Pass>
void run(const Problem& problem, Executor& executor) {
  if (problem.operands[0].type == Type::f64) {
    Pass<double>(problem, executor).run();
  } else {
    Pass<float>(problem, executor).run();
  }
}

}  // namespace

extern const RecurrenceKernels recurrence_table;
extern const Kernels table;
const Kernels table = {PROBJAX_NAME(PROBJAX_ISA), run<Forward>, run<Tangent>, run<Backward>, &recurrence_table};

}  // namespace probjax::PROBJAX_ISA
