// AMX for the products; everything else as AVX-512 BF16, which every CPU with AMX has.
#include "gemm/amx.h"
#include "isa/table.h"

namespace ktbridge {
namespace {

double peak_amx(long rounds) {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  tile_zero<4>();
  tile_zero<5>();
  tile_zero<6>();
  tile_zero<7>();
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
    kernels.peak = peak_amx;
    return kernels;
  }();
  return table;
}

}  // namespace ktbridge
