// AVX2 + FMA: two registers each (see isa/lanes.h, which includes this).
#pragma once

#include <immintrin.h>

#include "common/bf16.h"

namespace ktbridge {
namespace {

struct Lanes {
  __m256 v[2];
};
struct Pairs {
  __m256i v[2];
};
struct Split {
  Lanes first, second;
};

// Both halves at once: f is applied to half 0 and half 1.
template <class F>
inline Lanes halves(F f) {
  return {{f(0), f(1)}};
}
inline Lanes load(const float* p) {
  return halves([&](int i) { return _mm256_loadu_ps(p + 8 * i); });
}
inline Lanes load_first(const float* p, int count) {
  const __m256i order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return halves([&](int i) {
    return _mm256_maskload_ps(p + 8 * i, _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8 * i), order));
  });
}
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
inline Lanes every(float a) {
  return halves([&](int) { return _mm256_set1_ps(a); });
}
inline Lanes operator+(Lanes a, Lanes b) {
  return halves([&](int i) { return _mm256_add_ps(a.v[i], b.v[i]); });
}
inline Lanes operator-(Lanes a, Lanes b) {
  return halves([&](int i) { return _mm256_sub_ps(a.v[i], b.v[i]); });
}
inline Lanes operator*(Lanes a, Lanes b) {
  return halves([&](int i) { return _mm256_mul_ps(a.v[i], b.v[i]); });
}
inline Lanes reciprocal(Lanes a) {
  return halves([&](int i) { return _mm256_div_ps(_mm256_set1_ps(1.f), a.v[i]); });
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return halves([&](int i) { return _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i]); });
}
inline Lanes clamp(Lanes b, float low, float high) {
  return halves([&](int i) {
    return _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), b.v[i]));
  });
}
inline Lanes keep_within(Lanes a, Lanes b, float low, float high) {
  return halves([&](int i) {
    const __m256 above = _mm256_cmp_ps(b.v[i], _mm256_set1_ps(low), _CMP_GE_OQ);
    const __m256 below = _mm256_cmp_ps(b.v[i], _mm256_set1_ps(high), _CMP_LE_OQ);
    return _mm256_and_ps(a.v[i], _mm256_and_ps(above, below));
  });
}
inline Lanes pick(const float (&eight)[8], Lanes a) {
  const __m256 table = _mm256_loadu_ps(eight);
  return halves([&](int i) { return _mm256_permutevar8x32_ps(table, _mm256_castps_si256(a.v[i])); });
}
inline Lanes nearest(Lanes a) {
  return halves(
      [&](int i) { return _mm256_round_ps(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); });
}
inline Lanes power_of_two(Lanes a) {
  return halves([&](int i) {
    const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(a.v[i]), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
  });
}
inline float sum(Lanes a) {
  float values[16], total = 0.f;
  store(values, a);
  for (float value : values) total += value;
  return total;
}

inline Pairs same(std::uint32_t pair) {
  const __m256i both = _mm256_set1_epi32(static_cast<int>(pair));
  return {{both, both}};
}
inline Pairs load_pairs(const void* p) {
  const __m256i* at = static_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)}};
}
inline void store(void* p, Pairs a) {
  __m256i* at = static_cast<__m256i*>(p);
  _mm256_storeu_si256(at, a.v[0]);
  _mm256_storeu_si256(at + 1, a.v[1]);
}
inline void stream(void* p, Pairs a) { store(p, a); }
inline Lanes low(Pairs a) {
  return halves([&](int i) { return _mm256_castsi256_ps(_mm256_slli_epi32(a.v[i], 16)); });
}
inline Lanes high(Pairs a) {
  return halves(
      [&](int i) { return _mm256_castsi256_ps(_mm256_and_si256(a.v[i], _mm256_set1_epi32(-65536))); });
}
// Rounded bf16 bits in the low half of each 32-bit lane. A NaN stays a NaN: rounding could carry its
// mantissa into infinity.
inline __m256i rounded(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i kept = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(up, kept, nan), 16);
}
inline Pairs pairs(Lanes first, Lanes second) {
  Pairs result;
  for (int i = 0; i < 2; ++i)
    result.v[i] = _mm256_or_si256(rounded(first.v[i]), _mm256_slli_epi32(rounded(second.v[i]), 16));
  return result;
}
inline Pairs sequence(Lanes a, Lanes b) {
  const auto pack = [](Lanes x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(x.v[0]), rounded(x.v[1])), 0xd8);
  };
  return {{pack(a), pack(b)}};
}
inline void widen(Pairs a, Lanes& first, Lanes& second) {
  const auto eight = [](__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  };
  const auto half = [&](__m256i bits) {
    return Lanes{{eight(_mm256_castsi256_si128(bits)), eight(_mm256_extracti128_si256(bits, 1))}};
  };
  first = half(a.v[0]);
  second = half(a.v[1]);
}
inline void interleave(Pairs a, Pairs b, Pairs& first, Pairs& second) {
  const auto half = [](__m256i x, __m256i y) {
    x = _mm256_permute4x64_epi64(x, 0xd8);
    y = _mm256_permute4x64_epi64(y, 0xd8);
    return Pairs{{_mm256_unpacklo_epi16(x, y), _mm256_unpackhi_epi16(x, y)}};
  };
  first = half(a.v[0], b.v[0]);
  second = half(a.v[1], b.v[1]);
}
template <class F>
inline Pairs both(F f) {
  return {{f(0), f(1)}};
}
inline Pairs operator+(Pairs a, Pairs b) {
  return both([&](int i) { return _mm256_add_epi32(a.v[i], b.v[i]); });
}
inline Pairs operator*(Pairs a, Pairs b) {
  return both([&](int i) { return _mm256_mullo_epi32(a.v[i], b.v[i]); });
}
inline Pairs operator^(Pairs a, Pairs b) {
  return both([&](int i) { return _mm256_xor_si256(a.v[i], b.v[i]); });
}
template <int kBits>
inline Pairs shift_down(Pairs a) {
  return both([&](int i) { return _mm256_srli_epi32(a.v[i], kBits); });
}
// All ones in the 16 bits that are `least` or more.
inline Pairs mask_at_least(Pairs a, std::uint16_t least) {
  const __m256i bound = _mm256_set1_epi16(static_cast<short>(least));
  return both([&](int i) { return _mm256_cmpeq_epi16(_mm256_max_epu16(a.v[i], bound), a.v[i]); });
}
inline std::uint32_t at_least(Pairs a, std::uint16_t least) {
  const Pairs mask = mask_at_least(a, least);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(mask.v[0], mask.v[1]), 0xd8);
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
}
inline Pairs keep(Pairs a, std::uint32_t bits) {
  const __m256i each = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192,
                                         16384, static_cast<short>(0x8000));
  return both([&](int i) {
    const __m256i all = _mm256_set1_epi16(static_cast<short>(bits >> 16 * i));
    return _mm256_and_si256(a.v[i], _mm256_cmpeq_epi16(_mm256_and_si256(all, each), each));
  });
}
inline Lanes keep(Lanes a, std::uint32_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return halves([&](int i) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits >> 8 * i));
    const __m256i mask = _mm256_cmpeq_epi32(_mm256_and_si256(all, each), each);
    return _mm256_and_ps(a.v[i], _mm256_castsi256_ps(mask));
  });
}
inline Pairs keep_at_least(Pairs a, Pairs words, std::uint16_t least) {
  const Pairs mask = mask_at_least(words, least);
  return both([&](int i) { return _mm256_and_si256(a.v[i], mask.v[i]); });
}
inline Split split(Pairs a) { return {low(a), high(a)}; }
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
      columns[first].v[half] = _mm256_castpd_si256(_mm256_unpacklo_pd(ab, cd));
      columns[first + 1].v[half] = _mm256_castpd_si256(_mm256_unpackhi_pd(ab, cd));
      columns[first + 2].v[half] = _mm256_castpd_si256(_mm256_unpacklo_pd(ba, dc));
      columns[first + 3].v[half] = _mm256_castpd_si256(_mm256_unpackhi_pd(ba, dc));
    }
}
inline Lanes dot(Lanes sum, std::uint32_t pair, Split right) {
  const Pairs left = same(pair);
  return fma(high(left), right.second, fma(low(left), right.first, sum));
}
inline Lanes from_bytes(const std::uint8_t* p) {
  return halves([&](int i) {
    return _mm256_castsi256_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i))));
  });
}
template <int kBits>
inline Lanes shift_left(Lanes a) {
  return halves(
      [&](int i) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.v[i]), kBits)); });
}
template <int kBits>
inline Lanes shift_right(Lanes a) {
  return halves(
      [&](int i) { return _mm256_castsi256_ps(_mm256_srai_epi32(_mm256_castps_si256(a.v[i]), kBits)); });
}
inline Lanes bits_and(Lanes a, std::uint32_t mask) {
  return halves([&](int i) {
    return _mm256_and_ps(a.v[i], _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(mask))));
  });
}
inline Lanes bits_or(Lanes a, Lanes b) {
  return halves([&](int i) { return _mm256_or_ps(a.v[i], b.v[i]); });
}
inline Lanes whole(Lanes bits) {
  return halves([&](int i) { return _mm256_cvtepi32_ps(_mm256_castps_si256(bits.v[i])); });
}

}  // namespace
}  // namespace ktbridge
