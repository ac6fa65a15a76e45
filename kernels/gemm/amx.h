// The strip product on AMX tiles: blocks of 2 x 3 or 3 x 2, so that loaded tiles are used more than once.
// Operands stream from L2 over what moe/pass.h gives of the reduction; blocking it for L1 costs more in
// sums stored and reloaded than it saves (docs/kernel-log.md).
#pragma once

#include <algorithm>
#include <utility>

#include "gemm/strip.h"
#if defined(__AMX_BF16__) || defined(__AMXBF16__)  // the second: clang before 16
#include "gemm/tiles.h"
#elif defined(KTBRIDGE_TESTS)
#include "tests/emulated_tiles.h"
#else
#error "compile this file for AMX (-mamx-tile -mamx-bf16)"
#endif

namespace ktbridge {
namespace {

// Tiles ahead of the one in use that a first reading of cold rows asks for.
constexpr int kTilesAhead = 4;

// Calls body.template operator()<i>() for i in [0, kCount).
template <int kCount, class Body>
inline void unroll(Body body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// One step of the reduction. Sums are taken along a snake, row by row, so that at each turn a right tile
// serves twice. Six sums leave one register for each side: a step of 2 x 3 loads 7 tiles for 6 products,
// two of them loaded just before, so 5 come from L2 where 2 x 2 takes 4 for 4 products.
template <int kRows, int kColumns>
inline void tile_step(const bf16* left, std::ptrdiff_t row, std::ptrdiff_t left_stride, const bf16* right,
                      std::ptrdiff_t right_stride) {
  constexpr int kLeft = kRows * kColumns, kRight = kLeft + 1, kRights = 8 - kRight;
  unroll<kRows * kColumns>([=]<int kAt>() {
    constexpr int i = kAt / kColumns, turn = kAt % kColumns, j = i % 2 == 0 ? turn : kColumns - 1 - turn;
    constexpr int loads = kAt - i, at = kRight + loads % kRights;  // right tiles loaded before this one
    if constexpr (turn == 0) tile_load<kLeft>(left + i * left_stride, row);
    if constexpr (turn > 0 || i == 0) tile_load<at>(right + j * right_stride, kSteps);
    tile_multiply<i * kColumns + j, kLeft, at>();
  });
}

// Of the rows that come next, so many lines with each tile at most; kMostAsked is what memory delivers.
constexpr int kMostAsked = 8;

// Cold rows come in pairs of strips, one pair after the other. The first block reads them; where it is the
// `kOnly` one, it asks for the beginning of the next pair, a row with each tile.
template <int kRows, int kColumns, bool kOnly>
inline void cold_product(const Product& product, const bf16* left, const bf16* right) {
  const std::ptrdiff_t row = product.left.row, left_stride = product.left.stride;
  const std::ptrdiff_t step = product.left.tile, right_stride = product.right.stride;
  const bf16* next = left + 2 * left_stride;
  for (int tile = 0; tile < product.tiles; ++tile) {
    if constexpr (kOnly)
      if (tile < 2 * kStrip) {
        for (int ahead = 0; ahead < kTilesAhead; ++ahead) __builtin_prefetch(next + ahead * step, 0, 2);
        next += tile + 1 == kStrip ? left_stride - (kStrip - 1) * row : row;
      }
    if (tile + kTilesAhead < product.tiles)
      for (int r = 0; r < kRows * kStrip; ++r)
        __builtin_prefetch(left + r / kStrip * left_stride + r % kStrip * row + kTilesAhead * step);
    tile_step<kRows, kColumns>(left, row, left_stride, right, right_stride);
    left += step;
    right += kTile;
  }
}

// Rows that are in cache. With each tile it asks for `lines` rows' lines of the next pair, from tile
// `from`.
template <int kRows, int kColumns>
inline void warm_product(const Product& product, const bf16* left, const bf16* right, int from, int lines) {
  const std::ptrdiff_t row = product.left.row, left_stride = product.left.stride;
  const std::ptrdiff_t step = product.left.tile, right_stride = product.right.stride;
  const bf16* next = left + 2 * left_stride + from * step;
  int r = 0;
  for (int tile = 0; tile < product.tiles; ++tile) {
    for (int line = r; line < r + lines; ++line)
      __builtin_prefetch(next + line / kStrip * left_stride + line % kStrip * row, 0, 2);
    r += lines;
    if (r >= 2 * kStrip) {
      r = 0;
      next += step;
    }
    tile_step<kRows, kColumns>(left, row, left_stride, right, right_stride);
    left += step;
    right += kTile;
  }
}

template <int kRows, int kColumns>
inline void tile_block(const Product* products, int count, int i, int j, float* result, bool add) {
  const int columns = products->right.count;
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(columns) * kBlock;
  float* block = result + i * stride + static_cast<std::ptrdiff_t>(j) * kBlock;
  const auto at = [=](int sum) { return block + sum / kColumns * stride + sum % kColumns * kBlock; };
  if (add)
    unroll<kRows * kColumns>([=]<int sum>() { tile_load<sum>(at(sum)); });
  else
    unroll<kRows * kColumns>([]<int sum>() { tile_zero<sum>(); });
  for (int p = 0; p < count; ++p) {
    const Product& product = products[p];
    const bf16* left = product.left.data + i * product.left.stride;
    const bf16* right = product.right.data + j * product.right.stride;
    if (!product.left.cold) {
      warm_product<kRows, kColumns>(product, left, right, 0, 0);
    } else if (j > 0) {  // blocks behind the first share what comes next; lines are a power of two
      const int blocks = std::max(1, (columns - 1) / 3),
                share = 1 << (31 - __builtin_clz(2 * kStrip / blocks));
      const int lines = std::min(kMostAsked, share), before = (j - 1) / 3 * product.tiles;
      warm_product<kRows, kColumns>(product, left, right, before * lines / (2 * kStrip), lines);
    } else if (kColumns == columns) {
      cold_product<kRows, kColumns, true>(product, left, right);
    } else {
      cold_product<kRows, kColumns, false>(product, left, right);
    }
  }
  unroll<kRows * kColumns>([=]<int sum>() { tile_store<sum>(at(sum)); });
}

// Cuts `left` strips into threes and twos as far as that goes.
inline int strips_at_once(int left) { return left == 4 ? 2 : std::min(left, 3); }

// The calling thread must have its tiles configured (tiles_begin).
inline void gemm_amx(const Product* products, int count, float* result, bool add) {
  using Block = void (*)(const Product*, int, int, int, float*, bool);
  static constexpr Block kBlocks[3][3] = {{tile_block<1, 1>, tile_block<1, 2>, tile_block<1, 3>},
                                          {tile_block<2, 1>, tile_block<2, 2>, tile_block<2, 3>},
                                          {tile_block<3, 1>, tile_block<3, 2>, nullptr}};
  const int rows = products->left.count, columns = products->right.count;
  // The longer side is cut into threes. Cold rows come in pairs, to be read once.
  const bool wide = products->left.cold || columns > rows;
  for (int i = 0, m; i < rows; i += m) {
    m = wide ? std::min(2, rows - i) : strips_at_once(rows - i);
    for (int j = 0, n; j < columns; j += n) {
      n = wide ? strips_at_once(columns - j) : std::min(2, columns - j);
      kBlocks[m - 1][n - 1](products, count, i, j, result, add);
    }
  }
}

}  // namespace
}  // namespace ktbridge
