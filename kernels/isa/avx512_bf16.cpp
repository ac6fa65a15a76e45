#include "common/cpu.h"
#include "gemm/widened.h"
#include "isa/table.h"

namespace ktbridge {

const Kernels& kernels_avx512_bf16() {
  static const Kernels table = [] {
    Kernels kernels = vector_kernels();
    if (multiplies_floats_faster()) kernels.gemm = gemm_widened;
    return kernels;
  }();
  return table;
}

}  // namespace ktbridge
