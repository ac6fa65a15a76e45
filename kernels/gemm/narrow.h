// The strip product where a right strip has few columns, as when tokens are decoded one by one: 16 rows of
// the left operand are turned in registers, so that lanes are rows and each weight is loaded and converted
// once for all columns. The lanes of gemm/vector.h are columns, and would be mostly empty. A sum takes its
// terms in the same order in both, so a column's bits don't depend on how many others there are.
#pragma once

#include "gemm/strip.h"
#include "isa/lanes.h"

namespace ktbridge {
namespace {

// Right strips with so many live columns or fewer come here (docs/kernel-log.md, entries 25 and 40).
constexpr int kNarrow = 4;

// Rows of a matrix lie far apart, so each is a stream of its own for hardware to follow, and rows a power
// of two apart share a set of L1: reading further ahead would push out what is about to be used.
constexpr int kNarrowAhead = 2;

// Adds the first kColumns columns of right strip j, for left strip i; one sum a column.
template <int kColumns, class Multiply>
inline void narrow_columns(const Product* products, int count, int i, int j, float* result,
                           Multiply multiply) {
  float* block = result + (static_cast<std::ptrdiff_t>(i) * products->right.count + j) * kBlock;
  Lanes sums[kColumns];
  for (int c = 0; c < kColumns; ++c) {
    float values[kStrip];
    for (int m = 0; m < kStrip; ++m) values[m] = block[m * kStrip + c];
    sums[c] = load(values);
  }
  for (int p = 0; p < count; ++p) {
    const Strips& strips = products[p].left;
    const std::ptrdiff_t row = strips.row;
    const bf16* left = strips.data + i * strips.stride;
    const bf16* right = products[p].right.data + j * products[p].right.stride;
    for (int tile = 0; tile < products[p].tiles; ++tile, left += strips.tile) {
      if (strips.cold)  // a hint only, so it may point past the end
        for (int m = 0; m < kStrip; ++m) __builtin_prefetch(left + m * row + kNarrowAhead * kSteps);
      Pairs turned[16];
      turn_rows(left, row, turned);
      for (int k = 0; k < kSteps / 2; ++k, right += 2 * kStrip) {
        const Split weights = split(turned[k]);
        for (int c = 0; c < kColumns; ++c) {
          std::uint32_t pair;
          __builtin_memcpy(&pair, right + 2 * c, sizeof pair);
          sums[c] = multiply(sums[c], pair, weights);
        }
      }
    }
  }
  for (int c = 0; c < kColumns; ++c) {
    float values[kStrip];
    store(values, sums[c]);
    for (int m = 0; m < kStrip; ++m) block[m * kStrip + c] = values[m];
  }
}

// Adds the `live` columns of right strip j, at most kMost, for all left strips. `multiply` is the step of
// the product that it stands in for.
template <int kMost = kNarrow, class Multiply>
inline void narrow_strip(const Product* products, int count, int j, int live, float* result,
                         Multiply multiply) {
  if constexpr (kMost > 1) {
    if (live < kMost) return narrow_strip<kMost - 1>(products, count, j, live, result, multiply);
  }
  for (int i = 0; i < products->left.count; ++i)
    narrow_columns<kMost>(products, count, i, j, result, multiply);
}

}  // namespace
}  // namespace ktbridge
