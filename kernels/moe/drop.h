// LoRA's dropout on strips and result blocks (moe/dropout.h says which elements it drops).
#pragma once

#include "isa/kernels.h"
#include "isa/lanes.h"

namespace ktbridge {
namespace {

constexpr std::uint32_t kColumnStep = 0x9e3779b9u;  // of neighbouring pairs of columns

// 32 bits for a pair of columns in each lane; `at` is first + (column / 2) kColumnStep.
inline Pairs drop_words(Pairs at, Pairs second) {
  Pairs v = (at ^ shift_down<16>(at)) * same(0x7feb352du);
  v = v ^ second;
  v = (v ^ shift_down<15>(v)) * same(0x846ca68bu);
  return v ^ shift_down<16>(v);
}

inline void drop_right(const bf16* strip, int tiles, const Seeds& seeds, bf16* target) {
  const Pairs second = load_pairs(seeds.second), step = same(kColumnStep);
  const std::uint16_t threshold = seeds.threshold;
  Pairs at = load_pairs(seeds.first);
  for (int i = 0; i < tiles * kStrip; ++i, strip += kSteps, target += kSteps, at = at + step)
    store(target, keep_at_least(load_pairs(strip), drop_words(at, second), threshold));
}

inline void kept_bits(const Seeds& seeds, int rows, int column, int words, std::uint32_t* bits) {
  std::uint32_t steps[kStrip];
  for (int i = 0; i < kStrip; ++i) steps[i] = (column / 2 + i) * kColumnStep;
  const Pairs columns = load_pairs(steps), step = same(kStrip * kColumnStep);
  for (int row = 0; row < rows; ++row) {
    const Pairs second = same(seeds.second[row]);
    Pairs at = same(seeds.first[row]) + columns;
    for (int word = 0; word < words; ++word, at = at + step)
      *bits++ = at_least(drop_words(at, second), seeds.threshold);
  }
}

inline void add_kept(float* blocks, const float* part, const std::uint32_t* bits, int words) {
  for (int r = 0; r < kStrip; ++r, bits += words, blocks += kStrip, part += kStrip) {
    store(blocks, load(blocks) + keep(load(part), *bits));
    store(blocks + kBlock, load(blocks + kBlock) + keep(load(part + kBlock), *bits >> kStrip));
  }
}

}  // namespace
}  // namespace ktbridge
