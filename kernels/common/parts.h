// The parts of a pass by themselves: what keeps the layer from its floor (docs/kernels.md).
#pragma once

#include <cstddef>

#include "common/pool.h"
#include "isa/kernels.h"

namespace ktbridge {

enum class Part {
  products,  // rows of W that stay in cache, times tokens
  forward,   // W's rows as they come from memory, times tokens
  pack,      // W's columns from memory into panels in cache
  backward,  // the same, and tokens times each panel
};

// Seconds to walk once over `bytes` of bf16 matrices [inner, hidden] like that, with `strips` strips of 16
// tokens and nothing around it: no LoRA, no epilogues, no results kept. All threads together, each with
// matrices of its own; the median of the walks that fit into `seconds`, at least 3.
double measure_part(const Kernels& kernels, Pool& pool, Part part, int strips, int inner, int hidden,
                    std::size_t bytes, double seconds);

}  // namespace ktbridge
