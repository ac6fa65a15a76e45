// Sixteen lanes: the vocabulary that packing, epilogues and the vector GEMM are written in, once, for
// every ISA.
//
//   Lanes   16 x float32, or 16 x 32 bits where a function says `bits`
//   Pairs   16 x (two bfloat16: first in the low half), which is also 32 bfloat16 in a row
//   Split   a Pairs made ready to be multiplied many times
//
//   load store every + - * / fma sum             as their names say; fma(a, b, c) = a b + c
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
//   stream(p, a)                  stores what isn't read again soon past the caches; p is 64-byte aligned
//   dot(sum, pair, right)                        sum + both products of a pair
//   from_bytes shift_left shift_right bits_and bits_or whole           bits; whole: int32 -> float32
//
// Pairs as 16 x 32 bits without a sign, for dropout (moe/drop.h):
//   + * ^ shift_down                             as their names say, modulo 2^32
//   at_least(p, least)                           32 bits: whether each 16 of p, in a row, are `least` or
//   more keep(a, bits)                                zeros where a bit is 0: of 32 in a row, or of 16
//   float32 keep_at_least(a, p, least)                   keep(a, at_least(p, least))
//
// Each isa/*.cpp compiles this under its own flags, so everything that includes it has internal linkage
// and uses no library template: a shared inline function would let the linker hand, say, AVX-512 code to
// a CPU that has none.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX512BF16__)
#include "isa/lanes_avx512.h"
#elif defined(__AVX2__)
#include "isa/lanes_avx2.h"
#else
#include "isa/lanes_scalar.h"
#endif

namespace ktbridge {
namespace {

#if !defined(__AVX512BF16__)
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
