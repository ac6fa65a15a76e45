// Any x86-64 CPU: four registers of SSE2 each, and plain loops (see isa/lanes.h, which includes this).
#pragma once

#include "isa/lanes.h"

namespace ktbridge {
namespace {

inline Floats low_of(Words a) { return (Floats)(a << 16); }
inline Floats high_of(Words a) { return (Floats)(a & 0xffff0000u); }
inline Floats byte_bits(const std::uint8_t* p) { return (Floats)Words{p[0], p[1], p[2], p[3]}; }
inline Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats within(Floats a, Floats low, Floats high) {
  return _mm_min_ps(high, _mm_max_ps(low, a));  // keeps a NaN
}
// Adding and taking away 1.5 * 2^23 leaves the whole part.
inline Floats to_whole(Floats a) { return (a + 12582912.f) - 12582912.f; }
inline Lanes load_first(const float* p, int count) {
  float values[16] = {};
  for (int i = 0; i < 16 && i < count; ++i) values[i] = p[i];
  return load(values);
}
inline Lanes pick(const float (&eight)[8], Lanes a) {
  std::uint32_t bits[16];
  float values[16];
  store(reinterpret_cast<float*>(bits), a);
  for (int i = 0; i < 16; ++i) values[i] = eight[bits[i] & 7];
  return load(values);
}
inline Pairs sequence(Lanes a, Lanes b) {
  std::uint32_t words[32];
  bf16 values[32];
  store(words, each<Pairs>([&](int i) { return rounded(a.v[i]); }));
  store(words + 16, each<Pairs>([&](int i) { return rounded(b.v[i]); }));
  for (int i = 0; i < 32; ++i) values[i] = static_cast<bf16>(words[i]);
  return load_pairs(values);
}
inline void interleave(Pairs a, Pairs b, Pairs& first, Pairs& second) {
  const auto part = [&](int i) {
    const __m128i x = (__m128i)a.v[i / 2], y = (__m128i)b.v[i / 2];
    return (Words)(i % 2 == 0 ? _mm_unpacklo_epi16(x, y) : _mm_unpackhi_epi16(x, y));
  };
  first = each<Pairs>(part);
  second = each<Pairs>([&](int i) { return part(4 + i); });
}
inline void widen(Pairs a, Lanes& first, Lanes& second) {
  Pairs low_half, high_half;
  interleave(Pairs{}, a, low_half, high_half);
  first = each<Lanes>([&](int i) { return (Floats)low_half.v[i]; });
  second = each<Lanes>([&](int i) { return (Floats)high_half.v[i]; });
}
inline void turn_rows(const bf16* rows, std::ptrdiff_t row, Pairs (&columns)[16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j)
      __builtin_memcpy(reinterpret_cast<char*>(&columns[j]) + 4 * i, rows + i * row + 2 * j, 4);
}
inline std::uint32_t at_least(Pairs a, std::uint16_t least) {
  bf16 values[32];
  store(values, a);
  std::uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= values[i] >= least ? 1u << i : 0u;
  return bits;
}

}  // namespace
}  // namespace ktbridge
