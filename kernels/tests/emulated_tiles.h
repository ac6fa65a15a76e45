// gemm/tiles.h's names on ordinary memory, which is how gemm/amx.h is checked on machines without AMX.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/bf16.h"

namespace ktbridge {
namespace {

thread_local std::uint32_t tile_memory[8][16][16];

template <int kIndex>
inline void tile_zero() {
  __builtin_memset(tile_memory[kIndex], 0, sizeof tile_memory[kIndex]);
}
template <int kIndex>
inline void tile_load(const bf16* p, std::ptrdiff_t row) {
  for (int m = 0; m < 16; ++m)
    __builtin_memcpy(tile_memory[kIndex][m], p + m * row, sizeof tile_memory[kIndex][m]);
}
template <int kIndex>
inline void tile_load(const float* p) {
  __builtin_memcpy(tile_memory[kIndex], p, sizeof tile_memory[kIndex]);
}
template <int kIndex>
inline void tile_store(float* p) {
  __builtin_memcpy(p, tile_memory[kIndex], sizeof tile_memory[kIndex]);
}
template <int kSum, int kLeft, int kRight>
inline void tile_multiply() {
  const auto first = [](std::uint32_t pair) { return to_float(static_cast<bf16>(pair)); };
  const auto second = [](std::uint32_t pair) { return to_float(static_cast<bf16>(pair >> 16)); };
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float sum = __builtin_bit_cast(float, tile_memory[kSum][m][n]);
      for (int k = 0; k < 16; ++k) {
        const std::uint32_t left = tile_memory[kLeft][m][k], right = tile_memory[kRight][k][n];
        sum += first(left) * first(right) + second(left) * second(right);
      }
      tile_memory[kSum][m][n] = __builtin_bit_cast(std::uint32_t, sum);
    }
}

}  // namespace
}  // namespace ktbridge
