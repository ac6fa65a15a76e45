// The strip product on AMX tiles: 2 x 2 blocks, so that each of 4 loaded tiles is used twice. Operands
// stream from L2 over the whole reduction; blocking it for L1 costs more in sums stored and reloaded than
// it saves (docs/kernel-log.md).
#pragma once

#include "gemm/strip.h"
#include "gemm/tiles.h"

namespace ktbridge {
namespace {

// Tiles ahead of the one in use that a first reading of cold rows asks for.
constexpr int kTilesAhead = 4;

// Sums in tiles 0-3 (0 1 / 2 3), left in 4 and 5, right in 6 and 7.
template <int kRows, int kColumns, bool kCold, bool kLast>
inline void tile_product(const Product& product, const bf16* left, const bf16* right) {
  const std::ptrdiff_t row = product.left.row, left_stride = product.left.stride;
  const std::ptrdiff_t step = product.left.tile, right_stride = product.right.stride;
  // Cold rows come in pairs of strips, one pair after the other: the last use of one pair asks for the
  // beginning of the next, a row with each tile.
  const bf16* next = left + 2 * left_stride;
  for (int tile = 0; tile < product.tiles; ++tile) {
    if constexpr (kLast)
      if (tile < 2 * kStrip) {
        for (int ahead = 0; ahead < kTilesAhead; ++ahead) __builtin_prefetch(next + ahead * step, 0, 2);
        next += tile + 1 == kStrip ? left_stride - (kStrip - 1) * row : row;
      }
    if constexpr (kCold)
      if (tile + kTilesAhead < product.tiles)
        for (int r = 0; r < kRows * kStrip; ++r)
          __builtin_prefetch(left + r / kStrip * left_stride + r % kStrip * row + kTilesAhead * step);
    tile_load<4>(left, row);
    tile_load<6>(right, kSteps);
    tile_multiply<0, 4, 6>();
    if constexpr (kColumns == 2) {
      tile_load<7>(right + right_stride, kSteps);
      tile_multiply<1, 4, 7>();
    }
    if constexpr (kRows == 2) {
      tile_load<5>(left + left_stride, row);
      tile_multiply<2, 5, 6>();
      if constexpr (kColumns == 2) tile_multiply<3, 5, 7>();
    }
    left += step;
    right += kTile;
  }
}

template <int kRows, int kColumns>
inline void tile_block(const Product* products, int count, int i, int j, float* result) {
  tile_zero<0>();
  if constexpr (kColumns == 2) tile_zero<1>();
  if constexpr (kRows == 2) tile_zero<2>();
  if constexpr (kRows == 2 && kColumns == 2) tile_zero<3>();
  for (int p = 0; p < count; ++p) {
    const Product& product = products[p];
    const bf16* left = product.left.data + i * product.left.stride;
    const bf16* right = product.right.data + j * product.right.stride;
    const bool first = product.left.cold && j == 0,
               last = product.left.cold && j + 2 >= product.right.count;
    if (first && last)
      tile_product<kRows, kColumns, true, true>(product, left, right);
    else if (first)
      tile_product<kRows, kColumns, true, false>(product, left, right);
    else if (last)
      tile_product<kRows, kColumns, false, true>(product, left, right);
    else
      tile_product<kRows, kColumns, false, false>(product, left, right);
  }
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(products->right.count) * kBlock;
  float* block = result + i * stride + static_cast<std::ptrdiff_t>(j) * kBlock;
  tile_store<0>(block);
  if constexpr (kColumns == 2) tile_store<1>(block + kBlock);
  if constexpr (kRows == 2) tile_store<2>(block + stride);
  if constexpr (kRows == 2 && kColumns == 2) tile_store<3>(block + stride + kBlock);
}

// The calling thread must have its tiles configured (tiles_begin).
inline void gemm_amx(const Product* products, int count, float* result) {
  const int rows = products->left.count, columns = products->right.count;
  for (int i = 0; i < rows; i += 2) {
    for (int j = 0; j < columns; j += 2) {
      const bool two_rows = i + 1 < rows, two_columns = j + 1 < columns;
      if (two_rows && two_columns)
        tile_block<2, 2>(products, count, i, j, result);
      else if (two_rows)
        tile_block<2, 1>(products, count, i, j, result);
      else if (two_columns)
        tile_block<1, 2>(products, count, i, j, result);
      else
        tile_block<1, 1>(products, count, i, j, result);
    }
  }
}

}  // namespace
}  // namespace ktbridge
