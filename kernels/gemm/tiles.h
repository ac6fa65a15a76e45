// AMX's eight tile registers, all 16 rows of 64 bytes. Without AMX at compile time the same names work on
// ordinary memory, which is how kernels/tests check gemm/amx.h on machines that have none; the library
// itself never uses that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/bf16.h"

namespace ktbridge {
namespace {

#if defined(__AMX_BF16__)

// LDTILECFG's operand (Intel SDM volume 1, section 18.2).
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Assembly because the compilers' own names are macros that want literal register numbers, and GCC's
// LDTILECFG doesn't say that it reads all 64 bytes.
inline void tiles_begin() {
  const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
// Gives the tile state back, so that context switches needn't save it.
inline void tiles_end() { asm volatile("tilerelease"); }

template <int kIndex>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kIndex));
}
// Rows of 32 bf16, `row` elements apart.
template <int kIndex>
inline void tile_load(const bf16* p, std::ptrdiff_t row) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row * 2), "i"(kIndex) : "memory");
}
template <int kIndex>
inline void tile_load(const float* p) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(64L), "i"(kIndex) : "memory");
}
template <int kIndex>
inline void tile_store(float* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(64L), "i"(kIndex) : "memory");
}
template <int kSum, int kLeft, int kRight>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

#else

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

#endif

}  // namespace
}  // namespace ktbridge
