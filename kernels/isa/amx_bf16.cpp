// AMX for the products; everything else as AVX-512 BF16, which every CPU with AMX has.
#include "gemm/amx.h"
#include "isa/table.h"

namespace ktbridge {
namespace {

// Operands like real ones: with zeros the tiles draw less power and the clock rises by a fifth.
double peak_amx(long rounds) {
  alignas(64) bf16 operands[4][kTile];
  std::uint32_t random = 1;
  for (bf16(&tile)[kTile] : operands)
    for (bf16& value : tile) {
      random = random * 1664525u + 1013904223u;
      value = static_cast<bf16>(0x3c00u | (random >> 16 & 0x81ffu));  // 2^-7 .. 2^-3, either sign
    }
  unroll<4>([&]<int i>() {
    tile_zero<i>();
    tile_load<4 + i>(operands[i], kSteps);
  });
  for (long round = 0; round < rounds; ++round)
    unroll<4>([]<int i>() { tile_multiply<i, 4 + i / 2, 6 + i % 2>(); });
  return static_cast<double>(rounds) * 4 * 2 * kStrip * kStrip * kSteps;
}

}  // namespace

const Kernels& kernels_amx_bf16() {
  static const Kernels table = [] {
    Kernels kernels = vector_kernels();
    kernels.begin = tiles_begin;
    kernels.end = tiles_end;
    kernels.gemm = gemm_amx;
    kernels.wants_aligned_rows = true;
    kernels.peak = peak_amx;
    return kernels;
  }();
  return table;
}

}  // namespace ktbridge
