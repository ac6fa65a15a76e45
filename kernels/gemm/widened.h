// The strip product with float32 multiply-adds, for CPUs that run them twice as fast as vdpbf16ps (Intel;
// docs/kernel-log.md, entry 13). Eight left rows are widened to float32 for a stretch of the reduction, in
// L1, and serve every right strip before the next stretch. Written over isa/lanes.h, for registers of 16
// lanes.
#pragma once

#include "gemm/narrow.h"
#include "gemm/strip.h"
#include "isa/lanes.h"

namespace ktbridge {
namespace {

constexpr int kWideRows = 8, kWideColumns = 3;  // 24 sums, 3 right vectors, a broadcast: 28 of 32 registers
constexpr int kStretch = 8;                     // tiles: 8 rows x 256 steps x 4 bytes = 8 KB

// left: [kWideRows][kStretch * kSteps] float32; adds to what `result` holds.
template <int kColumns>
inline void widened_block(const float* left, int tiles, const bf16* right, std::ptrdiff_t right_stride,
                          float* result) {
  Lanes sums[kWideRows][kColumns];
  for (int m = 0; m < kWideRows; ++m)
    for (int n = 0; n < kColumns; ++n) sums[m][n] = load(result + n * kBlock + m * kStrip);
  for (int k = 0; k < tiles * kSteps; k += 2) {
    Pairs columns[kColumns];
    for (int n = 0; n < kColumns; ++n) columns[n] = load_pairs(right + n * right_stride + k * kStrip);
    for (int second = 0; second < 2; ++second) {
      Lanes column[kColumns];
      for (int n = 0; n < kColumns; ++n) column[n] = second == 0 ? low(columns[n]) : high(columns[n]);
      for (int m = 0; m < kWideRows; ++m) {
        const Lanes row = every(left[m * kStretch * kSteps + k + second]);
        for (int n = 0; n < kColumns; ++n) sums[m][n] = fma(row, column[n], sums[m][n]);
      }
    }
  }
  for (int m = 0; m < kWideRows; ++m)
    for (int n = 0; n < kColumns; ++n) store(result + n * kBlock + m * kStrip, sums[m][n]);
}

inline void gemm_widened(const Product* products, int count, float* result, bool add) {
  const int columns = products->right.count, live = products->right.live;
  const int wide_columns = live <= kNarrow ? columns - 1 : columns;
  if (!add) __builtin_memset(result, 0, sizeof(float) * kBlock * products->left.count * columns);
  if (wide_columns < columns)
    narrow_strip(products, count, wide_columns, live, result,
                 [](Lanes sum, std::uint32_t pair, Pairs weights) {
                   const Pairs token = same(pair);
                   return fma(high(token), high(weights), fma(low(token), low(weights), sum));
                 });
  if (wide_columns == 0) return;
  alignas(64) float wide[kWideRows * kStretch * kSteps];
  for (int i = 0; i < products->left.count; ++i) {
    for (int first_row = 0; first_row < kStrip; first_row += kWideRows) {
      float* blocks = result + static_cast<std::ptrdiff_t>(i) * columns * kBlock + first_row * kStrip;
      for (int p = 0; p < count; ++p) {
        const Strips &left = products[p].left, &right = products[p].right;
        const bf16* rows = left.data + i * left.stride + first_row * left.row;
        for (int tile = 0; tile < products[p].tiles; tile += kStretch) {
          const int tiles = products[p].tiles - tile < kStretch ? products[p].tiles - tile : kStretch;
          for (int m = 0; m < kWideRows; ++m)
            for (int t = 0; t < tiles; ++t) {
              float* to = wide + (m * kStretch + t) * kSteps;
              Lanes a, b;
              widen(load_pairs(rows + m * left.row + (tile + t) * left.tile), a, b);
              store(to, a);
              store(to + kStrip, b);
            }
          for (int j = 0; j < wide_columns;) {
            const bf16* from = right.data + j * right.stride + static_cast<std::ptrdiff_t>(tile) * kTile;
            float* block = blocks + static_cast<std::ptrdiff_t>(j) * kBlock;
            const int left_over = wide_columns - j;
            if (left_over >= 3)
              widened_block<3>(wide, tiles, from, right.stride, block);
            else if (left_over == 2)
              widened_block<2>(wide, tiles, from, right.stride, block);
            else
              widened_block<1>(wide, tiles, from, right.stride, block);
            j += left_over >= 3 ? 3 : left_over;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ktbridge
