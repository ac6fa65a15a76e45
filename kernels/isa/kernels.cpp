#include "isa/kernels.h"

#include <stdexcept>

#include "common/cpu.h"

namespace ktbridge {
namespace {

struct Isa {
  const char* name;
  bool (*runs)();
  const Kernels& (*kernels)();
};

// In rising order of preference.
constexpr Isa kIsas[] = {
    {"scalar", [] { return true; }, kernels_scalar},
    {"avx2", runs_avx2, kernels_avx2},
    {"avx512_bf16", runs_avx512_bf16, kernels_avx512_bf16},
    {"amx_bf16", runs_amx_bf16, kernels_amx_bf16},
};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.runs()) names.push_back(isa.name);
  return names;
}

const Kernels& kernels_for(const std::string& name) {
  for (const Isa& isa : kIsas)
    if (name == isa.name && isa.runs()) return isa.kernels();
  throw std::invalid_argument("this CPU runs no '" + name + "' kernels");
}

}  // namespace ktbridge
