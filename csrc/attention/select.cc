// Which kernels this processor can run.
#include <cstdlib>
#include <cstring>

#include "attention/kernels.h"

namespace probjax {

#define PROBJAX_DECLARE(isa) \
  namespace isa {            \
  extern const Kernels table; \
  }

#if defined(__x86_64__)
PROBJAX_DECLARE(baseline)
PROBJAX_DECLARE(avx2)
PROBJAX_DECLARE(avx512)
#else
PROBJAX_DECLARE(neon)
#endif

const Kernels* const* all_kernels() {
  static const Kernels* found[8] = {};
  static const bool once = [] {
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      found[n++] = &avx512::table;
    }
    // Every processor with AVX2 and FMA has F16C too.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found[n++] = &avx2::table;
    found[n++] = &baseline::table;
#else
    found[n++] = &neon::table;
#endif
    return true;
  }();
  (void)once;
  return found;
}

const Kernels& kernels() {
  static const Kernels* chosen = [] {
    const Kernels* const* all = all_kernels();
    const char* wanted = std::getenv("PROBJAX_ISA");
    for (int i = 0; wanted && all[i]; ++i) {
      if (std::strcmp(all[i]->name, wanted) == 0) return all[i];
    }
    return all[0];
  }();
  return *chosen;
}

}  // namespace probjax
