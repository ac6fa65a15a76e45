// What this machine can do at most: one of the two numbers that docs/kernels.md holds the layer against. The
// other, bytes/s, is measured in scripts/peers/ceilings.py.
#pragma once

#include <chrono>
#include <mutex>
#include <numeric>
#include <vector>

#include "common/pool.h"
#include "isa/kernels.h"

namespace ktbridge {

// FLOP/s of the kernels' products when every operand is in a register, all threads together, in one round
// of some milliseconds.
inline double measure_peak(const Kernels& kernels, Pool& pool) {
  std::lock_guard lock(pool.guard());
  std::vector<double> flops(pool.threads());
  const auto started = std::chrono::steady_clock::now();
  pool.run([&](int thread) {
    kernels.begin();
    flops[thread] = kernels.peak(500'000);
    kernels.end();
  });
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
  return std::accumulate(flops.begin(), flops.end(), 0.0) / taken.count();
}

}  // namespace ktbridge
