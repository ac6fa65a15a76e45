// AMX's eight tile registers, all 16 rows of 64 bytes. kernels/tests/emulated_tiles.h has the same names.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/bf16.h"

namespace ktbridge {
namespace {

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

}  // namespace
}  // namespace ktbridge
