// What this machine can do at most: one of the two numbers that docs/kernels.md holds the layer against. The
// other, bytes/s, is measured in scripts/peers/ceilings.py.
#pragma once

#include "common/pool.h"
#include "isa/kernels.h"

namespace ktbridge {

// FLOP/s of the kernels' products when every operand is in a register, all threads together, in one round
// of some milliseconds.
double measure_peak(const Kernels& kernels, Pool& pool);

}  // namespace ktbridge
