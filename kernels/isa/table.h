// Defines one ISA's table; each isa/*.cpp includes this under its own compiler flags.
#pragma once

#include "gemm/vector.h"
#include "isa/kernels.h"
#include "moe/epilogues.h"
#include "weights/pack.h"

namespace ktbridge {
namespace {

inline double peak_vector(long rounds) {
  const Split one = split(pairs(every(1.f), every(1.f)));
  Lanes sums[kVectorRows * kVectorColumns];
  for (Lanes& sum : sums) sum = every(0.f);
  for (long i = 0; i < rounds; ++i) {
    std::uint32_t pair = 0x3f803f80u;
    asm volatile("" : "+r"(pair));
    for (Lanes& sum : sums) sum = dot(sum, pair, one);
  }
  Lanes total = every(0.f);
  for (const Lanes& sum : sums) total = total + sum;
  volatile float sink = sum(total);
  (void)sink;
  return static_cast<double>(rounds) * kVectorRows * kVectorColumns * 64;
}

inline void nothing() {}

inline Kernels vector_kernels() {
  return {nothing,        nothing,         gemm_vector,     pack_left,
          pack_right,     tokens_to_left,  tokens_to_right, token_pairs_to_right,
          tiles_to_right, blocks_to_left,  blocks_to_right, transpose_blocks,
          activate,       inner_gradients, weigh_rows,      round_rows,
          sum_rows,       add_blocks,      peak_vector};
}

}  // namespace
}  // namespace ktbridge
