#include "gemm/widened.h"
#include "isa/table.h"

namespace ktbridge {

const Kernels& kernels_avx512_bf16() {
  static const Kernels table = [] {
    Kernels kernels = vector_kernels();
    // There float32 multiply-adds run at twice the rate of vdpbf16ps; on AMD's CPUs at half of it.
    if (__builtin_cpu_is("intel")) {
      kernels.gemm = gemm_widened;
      kernels.peak = peak_float;
    }
    return kernels;
  }();
  return table;
}

}  // namespace ktbridge
