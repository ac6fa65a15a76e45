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

template <int kColumns>
inline void vector_block(const Product* products, int count, int i, int first_row, int j, float* result,
                         bool add) {
  float* block =
      result + (static_cast<std::ptrdiff_t>(i) * products->right.count + j) * kBlock + first_row * kStrip;
  Lanes sums[kVectorRows][kColumns];
  for (int m = 0; m < kVectorRows; ++m)
    for (int n = 0; n < kColumns; ++n) sums[m][n] = add ? load(block + n * kBlock + m * kStrip) : every(0.f);
  for (int p = 0; p < count; ++p) {
    const std::ptrdiff_t row = products[p].left.row, right_stride = products[p].right.stride;
    const bf16* left = products[p].left.data + i * products[p].left.stride + first_row * row;
    const bf16* right = products[p].right.data + j * right_stride;
    for (int tile = 0; tile < products[p].tiles; ++tile) {
      for (int k = 0; k < kSteps / 2; ++k) {
        Split columns[kColumns];
        for (int n = 0; n < kColumns; ++n)
          columns[n] = split(load_pairs(right + n * right_stride + k * 2 * kStrip));
        for (int m = 0; m < kVectorRows; ++m) {
          std::uint32_t pair;
          __builtin_memcpy(&pair, left + m * row + 2 * k, sizeof pair);
          for (int n = 0; n < kColumns; ++n) sums[m][n] = dot(sums[m][n], pair, columns[n]);
        }
      }
      left += products[p].left.tile;
      right += kTile;
    }
  }
  for (int m = 0; m < kVectorRows; ++m)
    for (int n = 0; n < kColumns; ++n) store(block + n * kBlock + m * kStrip, sums[m][n]);
}

inline void gemm_vector(const Product* products, int count, float* result, bool add) {
  const int rows = products->left.count, columns = products->right.count;
  const int live = products->right.live, wide_columns = live <= kNarrow ? columns - 1 : columns;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < wide_columns;) {
      const bool wide = kVectorColumns == 2 && j + 2 <= wide_columns;
      for (int row = 0; row < kStrip; row += kVectorRows) {
        if (wide)
          vector_block<kVectorColumns>(products, count, i, row, j, result, add);
        else
          vector_block<1>(products, count, i, row, j, result, add);
      }
      j += wide ? 2 : 1;
    }
  }
  if (wide_columns < columns)
    narrow_strip(products, count, wide_columns, live, result, add,
                 [](Lanes sum, std::uint32_t pair, Split weights) { return dot(sum, pair, weights); });
}

}  // namespace
}  // namespace ktbridge
