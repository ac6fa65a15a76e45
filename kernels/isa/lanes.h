// Sixteen lanes: the vocabulary that packing, epilogues and the vector GEMM are written in, once, for
// every ISA.
//
//   Lanes   16 x float32, or 16 x 32 bits where a function says `bits`
//   Pairs   16 x (two bfloat16: first in the low half), which is also 32 bfloat16 in a row
//   Split   a Pairs made ready to be multiplied many times
//   Eight   the first half of a Lanes, for sums whose other half is zeros: load, store and dot only
//
//   load store every + - * fma sum             as their names say; fma(a, b, c) = a b + c
//   load_first(p, count)                         the first `count` of 16, zeros behind; reads no further
//   clamp(a, low, high)                          keeps a NaN
//   keep_within(a, b, low, high)                 a where low <= b <= high, else 0
//   pick(eight, a)                               eight[bits of a & 7]
//   reciprocal                                   to a unit or two in the last place
//   nearest, power_of_two                        whole numbers, as floats; 2^a for a in [-126, 127]
//   low(p), high(p)                              first / second of each pair, as float32
//   same(pair)                                   in every lane
//   pairs(a, b)                                  rounds; lane i holds (a[i], b[i])
//   sequence(a, b), widen(p, a, b)               rounds to, or widens from, 32 in a row: a then b
//   interleave(a, b, p, q)                       rows a and b of 32 -> pairs (a[n], b[n]): n < 16, n >= 16
//   transpose(rows)                              16 x 16 of 32 bits, in place
//   turn_rows(p, row, columns)                   16 rows of 32, `row` elements apart: pair j to columns[j]
//   stream(p, a)                                 stores past the caches; p is 64-byte aligned
//   dot(sum, pair, right)                        sum + both products of a pair
//   from_bytes shift_left shift_right bits_and bits_or whole           bits; whole: int32 -> float32
//
// Pairs as 16 x 32 bits without a sign, for dropout (moe/drop.h):
//   + * ^ shift_down                             as their names say, modulo 2^32
//   at_least(p, least)                           32 bits: which 16 of p, in a row, are `least` or more
//   keep(a, bits)                                zeros where a bit is 0: of 32 in a row, or of 16 float32
//   keep_at_least(a, p, least)                   keep(a, at_least(p, least))
//
// What compilers' vector types can say is here, in registers as wide as the ISA has them; the rest, mostly
// what moves lanes and what GCC 12 makes slow (shifts of broadcasts, bytes to words), in isa/lanes_*.h.
//
// Each isa/*.cpp compiles this under its own flags, so everything that includes it has internal linkage
// and uses no library template: a shared inline function would let the linker hand, say, AVX-512 code to
// a CPU that has none.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/bf16.h"

namespace ktbridge {
namespace {

#if defined(__AVX512BF16__)
constexpr int kParts = 1;
#elif defined(__AVX2__)
constexpr int kParts = 2;
#else
constexpr int kParts = 4;
#endif
constexpr int kWidth = 16 / kParts;  // 32-bit lanes of a register

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef std::uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef std::int32_t Integers __attribute__((vector_size(4 * kWidth)));
typedef std::uint16_t Halves __attribute__((vector_size(4 * kWidth)));
// Anywhere in memory.
typedef Floats LooseFloats __attribute__((aligned(1), may_alias));
typedef Words LooseWords __attribute__((aligned(1), may_alias));

struct Lanes {
  Floats v[kParts];
};
struct Pairs {
  Words v[kParts];
};

// f of each register's number, as Lanes or Pairs.
template <class All, class F>
inline All each(F f) {
  if constexpr (kParts == 1) return {{f(0)}};
  if constexpr (kParts == 2) return {{f(0), f(1)}};
  if constexpr (kParts == 4) return {{f(0), f(1), f(2), f(3)}};
}

inline Lanes load(const float* p) {
  return each<Lanes>([=](int i) { return reinterpret_cast<const LooseFloats*>(p)[i]; });
}
inline void load(const float* p, Lanes& a) { a = load(p); }
inline Pairs load_pairs(const void* p) {
  return each<Pairs>([=](int i) { return static_cast<const LooseWords*>(p)[i]; });
}
inline void store(float* p, Lanes a) {
  for (int i = 0; i < kParts; ++i) reinterpret_cast<LooseFloats*>(p)[i] = a.v[i];
}
inline void store(void* p, Pairs a) {
  for (int i = 0; i < kParts; ++i) static_cast<LooseWords*>(p)[i] = a.v[i];
}
inline Lanes every(float a) {
  return each<Lanes>([=](int) { return a - Floats{}; });
}
inline Pairs same(std::uint32_t pair) {
  return each<Pairs>([=](int) { return pair + Words{}; });
}
inline Lanes operator+(Lanes a, Lanes b) {
  return each<Lanes>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes operator-(Lanes a, Lanes b) {
  return each<Lanes>([&](int i) { return a.v[i] - b.v[i]; });
}
inline Lanes operator*(Lanes a, Lanes b) {
  return each<Lanes>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes keep_within(Lanes a, Lanes b, float low, float high) {
  return each<Lanes>([&](int i) { return ((b.v[i] >= low) & (b.v[i] <= high)) ? a.v[i] : Floats{}; });
}
inline Lanes power_of_two(Lanes a) {
  return each<Lanes>(
      [&](int i) { return (Floats)(((Words) __builtin_convertvector(a.v[i], Integers) + 127) << 23); });
}
inline Pairs operator+(Pairs a, Pairs b) {
  return each<Pairs>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Pairs operator*(Pairs a, Pairs b) {
  return each<Pairs>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Pairs operator^(Pairs a, Pairs b) {
  return each<Pairs>([&](int i) { return a.v[i] ^ b.v[i]; });
}
template <int kBits>
inline Pairs shift_down(Pairs a) {
  return each<Pairs>([&](int i) { return a.v[i] >> kBits; });
}
template <int kBits>
inline Lanes shift_left(Lanes a) {
  return each<Lanes>([&](int i) { return (Floats)((Words)a.v[i] << kBits); });
}
template <int kBits>
inline Lanes shift_right(Lanes a) {  // arithmetic
  return each<Lanes>([&](int i) { return (Floats)((Integers)a.v[i] >> kBits); });
}
inline Lanes bits_and(Lanes a, std::uint32_t mask) {
  return each<Lanes>([&](int i) { return (Floats)((Words)a.v[i] & mask); });
}
inline Lanes bits_or(Lanes a, Lanes b) {
  return each<Lanes>([&](int i) { return (Floats)((Words)a.v[i] | (Words)b.v[i]); });
}
inline Lanes whole(Lanes bits) {
  return each<Lanes>([&](int i) { return __builtin_convertvector((Integers)bits.v[i], Floats); });
}

#if !defined(__AVX512BF16__)
struct Split {
  Lanes first, second;
};

inline Lanes reciprocal(Lanes a) {
  return each<Lanes>([&](int i) { return 1.f / a.v[i]; });
}
inline float sum(Lanes a) {
  float values[16], total = 0.f;
  store(values, a);
  for (float value : values) total += value;
  return total;
}
inline void stream(void* p, Pairs a) { store(p, a); }
// Rounded bf16 bits in the low half of each 32-bit lane. A NaN stays a NaN: rounding could carry its
// mantissa into infinity.
inline Words rounded(Floats a) {
  const Words bits = (Words)a, up = bits + ((bits >> 16 & 1u) + 0x7fffu);
  return (a != a ? bits | 0x400000u : up) >> 16;
}
inline Pairs pairs(Lanes first, Lanes second) {
  return each<Pairs>([&](int i) { return rounded(first.v[i]) | rounded(second.v[i]) << 16; });
}
inline Words at_least_mask(Words a, std::uint16_t least) { return (Words)((Halves)a >= (Halves{} + least)); }
inline Pairs keep_at_least(Pairs a, Pairs words, std::uint16_t least) {
  return each<Pairs>([&](int i) { return a.v[i] & at_least_mask(words.v[i], least); });
}
constexpr std::uint16_t kHalfBits[] = {1,   2,   4,    8,    16,   32,   64,    128,
                                       256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
constexpr std::uint32_t kWordBits[] = {1, 2, 4, 8, 16, 32, 64, 128};
inline Pairs keep(Pairs a, std::uint32_t bits) {
  return each<Pairs>([&](int i) {
    const Halves each = (Halves) * reinterpret_cast<const LooseWords*>(kHalfBits);
    const std::uint16_t part = static_cast<std::uint16_t>(bits >> 2 * kWidth * i);
    return a.v[i] & (Words)((part & each) == each);
  });
}
inline Lanes keep(Lanes a, std::uint32_t bits) {
  return each<Lanes>([&](int i) {
    const Words each = *reinterpret_cast<const LooseWords*>(kWordBits);
    return (bits >> kWidth * i & each) == each ? a.v[i] : Floats{};
  });
}
#endif

}  // namespace
}  // namespace ktbridge

#if defined(__AVX512BF16__)
#include "isa/lanes_avx512.h"
#elif defined(__AVX2__)
#include "isa/lanes_avx2.h"
#else
#include "isa/lanes_scalar.h"
#endif

namespace ktbridge {
namespace {

inline Lanes low(Pairs a) {
  return each<Lanes>([&](int i) { return low_of(a.v[i]); });
}
inline Lanes high(Pairs a) {
  return each<Lanes>([&](int i) { return high_of(a.v[i]); });
}
inline Lanes from_bytes(const std::uint8_t* p) {
  return each<Lanes>([=](int i) { return byte_bits(p + kWidth * i); });
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return each<Lanes>([&](int i) { return fused(a.v[i], b.v[i], c.v[i]); });
}
inline Lanes clamp(Lanes b, float low, float high) {
  return each<Lanes>([&](int i) { return within(b.v[i], low - Floats{}, high - Floats{}); });
}
inline Lanes nearest(Lanes a) {
  return each<Lanes>([&](int i) { return to_whole(a.v[i]); });
}

#if !defined(__AVX512BF16__)
inline Split split(Pairs a) { return {low(a), high(a)}; }
inline Lanes dot(Lanes sum, std::uint32_t pair, Split right) {
  const Pairs left = same(pair);
  return fma(high(left), right.second, fma(low(left), right.first, sum));
}
struct Eight {
  Floats v[kParts / 2];
};
inline void load(const float* p, Eight& a) { __builtin_memcpy(&a, p, sizeof a); }
inline void store(float* p, Eight a) { __builtin_memcpy(p, &a, sizeof a); }
inline Eight dot(Eight sum, std::uint32_t pair, Split right) {
  const Words left = same(pair).v[0];
  const Floats first = low_of(left), second = high_of(left);
  for (int i = 0; i < kParts / 2; ++i)
    sum.v[i] = fused(second, right.second.v[i], fused(first, right.first.v[i], sum.v[i]));
  return sum;
}
inline void transpose(Pairs (&rows)[16]) {
  bf16 values[16][32];
  for (int i = 0; i < 16; ++i) store(values[i], rows[i]);
  turn_rows(values[0], 32, rows);
}
#endif

// e^x to about 2 units in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, e^r by the degree-6 Taylor
// polynomial (its error there is below 2e-7), n put into the exponent.
inline Lanes exp(Lanes x) {
  x = clamp(x, -87.f, 88.f);
  const Lanes n = nearest(x * every(1.44269504f));
  // ln 2 in two parts, so that n ln 2 is taken away exactly.
  const Lanes r = fma(n, every(2.12194440e-4f), fma(n, every(-0.693359375f), x));
  Lanes p = every(1.f / 720);
  const float coefficients[] = {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
  for (float coefficient : coefficients) p = fma(p, r, every(coefficient));
  return p * power_of_two(n);
}

inline Lanes sigmoid(Lanes x) { return reciprocal(every(1.f) + exp(every(0.f) - x)); }

}  // namespace
}  // namespace ktbridge
