// Rows of weights as INT8 or INT4, stored as ktbridge/adapter/quantize.py describes. Every operation is
// rounded once by IEEE 754, so the bits don't depend on the ISA.
#pragma once

#include <algorithm>

#include "common/bf16.h"
#include "isa/kernels.h"

namespace ktbridge {
namespace {

constexpr float kTiny = 0x1p-126f;  // zeros have no scale of their own, and none may be denormal
constexpr int kGroup = 32;          // values that share an INT4 scale
constexpr std::uint32_t kInfinite = 0x7f800000u;

inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
inline std::uint32_t bits_of(bf16 value) { return static_cast<std::uint32_t>(value) << 16; }
template <class T>
inline float value_of(T value) {
  return __builtin_bit_cast(float, bits_of(value));
}

// To the nearest integer, ties to even, below 2^22: the sum has no bits left behind the point.
inline std::int32_t nearest(float value) {
  return __builtin_bit_cast(std::int32_t, value + 0x1.8p23f) - 0x4b400000;
}

// The bits of the largest magnitude; magnitudes are ordered as their bits are, NaN above infinity.
template <class T>
inline std::uint32_t largest_of(const T* values, int count) {
  std::uint32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, bits_of(values[i]) & 0x7fffffffu);
  return largest;
}

template <class T>
inline bool row_to_int8(const T* values, int count, std::int8_t* codes, float* scale) {
  const std::uint32_t largest = largest_of(values, count);
  if (largest >= kInfinite) return false;
  const float unit = std::max(__builtin_bit_cast(float, largest) / 127.f, kTiny);
  for (int i = 0; i < count; ++i) codes[i] = static_cast<std::int8_t>(nearest(value_of(values[i]) / unit));
  *scale = unit;
  return true;
}

template <class T>
inline bool group_to_int4(const T* values, std::uint8_t* codes, bf16* scale) {
  const std::uint32_t largest = largest_of(values, kGroup);
  if (largest >= kInfinite) return false;
  int first = kGroup;  // of those that large: its sign decides
  for (int i = 0; i < kGroup; ++i)
    first = std::min(first, (bits_of(values[i]) & 0x7fffffffu) == largest ? i : kGroup);
  float unit = value_of(values[first]) / -8.f;
  if (std::max(unit, -unit) < kTiny) unit = kTiny;
  *scale = to_bf16(unit);
  const float stored = to_float(*scale);
  std::uint8_t bytes[kGroup];
  for (int i = 0; i < kGroup; ++i)
    bytes[i] = static_cast<std::uint8_t>(std::clamp(nearest(value_of(values[i]) / stored), -8, 7) + 8);
  std::uint16_t pairs[kGroup / 2];
  std::memcpy(pairs, bytes, sizeof pairs);
  for (int i = 0; i < kGroup / 2; ++i) codes[i] = static_cast<std::uint8_t>(pairs[i] | pairs[i] >> 4);
  return true;
}

template <class T>
inline bool quantize_rows(const T* values, const Unquantized& from, Storage storage, void* codes,
                          void* scales) {
  for (int row = 0; row < from.rows; ++row, values += from.columns) {
    if (storage == Storage::int8) {
      std::int8_t* to = static_cast<std::int8_t*>(codes) + static_cast<std::ptrdiff_t>(row) * from.columns;
      if (!row_to_int8(values, from.columns, to, static_cast<float*>(scales) + row)) return false;
      continue;
    }
    const std::ptrdiff_t groups = from.columns / kGroup, at = row * groups;
    for (int group = 0; group < groups; ++group)
      if (!group_to_int4(values + group * kGroup,
                         static_cast<std::uint8_t*>(codes) + (at + group) * (kGroup / 2),
                         static_cast<bf16*>(scales) + at + group))
        return false;
  }
  return true;
}

inline bool quantize(const Unquantized& from, Storage storage, void* codes, void* scales) {
  return from.halves ? quantize_rows(static_cast<const bf16*>(from.values), from, storage, codes, scales)
                     : quantize_rows(static_cast<const float*>(from.values), from, storage, codes, scales);
}

}  // namespace
}  // namespace ktbridge
