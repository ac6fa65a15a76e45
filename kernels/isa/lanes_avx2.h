// AVX2 + FMA: two registers each (see isa/lanes.h, which includes this).
#pragma once

#include "isa/lanes.h"

namespace ktbridge {
namespace {

inline Floats low_of(Words a) { return (Floats)_mm256_slli_epi32((__m256i)a, 16); }
inline Floats high_of(Words a) { return (Floats)_mm256_and_si256((__m256i)a, _mm256_set1_epi32(-65536)); }
inline Floats byte_bits(const std::uint8_t* p) {
  return (Floats)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats within(Floats a, Floats low, Floats high) {
  return _mm256_min_ps(high, _mm256_max_ps(low, a));  // keeps a NaN
}
inline Floats to_whole(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes load_first(const float* p, int count) {
  const __m256i order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return each<Lanes>([&](int i) {
    return _mm256_maskload_ps(p + 8 * i, _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8 * i), order));
  });
}
inline Lanes pick(const float (&eight)[8], Lanes a) {
  const __m256 table = _mm256_loadu_ps(eight);
  return each<Lanes>([&](int i) { return _mm256_permutevar8x32_ps(table, (__m256i)a.v[i]); });
}
inline Pairs sequence(Lanes a, Lanes b) {
  const auto pack = [](Lanes x) {
    return (Words)_mm256_permute4x64_epi64(
        _mm256_packus_epi32((__m256i)rounded(x.v[0]), (__m256i)rounded(x.v[1])), 0xd8);
  };
  return {{pack(a), pack(b)}};
}
inline void widen(Pairs a, Lanes& first, Lanes& second) {
  const auto eight = [](__m128i bits) { return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16); };
  const auto half = [&](Words a) {
    return Lanes{{eight(_mm256_castsi256_si128((__m256i)a)), eight(_mm256_extracti128_si256((__m256i)a, 1))}};
  };
  first = half(a.v[0]);
  second = half(a.v[1]);
}
inline void interleave(Pairs a, Pairs b, Pairs& first, Pairs& second) {
  const auto half = [](Words even, Words odd) {
    const __m256i x = _mm256_permute4x64_epi64((__m256i)even, 0xd8);
    const __m256i y = _mm256_permute4x64_epi64((__m256i)odd, 0xd8);
    return Pairs{{(Words)_mm256_unpacklo_epi16(x, y), (Words)_mm256_unpackhi_epi16(x, y)}};
  };
  first = half(a.v[0], b.v[0]);
  second = half(a.v[1], b.v[1]);
}
inline std::uint32_t at_least(Pairs a, std::uint16_t least) {
  const auto mask = [&](int i) { return (__m256i)at_least_mask(a.v[i], least); };
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(mask(0), mask(1)), 0xd8);
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
}
// 4 x 4 blocks, two side by side in registers whose halves are loaded from rows four apart, so that nothing
// has to cross the middle of a register. Eight rows at a time: rows a power of two apart share a set of L1,
// which holds eight lines.
inline void turn_rows(const bf16* rows, std::ptrdiff_t row, Pairs (&columns)[16]) {
  for (int half = 0; half < 2; ++half)
    for (int first = 0; first < 16; first += 4) {
      const bf16* from = rows + 8 * half * row + 2 * first;
      const auto four = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(from + i * row)); };
      const auto both = [&](int i) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(four(i)), four(i + 4), 1);
      };
      const __m256 a = both(0), b = both(1), c = both(2), d = both(3);
      const auto low = [](__m256 x, __m256 y) { return _mm256_castps_pd(_mm256_unpacklo_ps(x, y)); };
      const auto high = [](__m256 x, __m256 y) { return _mm256_castps_pd(_mm256_unpackhi_ps(x, y)); };
      const __m256d ab = low(a, b), cd = low(c, d), ba = high(a, b), dc = high(c, d);
      columns[first].v[half] = (Words)_mm256_unpacklo_pd(ab, cd);
      columns[first + 1].v[half] = (Words)_mm256_unpackhi_pd(ab, cd);
      columns[first + 2].v[half] = (Words)_mm256_unpacklo_pd(ba, dc);
      columns[first + 3].v[half] = (Words)_mm256_unpackhi_pd(ba, dc);
    }
}

}  // namespace
}  // namespace ktbridge
