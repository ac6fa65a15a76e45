// LoRA's dropout: which elements of its input each projection's A doesn't see, without a stored mask.
//
// Element (slot, column) of a projection is dropped if 16 bits made of the call's key, the projection, the
// slot's number and the column are below the threshold:
//     z = mix64(key + (3 number + projection + 1) 0x9e3779b97f4a7c15)         first, second: z's low, high
//     half v = mix32(first + (column / 2) 0x9e3779b9; second)                      low half: even columns,
//     high: odd
// mix64 is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014); mix32
// is a hash of 32 bits (Wellons' "lowbias32") into whose middle `second` goes (moe/drop.h). A slot's number
// is its place in [tokens, top_k] of the pass that it belongs to, so the order of work, threads and who
// computes which expert don't change a mask. ktbridge/experts/dropout.py is the same in torch.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "isa/kernels.h"
#include "moe/routing.h"

namespace ktbridge {

enum Projection { kGate, kUp, kDown, kProjections };

struct Dropout {
  std::uint64_t key = 0;
  std::uint16_t threshold = 0;            // of 65536; 0: nothing is dropped
  const std::int64_t* numbers = nullptr;  // [tokens * top_k] numbers of the slots; null: 0, 1, 2 ...
};

// The seeds of a pass's slots, by slot; for 16 slots more than there are, so that strips may be read whole.
struct DropSeeds {
  std::uint16_t threshold = 0;
  std::array<std::vector<std::uint32_t>, kProjections> first, second;

  bool any() const { return threshold != 0; }
  Seeds from(Projection projection, int slot) const {
    return {first[projection].data() + slot, second[projection].data() + slot, threshold};
  }
};

inline std::uint64_t mix64(std::uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

inline DropSeeds drop_seeds(const Dropout& dropout, const Routing& routing) {
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
