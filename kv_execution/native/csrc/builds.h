// The instruction-set builds of the kernels, and which of them this machine runs.
//
// For:      the handlers, which choose one for each call.
// Not for:  a kernel.
#pragma once

#include "attention.h"

namespace paged {

inline const Kernels* const kBuilds[] = {
    &baseline::kernels,
#ifdef PAGED_X86
    &x86_64_v3::kernels,
    &x86_64_v4::kernels,
#endif
};
constexpr int kNumBuilds = sizeof kBuilds / sizeof *kBuilds;

inline bool runs_here(int build) {
#ifdef PAGED_X86
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2");
  if (build == 1) return v3;
  if (build == 2)
    return v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
#endif
  return build == 0;
}

inline int best_build() {
  static const int best = [] {
    int build = kNumBuilds - 1;
    while (!runs_here(build)) build--;
    return build;
  }();
  return best;
}

}  // namespace paged
