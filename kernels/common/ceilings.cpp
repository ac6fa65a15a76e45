#include "common/ceilings.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <numeric>
#include <vector>

namespace ktbridge {

double measure_peak(const Kernels& kernels, Pool& pool) {
  std::lock_guard lock(pool.guard());
  const auto rate = [&](double (*peak)(long)) {
    std::vector<double> flops(pool.threads());
    const auto started = std::chrono::steady_clock::now();
    pool.run([&](int thread) {
      kernels.begin();
      flops[thread] = peak(500'000);
      kernels.end();
    });
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
    return std::accumulate(flops.begin(), flops.end(), 0.0) / taken.count();
  };
  // Some CPUs multiply float32 faster than pairs of bf16; what they could do that way counts too.
  return std::max(rate(kernels.peak), rate(kernels.peak_float));
}

}  // namespace ktbridge
