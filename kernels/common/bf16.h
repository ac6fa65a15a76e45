// bfloat16 as bits: conversion to and from float32, round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace ktbridge {

using bf16 = std::uint16_t;

[[gnu::always_inline]] inline float to_float(bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

[[gnu::always_inline]] inline bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // Rounding could carry a NaN's mantissa into infinity; keep it a quiet NaN instead.
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace ktbridge
