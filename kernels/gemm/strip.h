// Strips: the only shape in which matrices meet.
//
// A strip is 16 rows of the left operand, or 16 columns of the right one, over the whole reduction,
// padded with zeros to a multiple of 32. It is a run of *tiles*, 1 KB each, one for every 32 steps of the
// reduction:
//
//     left tile   [16 rows][32 steps]                 bf16, as the rows lie in memory
//     right tile  [16 step pairs][16 columns][2]      bf16, what AMX and vdpbf16ps want on the right
//
// A right tile is a left tile with its 32-bit pairs transposed (docs/kernels.md says who pays for that).
// Results are blocks of 16 x 16 float32, row-major in themselves.
#pragma once

#include <cstddef>

#include "common/bf16.h"

namespace ktbridge {

constexpr int kStrip = 16;   // rows or columns of a strip
constexpr int kSteps = 32;   // reduction steps of a tile
constexpr int kTile = 512;   // bf16 elements of a tile
constexpr int kBlock = 256;  // floats of a result block

constexpr int ceil_div(int value, int unit) { return (value + unit - 1) / unit; }
constexpr int tiles_of(int reduction) { return ceil_div(reduction, kSteps); }
constexpr int strips_of(int count) { return ceil_div(count, kStrip); }

// `count` strips, the first at `data`, each `stride` elements after the one before. Left strips may also be
// rows of a matrix where it lies, whose tiles are 16 rows apart by `row` elements and follow each other
// within the rows.
struct Strips {
  const bf16* data = nullptr;
  std::ptrdiff_t stride = 0;
  int count = 0;
  std::ptrdiff_t row = kSteps, tile = kTile;
  bool cold = false;  // left only: not in cache yet, so read ahead
  int live = kStrip;  // the last strip's rows or columns behind these are zeros
};

// left x right over `tiles` tiles of the reduction.
struct Product {
  Strips left, right;
  int tiles;
};

// result[i][j] = the sum over `count` products of left strip i x right strip j, on top of what is there if
// `add`. All products have as many left strips and as many right strips; blocks are laid out
// [left.count][right.count][16][16]. A sum takes its terms in order, so a reduction may be cut anywhere and
// added up in several calls: the bits are the same.
using Gemm = void (*)(const Product* products, int count, float* result, bool add);

}  // namespace ktbridge
