// The strip product where a right strip has few columns, as when tokens are decoded one by one: 16 rows of
// the left operand are turned in registers, so that lanes are rows and each weight is loaded and converted
// once for all columns. The lanes of gemm/vector.h are columns, and would be mostly empty. A sum takes its
// terms in the same order in both, so a column's bits don't depend on how many others there are.
#pragma once

#include "gemm/strip.h"
#include "isa/lanes.h"

namespace ktbridge {
namespace {

// Right strips with so many live columns or fewer come here (measured: docs/kernel-log.md, entry 25).
#if defined(__AVX512BF16__)
constexpr int kNarrow = 0;  // none until this has run on such a CPU
constexpr int kNarrowMost = 8;
#else
constexpr int kNarrow = 8;
constexpr int kNarrowMost = 6;  // of two registers each, out of 16
#endif

// Rows of a matrix lie far apart, so each is a stream of its own for hardware to follow, and rows a power
// of two apart share a set of L1: reading further ahead would push out what is about to be used.
constexpr int kNarrowAhead = 2;

// Columns [column, column + kColumns) of right strip j, for left strip i; one sum a column.
template <int kColumns, class Multiply>
inline void narrow_columns(const Product* products, int count, int i, int j, int column, float* result,
                           bool add, Multiply multiply) {
  const std::ptrdiff_t apart = static_cast<std::ptrdiff_t>(products->right.count) * kBlock;
  float* block = result + i * apart + static_cast<std::ptrdiff_t>(j) * kBlock + column;
  Lanes sums[kColumns];
  for (int c = 0; c < kColumns; ++c) {
    float values[kStrip] = {};
    if (add)
      for (int m = 0; m < kStrip; ++m) values[m] = block[m * kStrip + c];
    sums[c] = load(values);
  }
  for (int p = 0; p < count; ++p) {
    const Strips& strips = products[p].left;
    const std::ptrdiff_t row = strips.row;
    const bf16* left = strips.data + i * strips.stride;
    const bf16* right = products[p].right.data + j * products[p].right.stride + 2 * column;
    const bool ahead = strips.cold && column == 0;
    for (int tile = 0; tile < products[p].tiles; ++tile, left += strips.tile) {
      if (ahead)  // a hint only, so it may point past the end
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

// All of `live` columns from `column`, at most kMost: the most whose sums stay in registers.
template <int kMost, class Multiply>
inline void narrow_part(const Product* products, int count, int i, int j, int column, int live, float* result,
                        bool add, Multiply multiply) {
  if constexpr (kMost > 1) {
    if (live < kMost)
      return narrow_part<kMost - 1>(products, count, i, j, column, live, result, add, multiply);
  }
  narrow_columns<kMost>(products, count, i, j, column, result, add, multiply);
}

// Right strip j of all of a result: the columns that are live, and zeros. `multiply` is the step of the
// product that it stands in for.
template <class Multiply>
inline void narrow_strip(const Product* products, int count, int j, int live, float* result, bool add,
                         Multiply multiply) {
  const std::ptrdiff_t apart = static_cast<std::ptrdiff_t>(products->right.count) * kBlock;
  const int parts = ceil_div(live, kNarrowMost);
  for (int i = 0; i < products->left.count; ++i) {
    for (int m = 0; m < kStrip && !add; ++m) store(result + i * apart + j * kBlock + m * kStrip, every(0.f));
    for (int part = 0; part < parts; ++part) {
      const int column = live * part / parts, end = live * (part + 1) / parts;
      narrow_part<kNarrowMost>(products, count, i, j, column, end - column, result, add, multiply);
    }
  }
}

}  // namespace
}  // namespace ktbridge
