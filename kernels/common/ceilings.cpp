#include "common/ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "common/buffer.h"

namespace ktbridge {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The best rate of `round`, which returns the work it did, over `seconds` but at least 3 rounds.
template <class Round>
double best_rate(double seconds, Round round) {
  double best = 0;
  const double start = now();
  for (int i = 0; i < 3 || now() - start < seconds; ++i) {
    const double before = now(), work = round();
    best = std::max(best, work / (now() - before));
  }
  return best;
}

double run_peak(const Kernels& kernels, Pool& pool, double (*peak)(long)) {
  std::atomic<double> total{0};
  pool.run([&](int) {
    kernels.begin();
    const double flops = peak(500'000);
    kernels.end();
    for (double sum = total.load(); !total.compare_exchange_weak(sum, sum + flops);) {
    }
  });
  return total.load();
}

}  // namespace

double measure_peak(const Kernels& kernels, Pool& pool, double seconds) {
  std::lock_guard lock(pool.guard());
  // Some CPUs multiply float32 faster than pairs of bf16; what they could do that way counts too.
  const auto rate = [&](double (*peak)(long)) {
    return best_rate(seconds / 2, [&] { return run_peak(kernels, pool, peak); });
  };
  return std::max(rate(kernels.peak), rate(kernels.peak_float));
}

double measure_bandwidth(Pool& pool, std::size_t bytes, double seconds) {
  std::lock_guard lock(pool.guard());
  const std::size_t share = std::max<std::size_t>(bytes, 64 << 20) / pool.threads() / 64 * 64;
  Buffer<char> memory(share * pool.threads());
  pool.run([&](int thread) { std::memset(memory.data() + thread * share, 1, share); });
  return best_rate(seconds, [&] {
    std::atomic<std::uint64_t> sink{0};
    pool.run([&](int thread) {
      const char* p = memory.data() + thread * share;
      std::uint64_t sum = 0;
      for (std::size_t at = 0; at < share; at += 64) {
        // A hint only, so it may point past the end.
        __builtin_prefetch(p + at + 4096);
        std::uint64_t word;
        std::memcpy(&word, p + at, sizeof word);
        sum += word;
      }
      sink += sum;
    });
    return static_cast<double>(share) * pool.threads();
  });
}

}  // namespace ktbridge
