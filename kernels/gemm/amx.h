// The strip product on AMX tiles: 2 x 2 blocks, so that each of 4 loaded tiles is used twice. Operands
// stream from L2 over the whole reduction; blocking it for L1 costs more in sums stored and reloaded than
// it saves (docs/kernel-log.md).
#pragma once

#include "gemm/strip.h"
#include "gemm/tiles.h"

namespace ktbridge {
namespace {

template <int kRows, int kColumns>
inline void tile_block(int tiles, const bf16* left, std::ptrdiff_t left_stride, const bf16* right,
                       std::ptrdiff_t right_stride, float* result, std::ptrdiff_t result_stride, bool add) {
  // Sums in tiles 0-3 (0 1 / 2 3), left in 4 and 5, right in 6 and 7.
  if (add) {
    tile_load<0>(result);
    if constexpr (kColumns == 2) tile_load<1>(result + kBlock);
    if constexpr (kRows == 2) tile_load<2>(result + result_stride);
    if constexpr (kRows == 2 && kColumns == 2) tile_load<3>(result + result_stride + kBlock);
  } else {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int tile = 0; tile < tiles; ++tile) {
    tile_load<4>(left);
    tile_load<6>(right);
    tile_multiply<0, 4, 6>();
    if constexpr (kColumns == 2) {
      tile_load<7>(right + right_stride);
      tile_multiply<1, 4, 7>();
    }
    if constexpr (kRows == 2) {
      tile_load<5>(left + left_stride);
      tile_multiply<2, 5, 6>();
      if constexpr (kColumns == 2) tile_multiply<3, 5, 7>();
    }
    left += kTile;
    right += kTile;
  }
  tile_store<0>(result);
  if constexpr (kColumns == 2) tile_store<1>(result + kBlock);
  if constexpr (kRows == 2) tile_store<2>(result + result_stride);
  if constexpr (kRows == 2 && kColumns == 2) tile_store<3>(result + result_stride + kBlock);
}

// The calling thread must have its tiles configured (tiles_begin).
inline void gemm_amx(Strips left, Strips right, int tiles, float* result, bool add) {
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(right.count) * kBlock;
  for (int i = 0; i < left.count; i += 2) {
    for (int j = 0; j < right.count; j += 2) {
      const bf16* rows = left.data + i * left.stride;
      const bf16* columns = right.data + j * right.stride;
      float* block = result + i * stride + static_cast<std::ptrdiff_t>(j) * kBlock;
      const auto run = [&](auto body) {
        body(tiles, rows, left.stride, columns, right.stride, block, stride, add);
      };
      const bool two_rows = i + 1 < left.count, two_columns = j + 1 < right.count;
      if (two_rows && two_columns)
        run(tile_block<2, 2>);
      else if (two_rows)
        run(tile_block<2, 1>);
      else if (two_columns)
        run(tile_block<1, 2>);
      else
        run(tile_block<1, 1>);
    }
  }
}

}  // namespace
}  // namespace ktbridge
