// AVX-512 with BF16: one register each (see isa/lanes.h, which includes this).
#pragma once

#include "isa/lanes.h"

namespace ktbridge {
namespace {

using Split = Pairs;

inline __m512i bits_of(Pairs a) { return (__m512i)a.v[0]; }
inline Pairs pairs_of(__m512i bits) { return {{(Words)bits}}; }

inline Floats low_of(Words a) { return (Floats)_mm512_slli_epi32((__m512i)a, 16); }
inline Floats high_of(Words a) { return (Floats)_mm512_and_si512((__m512i)a, _mm512_set1_epi32(-65536)); }
inline Floats byte_bits(const std::uint8_t* p) {
  return (Floats)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats within(Floats a, Floats low, Floats high) {
  return _mm512_min_ps(high, _mm512_max_ps(low, a));  // keeps a NaN
}
inline Floats to_whole(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }

// The first `count` of 16 (none if it is negative); zeros behind. Nothing past them is read.
inline Lanes load_first(const float* p, int count) {
  const unsigned mask = count >= 16 ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1;
  return {{_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p)}};
}
// An estimate good to 14 bits and one Newton step.
inline Lanes reciprocal(Lanes a) {
  const __m512 x = _mm512_rcp14_ps(a.v[0]);
  return {{_mm512_mul_ps(x, _mm512_fnmadd_ps(a.v[0], x, _mm512_set1_ps(2.f)))}};
}
inline Lanes pick(const float (&eight)[8], Lanes a) {
  const __m512 table = _mm512_broadcast_f32x8(_mm256_loadu_ps(eight));  // the fourth bit changes nothing
  return {{_mm512_permutexvar_ps(_mm512_castps_si512(a.v[0]), table)}};
}
inline float sum(Lanes a) { return _mm512_reduce_add_ps(a.v[0]); }
inline void stream(void* p, Pairs a) { _mm512_stream_si512(static_cast<__m512i*>(p), bits_of(a)); }
inline Pairs sequence(Lanes a, Lanes b) { return pairs_of((__m512i)_mm512_cvtne2ps_pbh(b.v[0], a.v[0])); }
// The instruction above takes subnormal numbers for zeros.
inline Pairs sequence_exactly(Lanes a, Lanes b) {
  const auto half = [](Lanes x) {
    const Words bits = (Words)x.v[0], up = bits + ((bits >> 16 & 1u) + 0x7fffu);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)up, 16));
  };
  return pairs_of(_mm512_inserti64x4(_mm512_castsi256_si512(half(a)), half(b), 1));
}
inline Pairs pairs(Lanes first, Lanes second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return pairs_of(_mm512_permutexvar_epi16(order, bits_of(sequence(first, second))));
}
inline void widen(Pairs a, Lanes& first, Lanes& second) {
  const auto half = [](__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  };
  first.v[0] = half(_mm512_castsi512_si256(bits_of(a)));
  second.v[0] = half(_mm512_extracti64x4_epi64(bits_of(a), 1));
}
inline void interleave(Pairs a, Pairs b, Pairs& first, Pairs& second) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  const __m512i x = _mm512_permutexvar_epi64(order, bits_of(a));
  const __m512i y = _mm512_permutexvar_epi64(order, bits_of(b));
  first = pairs_of(_mm512_unpacklo_epi16(x, y));
  second = pairs_of(_mm512_unpackhi_epi16(x, y));
}
inline void transpose(Pairs (&rows)[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(bits_of(rows[i]), bits_of(rows[i + 1]));
    a[i + 1] = _mm512_unpackhi_epi32(bits_of(rows[i]), bits_of(rows[i + 1]));
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  // b[4q + j] now holds rows 4q..4q+3 of columns j, j+4, j+8, j+12, one in each 128-bit lane.
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    rows[j] = pairs_of(_mm512_shuffle_i32x4(even_low, even_high, 0x88));
    rows[8 + j] = pairs_of(_mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    rows[4 + j] = pairs_of(_mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    rows[12 + j] = pairs_of(_mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}
inline void turn_rows(const bf16* rows, std::ptrdiff_t row, Pairs (&columns)[16]) {
  for (int i = 0; i < 16; ++i) columns[i] = load_pairs(rows + i * row);
  transpose(columns);
}
inline std::uint32_t at_least(Pairs a, std::uint16_t least) {
  return _mm512_cmpge_epu16_mask(bits_of(a), _mm512_set1_epi16(static_cast<short>(least)));
}
inline Pairs keep(Pairs a, std::uint32_t bits) { return pairs_of(_mm512_maskz_mov_epi16(bits, bits_of(a))); }
inline Lanes keep(Lanes a, std::uint32_t bits) {
  return {{_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), a.v[0])}};
}
inline Pairs keep_at_least(Pairs a, Pairs words, std::uint16_t least) {
  return keep(a, at_least(words, least));
}
inline Split split(Pairs a) { return a; }
inline Lanes dot(Lanes sum, std::uint32_t pair, Split right) {
  return {{_mm512_dpbf16_ps(sum.v[0], (__m512bh)bits_of(same(pair)), (__m512bh)bits_of(right))}};
}

// 16 e4m3 bytes, divided by 256: put into place as halves (float16), whose bias is larger by 8. Their
// conversion takes subnormals as fast as others, where a product of subnormal float32 takes 150 cycles.
inline Lanes from_e4m3_by_256(const std::uint8_t* p) {
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16(0x3f80));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(bits, 8), _mm256_set1_epi16(-32768));
  return {{_mm512_cvtph_ps(_mm256_or_si256(magnitude, sign))}};
}

}  // namespace
}  // namespace ktbridge
