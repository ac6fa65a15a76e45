#include "isa/table.h"

namespace ktbridge {

const Kernels& kernels_avx512_bf16() {
  static const Kernels table = vector_kernels();
  return table;
}

}  // namespace ktbridge
