// Defines one ISA's table; each isa/*.cpp includes this under its own compiler flags.
#pragma once

#include "gemm/delta.h"
#include "gemm/vector.h"
#include "isa/kernels.h"
#include "moe/drop.h"
#include "moe/epilogues.h"
#include "weights/pack.h"
#include "weights/quantize.h"

namespace ktbridge {
namespace {

// `step` applied to enough independent sums to hide its latency.
template <class Step>
inline double peak_of(long rounds, double flops, Step step) {
  Lanes sums[kVectorRows * kVectorColumns];
  for (Lanes& sum : sums) sum = every(0.f);
  for (long i = 0; i < rounds; ++i)
    for (Lanes& sum : sums) sum = step(sum);
  Lanes total = every(0.f);
  for (const Lanes& sum : sums) total = total + sum;
  volatile float sink = sum(total);
  (void)sink;
  return static_cast<double>(rounds) * kVectorRows * kVectorColumns * flops;
}

inline double peak_vector(long rounds) {
  const Split half = split(pairs(every(0.5f), every(0.5f)));
  return peak_of(rounds, 64, [half](Lanes sum) { return dot(sum, 0x3f003f00u, half); });
}

inline double peak_float(long rounds) {
  return peak_of(rounds, 32, [](Lanes sum) { return fma(sum, every(0.5f), every(0.5f)); });
}

inline void nothing() {}

inline Kernels vector_kernels() {
  return {nothing,
          nothing,
          gemm_vector,
          false,
          pack_left,
          pack_right,
          tokens_to_left,
          tokens_to_right,
          token_pairs_to_right,
          tiles_to_right,
          blocks_to_left,
          blocks_to_right,
          transpose_blocks,
          activate,
          inner_gradients,
          weigh_rows,
          row_products,
          round_rows,
          sum_rows,
          add_blocks,
          drop_right,
          kept_bits,
          add_kept,
          add_delta,
          quantize,
          peak_vector};
}

}  // namespace
}  // namespace ktbridge
