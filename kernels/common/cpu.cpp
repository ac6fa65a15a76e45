#include "common/cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace ktbridge {
namespace {

constexpr Isa kAll[] = {Isa::scalar, Isa::avx2, Isa::avx512_bf16, Isa::amx_bf16};

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool bit(unsigned value, int index) { return (value >> index) & 1u; }

// The register state the operating system saves on a context switch (XCR0). A CPU flag without it
// would still end in SIGILL.
std::uint64_t saved_state() {
  if (!bit(cpuid(1).ecx, 27)) return 0;  // OSXSAVE
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

// Linux hands out AMX's 8 KB of tile state only to processes that ask (arch_prctl, since 5.16); the
// answer holds for all threads started later. 0, or the errno of the refusal.
int refused_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const int error = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
  return error;
}

bool runs(Isa isa) {
  const std::uint64_t state = saved_state();
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xe6) == 0xe6;
  const Registers one = cpuid(1), seven = cpuid(7), seven_one = cpuid(7, 1);
  switch (isa) {
    case Isa::scalar: return true;
    case Isa::avx2:  // Haswell, Zen and later: AVX2 + FMA
      return ymm && bit(seven.ebx, 5) && bit(one.ecx, 12);
    case Isa::avx512_bf16:  // Cooper Lake, Sapphire Rapids, Zen 4 and later: AVX-512 F, DQ, BW, VL, BF16
      return zmm && bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31) &&
             bit(seven_one.eax, 5);
    case Isa::amx_bf16:  // Sapphire Rapids and later: AMX tiles with BF16, beside AVX-512 BF16
      return runs(Isa::avx512_bf16) && (state & 0x60000) == 0x60000 && bit(seven.edx, 22) &&
             bit(seven.edx, 24) && refused_tiles() == 0;
  }
  return false;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::amx_bf16: return "amx_bf16";
    default: return "scalar";
  }
}

std::string why_no_tiles() {
  const Registers seven = cpuid(7);
  if (!bit(seven.edx, 22) || !bit(seven.edx, 24) || runs(Isa::amx_bf16)) return "";
  if ((saved_state() & 0x60000) != 0x60000) return "the operating system doesn't save AMX's registers";
  if (refused_tiles() == ENOSPC) return "a thread's alternate signal stack is too small for AMX's registers";
  return std::string("arch_prctl was refused: ") + std::strerror(refused_tiles());
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> available = [] {  // in a virtual machine CPUID takes 150 microseconds
    std::vector<Isa> result;
    for (Isa isa : kAll)
      if (runs(isa)) result.push_back(isa);
    return result;
  }();
  return available;
}

Isa choose_isa(const std::string& wish) {
  const std::vector<Isa>& available = available_isas();
  std::string name = wish;
  const char* forced = std::getenv("KTBRIDGE_ISA");
  if (name == "auto" && forced != nullptr && *forced != '\0') name = forced;
  if (name == "auto") return available.back();
  std::string names;
  for (Isa isa : available) {
    if (name == isa_name(isa)) return isa;
    names += names.empty() ? isa_name(isa) : std::string(", ") + isa_name(isa);
  }
  for (Isa isa : kAll)
    if (name == isa_name(isa))
      throw std::invalid_argument("this CPU can't run the '" + name + "' kernels; it can run: " + names);
  throw std::invalid_argument("there are no '" + name + "' kernels; this CPU can run: auto, " + names);
}

bool multiplies_floats_faster() {
  const Registers vendor = cpuid(0);
  return vendor.ebx == signature_INTEL_ebx && vendor.ecx == signature_INTEL_ecx &&
         vendor.edx == signature_INTEL_edx;
}

}  // namespace ktbridge
