// Any CPU: plain loops, and the reference for the others (see isa/lanes.h, which includes this).
#pragma once

#include <cstdint>

#include "common/bf16.h"

namespace ktbridge {
namespace {

struct Lanes {
  float v[16];
};
struct Pairs {
  std::uint32_t v[16];
};
using Split = Pairs;

template <class F>
inline Lanes each_lane(F f) {
  Lanes result;
  for (int i = 0; i < 16; ++i) result.v[i] = f(i);
  return result;
}
inline std::uint32_t bits_of(float a) { return __builtin_bit_cast(std::uint32_t, a); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline Lanes load(const float* p) {
  return each_lane([&](int i) { return p[i]; });
}
inline Lanes load_first(const float* p, int count) {
  float values[16] = {};
  for (int i = 0; i < 16 && i < count; ++i) values[i] = p[i];
  return load(values);
}
inline void store(float* p, Lanes a) { __builtin_memcpy(p, a.v, sizeof a.v); }
inline Lanes every(float a) {
  return each_lane([&](int) { return a; });
}
inline Lanes operator+(Lanes a, Lanes b) {
  return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes operator-(Lanes a, Lanes b) {
  return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
inline Lanes operator*(Lanes a, Lanes b) {
  return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes reciprocal(Lanes a) {
  return each_lane([&](int i) { return 1.f / a.v[i]; });
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return a * b + c; }
inline Lanes clamp(Lanes b, float low, float high) {
  return each_lane([&](int i) { return b.v[i] < low ? low : b.v[i] > high ? high : b.v[i]; });
}
inline Lanes keep_within(Lanes a, Lanes b, float low, float high) {
  return each_lane([&](int i) { return b.v[i] >= low && b.v[i] <= high ? a.v[i] : 0.f; });
}
inline Lanes pick(const float (&eight)[8], Lanes a) {
  return each_lane([&](int i) { return eight[bits_of(a.v[i]) & 7]; });
}
inline Lanes nearest(Lanes a) {  // adding and taking away 1.5 * 2^23 leaves the whole part
  return each_lane([&](int i) { return (a.v[i] + 12582912.f) - 12582912.f; });
}
inline Lanes power_of_two(Lanes a) {
  return each_lane([&](int i) {
    return float_of(static_cast<std::uint32_t>(static_cast<int>(a.v[i] == a.v[i] ? a.v[i] : 0.f) + 127)
                    << 23);
  });
}
inline float sum(Lanes a) {
  float total = 0.f;
  for (float value : a.v) total += value;
  return total;
}

inline Pairs same(std::uint32_t pair) {
  Pairs result;
  for (std::uint32_t& each : result.v) each = pair;
  return result;
}
inline Pairs load_pairs(const void* p) {
  Pairs result;
  __builtin_memcpy(result.v, p, sizeof result.v);
  return result;
}
inline void store(void* p, Pairs a) { __builtin_memcpy(p, a.v, sizeof a.v); }
inline void stream(void* p, Pairs a) { store(p, a); }
inline Lanes low(Pairs a) {
  return each_lane([&](int i) { return float_of(a.v[i] << 16); });
}
inline Lanes high(Pairs a) {
  return each_lane([&](int i) { return float_of(a.v[i] & 0xffff0000u); });
}
inline Pairs pairs(Lanes first, Lanes second) {
  Pairs result;
  for (int i = 0; i < 16; ++i)
    result.v[i] = to_bf16(first.v[i]) | static_cast<std::uint32_t>(to_bf16(second.v[i])) << 16;
  return result;
}
inline Pairs sequence(Lanes a, Lanes b) {
  bf16 values[32];
  for (int i = 0; i < 16; ++i) {
    values[i] = to_bf16(a.v[i]);
    values[16 + i] = to_bf16(b.v[i]);
  }
  return load_pairs(values);
}
inline void widen(Pairs a, Lanes& first, Lanes& second) {
  bf16 values[32];
  store(values, a);
  first = each_lane([&](int i) { return to_float(values[i]); });
  second = each_lane([&](int i) { return to_float(values[16 + i]); });
}
inline void interleave(Pairs a, Pairs b, Pairs& first, Pairs& second) {
  bf16 x[32], y[32];
  store(x, a);
  store(y, b);
  for (int i = 0; i < 16; ++i) {
    first.v[i] = x[i] | static_cast<std::uint32_t>(y[i]) << 16;
    second.v[i] = x[16 + i] | static_cast<std::uint32_t>(y[16 + i]) << 16;
  }
}
inline void turn_rows(const bf16* rows, std::ptrdiff_t row, Pairs (&columns)[16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) __builtin_memcpy(&columns[j].v[i], rows + i * row + 2 * j, 4);
}
template <class F>
inline Pairs each_pair(F f) {
  Pairs result;
  for (int i = 0; i < 16; ++i) result.v[i] = f(i);
  return result;
}
inline Pairs operator+(Pairs a, Pairs b) {
  return each_pair([&](int i) { return a.v[i] + b.v[i]; });
}
inline Pairs operator*(Pairs a, Pairs b) {
  return each_pair([&](int i) { return a.v[i] * b.v[i]; });
}
inline Pairs operator^(Pairs a, Pairs b) {
  return each_pair([&](int i) { return a.v[i] ^ b.v[i]; });
}
template <int kBits>
inline Pairs shift_down(Pairs a) {
  return each_pair([&](int i) { return a.v[i] >> kBits; });
}
inline std::uint32_t at_least(Pairs a, std::uint16_t least) {
  std::uint32_t bits = 0;
  for (int i = 0; i < 16; ++i)
    bits |= ((a.v[i] & 0xffffu) >= least ? 1u << 2 * i : 0u) | (a.v[i] >> 16 >= least ? 2u << 2 * i : 0u);
  return bits;
}
inline Pairs keep(Pairs a, std::uint32_t bits) {
  return each_pair([&](int i) {
    return a.v[i] & ((bits >> 2 * i & 1u ? 0xffffu : 0u) | (bits >> 2 * i & 2u ? 0xffff0000u : 0u));
  });
}
inline Lanes keep(Lanes a, std::uint32_t bits) {
  return each_lane([&](int i) { return bits >> i & 1u ? a.v[i] : 0.f; });
}
inline Pairs keep_at_least(Pairs a, Pairs words, std::uint16_t least) {
  return keep(a, at_least(words, least));
}
inline Split split(Pairs a) { return a; }
inline Lanes dot(Lanes sum, std::uint32_t pair, Split right) {
  const float first = float_of(pair << 16), second = float_of(pair & 0xffff0000u);
  return each_lane([&](int i) {
    return sum.v[i] + first * float_of(right.v[i] << 16) + second * float_of(right.v[i] & 0xffff0000u);
  });
}
inline Lanes from_bytes(const std::uint8_t* p) {
  return each_lane([&](int i) { return float_of(p[i]); });
}
template <int kBits>
inline Lanes shift_left(Lanes a) {
  return each_lane([&](int i) { return float_of(bits_of(a.v[i]) << kBits); });
}
template <int kBits>
inline Lanes shift_right(Lanes a) {
  return each_lane([&](int i) {
    return float_of(static_cast<std::uint32_t>(static_cast<int>(bits_of(a.v[i])) >> kBits));
  });
}
inline Lanes bits_and(Lanes a, std::uint32_t mask) {
  return each_lane([&](int i) { return float_of(bits_of(a.v[i]) & mask); });
}
inline Lanes bits_or(Lanes a, Lanes b) {
  return each_lane([&](int i) { return float_of(bits_of(a.v[i]) | bits_of(b.v[i])); });
}
inline Lanes whole(Lanes bits) {
  return each_lane([&](int i) { return static_cast<float>(static_cast<int>(bits_of(bits.v[i]))); });
}

}  // namespace
}  // namespace ktbridge
