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
  tile_load<4>(operands[0], kSteps);
  tile_load<5>(operands[1], kSteps);
  tile_load<6>(operands[2], kSteps);
  tile_load<7>(operands[3], kSteps);
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (long i = 0; i < rounds; ++i) {
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  }
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
