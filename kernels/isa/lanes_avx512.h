// AVX-512 with BF16: one register each (see isa/lanes.h, which includes this).
#pragma once

#include <immintrin.h>

#include "common/bf16.h"

namespace ktbridge {
namespace {

struct Lanes {
  __m512 v;
};
struct Pairs {
  __m512i v;
};
using Split = Pairs;

inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
// The first `count` of 16 (none if it is negative); zeros behind. Nothing past them is read.
inline Lanes load_first(const float* p, int count) {
  const unsigned mask = count >= 16 ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1;
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p)};
}
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes every(float a) { return {_mm512_set1_ps(a)}; }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// An estimate good to 14 bits and one Newton step.
inline Lanes reciprocal(Lanes a) {
  const __m512 x = _mm512_rcp14_ps(a.v);
  return {_mm512_mul_ps(x, _mm512_fnmadd_ps(a.v, x, _mm512_set1_ps(2.f)))};
}
// A NaN in b is kept.
inline Lanes clamp(Lanes b, float low, float high) {
  return {_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), b.v))};
}
inline Lanes keep_within(Lanes a, Lanes b, float low, float high) {
  const __mmask16 above = _mm512_cmp_ps_mask(b.v, _mm512_set1_ps(low), _CMP_GE_OQ);
  return {_mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(above, b.v, _mm512_set1_ps(high), _CMP_LE_OQ), a.v)};
}
inline Lanes pick(const float (&eight)[8], Lanes a) {
  const __m512 table = _mm512_broadcast_f32x8(_mm256_loadu_ps(eight));  // the fourth bit changes nothing
  return {_mm512_permutexvar_ps(_mm512_castps_si512(a.v), table)};
}
inline Lanes nearest(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
// 2^a for whole numbers in [-126, 127].
inline Lanes power_of_two(Lanes a) {
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 23))};
}
inline float sum(Lanes a) { return _mm512_reduce_add_ps(a.v); }

inline Pairs same(std::uint32_t pair) { return {_mm512_set1_epi32(static_cast<int>(pair))}; }
inline Pairs load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store(void* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
inline void stream(void* p, Pairs a) { _mm512_stream_si512(static_cast<__m512i*>(p), a.v); }
inline Lanes low(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
inline Lanes high(Pairs a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(-65536)))};
}
inline Pairs sequence(Lanes a, Lanes b) { return {(__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)}; }
inline Pairs pairs(Lanes first, Lanes second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                         7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {_mm512_permutexvar_epi16(order, sequence(first, second).v)};
}
inline void widen(Pairs a, Lanes& first, Lanes& second) {
  const auto half = [](__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  };
  first.v = half(_mm512_castsi512_si256(a.v));
  second.v = half(_mm512_extracti64x4_epi64(a.v, 1));
}
inline void interleave(Pairs a, Pairs b, Pairs& first, Pairs& second) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  a.v = _mm512_permutexvar_epi64(order, a.v);
  b.v = _mm512_permutexvar_epi64(order, b.v);
  first.v = _mm512_unpacklo_epi16(a.v, b.v);
  second.v = _mm512_unpackhi_epi16(a.v, b.v);
}
inline void transpose(Pairs (&rows)[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i].v, rows[i + 1].v);
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
    rows[j].v = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    rows[8 + j].v = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    rows[4 + j].v = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[12 + j].v = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}
inline void turn_rows(const bf16* rows, std::ptrdiff_t row, Pairs (&columns)[16]) {
  for (int i = 0; i < 16; ++i) columns[i] = load_pairs(rows + i * row);
  transpose(columns);
}
inline Pairs operator+(Pairs a, Pairs b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Pairs operator*(Pairs a, Pairs b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Pairs operator^(Pairs a, Pairs b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int kBits>
inline Pairs shift_down(Pairs a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
inline std::uint32_t at_least(Pairs a, std::uint16_t least) {
  return _mm512_cmpge_epu16_mask(a.v, _mm512_set1_epi16(static_cast<short>(least)));
}
inline Pairs keep(Pairs a, std::uint32_t bits) { return {_mm512_maskz_mov_epi16(bits, a.v)}; }
inline Lanes keep(Lanes a, std::uint32_t bits) {
  return {_mm512_maskz_mov_ps(static_cast<__mmask16>(bits), a.v)};
}
inline Pairs keep_at_least(Pairs a, Pairs words, std::uint16_t least) {
  return keep(a, at_least(words, least));
}
inline Split split(Pairs a) { return a; }
inline Lanes dot(Lanes sum, std::uint32_t pair, Split right) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)), (__m512bh)right.v)};
}
inline Lanes from_bytes(const std::uint8_t* p) {  // 16 unsigned bytes -> their bits in 32-bit lanes
  return {_mm512_castsi512_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// 16 e4m3 bytes, divided by 256: put into place as halves (float16), whose bias is larger by 8. Their
// conversion takes subnormals as fast as others, where a product of subnormal float32 takes 150 cycles.
inline Lanes from_e4m3_by_256(const std::uint8_t* p) {
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16(0x3f80));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(bits, 8), _mm256_set1_epi16(-32768));
  return {_mm512_cvtph_ps(_mm256_or_si256(magnitude, sign))};
}
template <int kBits>
inline Lanes shift_left(Lanes a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), kBits))};
}
template <int kBits>
inline Lanes shift_right(Lanes a) {  // arithmetic
  return {_mm512_castsi512_ps(_mm512_srai_epi32(_mm512_castps_si512(a.v), kBits))};
}
inline Lanes bits_and(Lanes a, std::uint32_t mask) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32((int)mask)))};
}
inline Lanes bits_or(Lanes a, Lanes b) {
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
inline Lanes whole(Lanes bits) { return {_mm512_cvtepi32_ps(_mm512_castps_si512(bits.v))}; }

}  // namespace
}  // namespace ktbridge
