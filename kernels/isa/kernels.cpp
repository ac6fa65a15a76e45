#include "isa/kernels.h"

namespace ktbridge {

const Kernels& kernels_for(Isa isa) {
  switch (isa) {
    case Isa::amx_bf16: return kernels_amx_bf16();
    case Isa::avx512_bf16: return kernels_avx512_bf16();
    case Isa::avx2: return kernels_avx2();
    default: return kernels_scalar();
  }
}

}  // namespace ktbridge
