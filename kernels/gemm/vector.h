// The strip product on vector registers: kRows x kColumns strips' worth of sums stay in registers while
// the reduction runs. Written once over isa/lanes.h.
#pragma once

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
inline void vector_block(int tiles, const bf16* left, const bf16* right, std::ptrdiff_t right_stride,
                         float* result, bool add) {
  Lanes sums[kVectorRows][kColumns];
  for (int m = 0; m < kVectorRows; ++m)
    for (int n = 0; n < kColumns; ++n)
      sums[m][n] = add ? load(result + n * kBlock + m * kStrip) : every(0.f);
  for (int tile = 0; tile < tiles; ++tile) {
    for (int k = 0; k < kSteps / 2; ++k) {
      Split columns[kColumns];
      for (int n = 0; n < kColumns; ++n)
        columns[n] = split(load_pairs(right + n * right_stride + k * 2 * kStrip));
      for (int m = 0; m < kVectorRows; ++m) {
        std::uint32_t pair;
        __builtin_memcpy(&pair, left + m * kSteps + 2 * k, sizeof pair);
        for (int n = 0; n < kColumns; ++n) sums[m][n] = dot(sums[m][n], pair, columns[n]);
      }
    }
    left += kTile;
    right += kTile;
  }
  for (int m = 0; m < kVectorRows; ++m)
    for (int n = 0; n < kColumns; ++n) store(result + n * kBlock + m * kStrip, sums[m][n]);
}

inline void gemm_vector(Strips left, Strips right, int tiles, float* result, bool add) {
  for (int i = 0; i < left.count; ++i) {
    const bf16* rows = left.data + i * left.stride;
    for (int j = 0; j < right.count;) {
      const bf16* columns = right.data + j * right.stride;
      float* block = result + (static_cast<std::ptrdiff_t>(i) * right.count + j) * kBlock;
      const bool wide = kVectorColumns == 2 && j + 2 <= right.count;
      for (int m = 0; m < kStrip; m += kVectorRows) {
        if (wide)
          vector_block<kVectorColumns>(tiles, rows + m * kSteps, columns, right.stride, block + m * kStrip, add);
        else
          vector_block<1>(tiles, rows + m * kSteps, columns, right.stride, block + m * kStrip, add);
      }
      j += wide ? 2 : 1;
    }
  }
}

}  // namespace
}  // namespace ktbridge
