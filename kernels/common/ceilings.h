// What this machine can do at most: the two numbers that docs/kernels.md holds the layer against.
#pragma once

#include <cstddef>

#include "common/pool.h"
#include "isa/kernels.h"

namespace ktbridge {

// FLOP/s of the kernels' products when every operand is in a register, all threads together; the best of
// the rounds that fit into `seconds`.
double measure_peak(const Kernels& kernels, Pool& pool, double seconds);

// bytes/s of reading `bytes` (at least 64 MB; take several times the last-level cache) from memory, each
// thread its own contiguous part with prefetches ahead; the best of the rounds that fit into `seconds`.
double measure_bandwidth(Pool& pool, std::size_t bytes, double seconds);

}  // namespace ktbridge
