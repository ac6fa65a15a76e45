#include "moe/dropout.h"

#include "gemm/strip.h"

namespace ktbridge {
namespace {

std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

}  // namespace

DropSeeds drop_seeds(const Dropout& dropout, const Routing& routing) {
  DropSeeds seeds;
  seeds.threshold = dropout.threshold;
  if (!seeds.any()) return seeds;
  for (int p = 0; p < kProjections; ++p) {
    seeds.first[p].resize(routing.slots() + kStrip);
    seeds.second[p].resize(routing.slots() + kStrip);
  }
  for (int slot = 0; slot < routing.slots(); ++slot) {
    const int source = routing.source[slot];
    const std::uint64_t number =
        static_cast<std::uint64_t>(dropout.numbers == nullptr ? source : dropout.numbers[source]);
    for (int p = 0; p < kProjections; ++p) {
      const std::uint64_t z = mix64(dropout.key + (3 * number + p + 1) * 0x9e3779b97f4a7c15u);
      seeds.first[p][slot] = static_cast<std::uint32_t>(z);
      seeds.second[p][slot] = static_cast<std::uint32_t>(z >> 32);
    }
  }
  return seeds;
}

}  // namespace ktbridge
