// The strip product on vector registers: kRows x kColumns strips' worth of sums stay in registers while
// the reduction runs. Written once over isa/lanes.h.
#pragma once

#include "gemm/narrow.h"
#include "gemm/strip.h"
#include "isa/lanes.h"

namespace ktbridge {
namespace {

#if defined(__AVX512BF16__)
// 8 x 2 sums, 2 right vectors and a broadcast: 19 of 32 registers, 16 independent sums to hide latency.
constexpr int kVectorRows = 8, kVectorColumns = 2;
#else
// AVX2: 4 x 1 sums of two registers each, 4 registers of a split right vector, 2 broadcasts: 14 of 16.
constexpr int kVectorRows = 4, kVectorColumns = 1;
#endif
constexpr int kLeastRows = 4;

// Right strips with so many live columns, and more than kNarrow, have sums of half a register's width.
constexpr int kFew = 8, kFewRows = 8;

// Adds rows [first_row, first_row + kRows) of left strip i times kColumns right strips from j.
template <class Sum, int kRows, int kColumns>
inline void vector_block(const Product* products, int count, int i, int first_row, int j, float* result) {
  float* block =
      result + (static_cast<std::ptrdiff_t>(i) * products->right.count + j) * kBlock + first_row * kStrip;
  Sum sums[kRows][kColumns];
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kColumns; ++n) load(block + n * kBlock + m * kStrip, sums[m][n]);
  for (int p = 0; p < count; ++p) {
    const std::ptrdiff_t row = products[p].left.row, right_stride = products[p].right.stride;
    const bf16* left = products[p].left.data + i * products[p].left.stride + first_row * row;
    const bf16* right = products[p].right.data + j * right_stride;
    for (int tile = 0; tile < products[p].tiles; ++tile) {
      for (int k = 0; k < kSteps / 2; ++k) {
        Split columns[kColumns];
        for (int n = 0; n < kColumns; ++n)
          columns[n] = split(load_pairs(right + n * right_stride + k * 2 * kStrip));
        for (int m = 0; m < kRows; ++m) {
          std::uint32_t pair;
          __builtin_memcpy(&pair, left + m * row + 2 * k, sizeof pair);
          for (int n = 0; n < kColumns; ++n) sums[m][n] = dot(sums[m][n], pair, columns[n]);
        }
      }
      left += products[p].left.tile;
      right += kTile;
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < kColumns; ++n) store(block + n * kBlock + m * kStrip, sums[m][n]);
}

// The first `live` rows of left strip i; the others are zeros.
template <class Sum, int kRows, int kColumns>
inline void vector_rows(const Product* products, int count, int i, int live, int j, float* result) {
  for (int row = 0; row < live; row += kRows)
    if (live - row > kLeastRows)
      vector_block<Sum, kRows, kColumns>(products, count, i, row, j, result);
    else
      vector_block<Sum, kLeastRows, kColumns>(products, count, i, row, j, result);
}

inline void gemm_vector(const Product* products, int count, float* result, bool add) {
  const int rows = products->left.count, columns = products->right.count, live = products->right.live;
  const bool narrow = live <= kNarrow, few = live <= kFew && !narrow;
  const int wide_columns = columns - (narrow || few);
  if (!add) __builtin_memset(result, 0, sizeof(float) * kBlock * rows * columns);
  for (int i = 0; i < rows; ++i) {
    const int live_rows = i + 1 < rows ? kStrip : products->left.live;
    int j = 0;
    for (; j + kVectorColumns <= wide_columns; j += kVectorColumns)
      vector_rows<Lanes, kVectorRows, kVectorColumns>(products, count, i, live_rows, j, result);
    if (j < wide_columns) vector_rows<Lanes, kVectorRows, 1>(products, count, i, live_rows, j, result);
    if (few) vector_rows<Eight, kFewRows, 1>(products, count, i, live_rows, wide_columns, result);
  }
  if (narrow)
    narrow_strip(products, count, wide_columns, live, result,
                 [](Lanes sum, std::uint32_t pair, Split weights) { return dot(sum, pair, weights); });
}

}  // namespace
}  // namespace ktbridge
