#include "isa/table.h"

namespace ktbridge {

const Kernels& kernels_scalar() {
  static const Kernels table = vector_kernels();
  return table;
}

}  // namespace ktbridge
