// 32 neighbouring elements of a stored row as bfloat16. A new storage format is a new `decode` and nothing
// else: packing and the products don't change.
#pragma once

#include "gemm/strip.h"
#include "isa/lanes.h"
#include "weights/matrix.h"

namespace ktbridge {
namespace {

inline float scale_of(const Matrix& w, int row, int column) {
  const std::ptrdiff_t at = (row >> w.row_shift) * w.scale_stride + (column >> w.column_shift);
  return w.scale_is_bf16 ? to_float(static_cast<const bf16*>(w.scale)[at])
                         : static_cast<const float*>(w.scale)[at];
}

#if defined(__AVX512BF16__)
constexpr float kE4m3Unit = 256;
inline Lanes from_e4m3(const std::uint8_t* p) { return from_e4m3_by_256(p); }
#else
constexpr float kE4m3Unit = 1;
// e4m3's exponent bias is 7 and float32's 127, so its bits put into place are too small by 2^120;
// multiplying (rather than adding to the exponent) is right for its subnormals too.
inline Lanes from_e4m3(const std::uint8_t* p) {
  const Lanes bits = from_bytes(p);
  const Lanes magnitude = shift_left<20>(bits_and(bits, 0x7f)) * every(0x1p120f);
  return bits_or(magnitude, shift_left<24>(bits_and(bits, 0x80)));
}
#endif

inline Lanes from_int8(const std::uint8_t* p) {
  return whole(shift_right<24>(shift_left<24>(from_bytes(p))));
}

// e8m0: 2^(byte - 127). Byte 0 is one of float32's subnormals; 255, its NaN, reads as infinity.
inline float e8m0_scale(const Matrix& w, int row, int column) {
  const std::ptrdiff_t at = (row >> w.row_shift) * w.scale_stride + (column >> w.column_shift);
  const std::uint32_t exponent = static_cast<const std::uint8_t*>(w.scale)[at];
  return __builtin_bit_cast(float, exponent == 0 ? 1u << 22 : exponent << 23);
}

// The low nibble of each lane: a sign and one of eight magnitudes. From a table, as 0.5 is subnormal in
// e2m1, and float32's subnormals are slow.
inline Lanes from_e2m1(Lanes nibbles) {
  constexpr float kMagnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return bits_or(pick(kMagnitudes, nibbles), shift_left<28>(bits_and(nibbles, 8)));
}

// Elements [column, column + 32) of a row; `column` is a multiple of 32 and all 32 are there.
template <Storage kStorage>
inline Pairs decode(const Matrix& w, int row, int column) {
  const std::uint8_t* p =
      static_cast<const std::uint8_t*>(w.data) + row * w.stride + stored_bytes(kStorage, column);
  if constexpr (kStorage == Storage::bf16) return load_pairs(p);
  if constexpr (kStorage == Storage::fp32) {
    const float* values = reinterpret_cast<const float*>(p);
    return sequence(load(values), load(values + 16));
  }
  if constexpr (kStorage == Storage::fp8) {
    const Lanes scale = every(scale_of(w, row, column) * kE4m3Unit);
    return sequence(from_e4m3(p) * scale, from_e4m3(p + 16) * scale);
  }
  if constexpr (kStorage == Storage::int8) {
    const Lanes scale = every(scale_of(w, row, column));
    return sequence(from_int8(p) * scale, from_int8(p + 16) * scale);
  }
  if constexpr (kStorage == Storage::int4) {
    const Lanes scale = every(scale_of(w, row, column)), bytes = from_bytes(p);
    const Lanes even = whole(bits_and(bytes, 15)), odd = whole(shift_right<4>(bytes));
    return pairs((even - every(8.f)) * scale, (odd - every(8.f)) * scale);
  }
  if constexpr (kStorage == Storage::mxfp4) {
    const Lanes scale = every(e8m0_scale(w, row, column)), bytes = from_bytes(p);
    return pairs(from_e2m1(bytes) * scale, from_e2m1(shift_right<4>(bytes)) * scale);
  }
}

// The last elements of a row, fewer than 32: the stored bytes are copied out before they are decoded, so
// that nothing past the row is read, and what is past it becomes zero.
template <Storage kStorage>
inline Pairs decode_end(const Matrix& w, int row, int column) {
  const int live = w.columns - column;
  if constexpr (kStorage == Storage::fp32) {  // LoRA factors, whose rows are often this short
    const float* values = static_cast<const float*>(w.data) + row * (w.stride / 4) + column;
    return sequence(load_first(values, live), load_first(values + 16, live - 16));
  }
  alignas(64) std::uint8_t bytes[32 * 4] = {};
  __builtin_memcpy(bytes,
                   static_cast<const std::uint8_t*>(w.data) + row * w.stride + stored_bytes(kStorage, column),
                   stored_bytes(kStorage, live));
  Matrix end = w;
  end.data = bytes - row * w.stride - stored_bytes(kStorage, column);
  alignas(64) bf16 values[kSteps];
  store(values, decode<kStorage>(end, row, column));
  for (int i = live; i < kSteps; ++i) values[i] = 0;
  return load_pairs(values);
}

template <Storage kStorage>
inline Pairs decode_any(const Matrix& w, int row, int column) {
  return column + kSteps <= w.columns ? decode<kStorage>(w, row, column)
                                      : decode_end<kStorage>(w, row, column);
}

}  // namespace
}  // namespace ktbridge
