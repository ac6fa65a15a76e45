#include "common/cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ktbridge {
namespace {

// Bits of EDX of CPUID's leaf 7: compilers name them otherwise, or not at all.
constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;

bool has_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxTile) && (edx & kAmxBf16);
}

// Whether the operating system saves tiles on a context switch (XCR0). A CPU flag without it would still end
// in SIGILL.
bool saves_tiles() {
  constexpr unsigned kTiles = 0x60000;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTiles) == kTiles;
}

// Linux hands out AMX's 8 KB of tile state only to processes that ask (arch_prctl, since 5.16); the
// answer holds for all threads started later. 0, or the errno of the refusal.
int refused_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const int error = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
  return error;
}

}  // namespace

// The compiler's own checks look at what the operating system saves, too.
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool runs_avx512_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
}

bool runs_amx_bf16() {
  static const bool runs = runs_avx512_bf16() && has_tiles() && saves_tiles() && refused_tiles() == 0;
  return runs;
}

std::string why_no_tiles() {
  if (!runs_avx512_bf16() || !has_tiles() || runs_amx_bf16()) return "";
  if (!saves_tiles()) return "the operating system doesn't save AMX's registers";
  if (refused_tiles() == ENOSPC) return "a thread's alternate signal stack is too small for AMX's registers";
  return std::string("arch_prctl was refused: ") + std::strerror(refused_tiles());
}

}  // namespace ktbridge
