#include "isa/table.h"

namespace ktbridge {

const Kernels& kernels_avx2() {
  static const Kernels table = vector_kernels();
  return table;
}

}  // namespace ktbridge
