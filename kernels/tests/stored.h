// Random matrices in every storage format, and what their elements are worth by plain scalar code.
#pragma once

#include <cmath>
#include <limits>
#include <string>

#include "support.h"

namespace ktbridge {

struct Format {
  const char* name;
  Storage storage;
  int row_shift = 0, column_shift = 0;
  bool scale_is_bf16 = false;
};

// FP8 blocks are smaller than DeepSeek's 128 x 128 in one row, so that small matrices have many.
const std::vector<Format> kFormats = {
    {"bf16", Storage::bf16},
    {"fp32", Storage::fp32},
    {"fp8 in blocks of 128 x 128", Storage::fp8, 7, 7},
    {"fp8 in blocks of 4 x 32, bf16 scales", Storage::fp8, 2, 5, true},
    {"int8", Storage::int8, 0, 30},
    {"int8, bf16 scales", Storage::int8, 0, 30, true},
    {"int4 in groups of 32", Storage::int4, 0, 5},
    {"int4 in groups of 32, bf16 scales", Storage::int4, 0, 5, true},
    {"int4 in groups of 128", Storage::int4, 0, 7},
    {"int4 in groups of 128, bf16 scales", Storage::int4, 0, 7, true},
    {"mxfp4", Storage::mxfp4, 0, 5},
};

// e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; S.1111.111 is NaN (OCP 8-bit formats 1.0).
inline float e4m3(std::uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}
inline bool is_e4m3_nan(std::uint8_t code) { return (code & 0x7f) == 0x7f; }

// e2m1: sign, 2 bits of exponent with bias 1, 1 of mantissa (OCP Microscaling Formats 1.0).
inline float e2m1(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const float magnitude = exponent == 0 ? 0.5f * static_cast<float>(mantissa)
                                        : std::ldexp(static_cast<float>(2 + mantissa), exponent - 2);
  return code & 8 ? -magnitude : magnitude;
}

// Its bytes and its scales both end where their pages end.
class Stored {
 public:
  // Rows lie `gap` bytes farther apart than they need to, and scales `scale_gap` scales.
  static Stored random(Random& random, const Format& format, int rows, int columns, int gap = 0,
                       int scale_gap = 0) {
    const std::ptrdiff_t width = stored_bytes(format.storage, columns);
    const auto code = [&] {
      std::uint8_t byte = static_cast<std::uint8_t>(random.bits());
      return format.storage == Storage::fp8 && is_e4m3_nan(byte) ? std::uint8_t{0x7e} : byte;
    };
    std::vector<std::uint8_t> bytes = random.many((rows - 1) * (width + gap) + width, code);
    if (format.storage == Storage::fp32)
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c) {
          const float value = std::ldexp(random.value(), random.between(-90, 90));
          std::memcpy(&bytes[r * (width + gap) + c * 4], &value, 4);
        }
    return Stored(random, format, rows, columns, bytes, gap, scale_gap);
  }

  Stored(Random& random, const Format& format, int rows, int columns, const std::vector<std::uint8_t>& bytes,
         int gap = 0, int scale_gap = 0)
      : groups_(((columns - 1) >> format.column_shift) + 1),
        scale_stride_(groups_ + scale_gap),
        scales_(scales_of(random, format, ((rows - 1) >> format.row_shift) * scale_stride_ + groups_)),
        data_(bytes),
        float_scales_(scales_),
        bf16_scales_(rounded(scales_)),
        exponents_(exponents(scales_)) {
    matrix.data = data_.data();
    matrix.stride = stored_bytes(format.storage, columns) + gap;
    matrix.rows = rows;
    matrix.columns = columns;
    matrix.storage = format.storage;
    matrix.row_shift = format.row_shift;
    matrix.column_shift = format.column_shift;
    matrix.scale_is_bf16 = format.scale_is_bf16;
    matrix.scale_stride = scale_stride_;
    if (format.storage == Storage::bf16 || format.storage == Storage::fp32) return;
    if (format.storage == Storage::mxfp4) {
      matrix.scale = exponents_.data();
      return;
    }
    matrix.scale =
        format.scale_is_bf16 ? static_cast<const void*>(bf16_scales_.data()) : float_scales_.data();
  }

  // The element's bf16 bits; 0 outside.
  bf16 at(int row, int column) const {
    if (row >= matrix.rows || column >= matrix.columns) return 0;
    const std::uint8_t* p = static_cast<const std::uint8_t*>(matrix.data) + row * matrix.stride;
    const float scale = scales_[(row >> matrix.row_shift) * scale_stride_ + (column >> matrix.column_shift)];
    switch (matrix.storage) {
      case Storage::bf16: {
        bf16 value;
        std::memcpy(&value, p + 2 * column, sizeof value);
        return value;
      }
      case Storage::fp32: {
        float value;
        std::memcpy(&value, p + 4 * column, sizeof value);
        return to_bf16(value);
      }
      case Storage::fp8: return to_bf16(e4m3(p[column]) * scale);
      case Storage::int8: return to_bf16(static_cast<float>(static_cast<std::int8_t>(p[column])) * scale);
      case Storage::int4:
        return to_bf16(static_cast<float>((p[column / 2] >> (column % 2 * 4) & 15) - 8) * scale);
      case Storage::mxfp4: return to_bf16(e2m1(p[column / 2] >> (column % 2 * 4) & 15) * scale);
    }
    return 0;
  }

  Matrix matrix;

 private:
  // Each its own, so that a neighbour's can't pass for it; bf16 values, so that both forms hold the same.
  static std::vector<float> scales_of(Random& random, const Format& format, std::ptrdiff_t count) {
    if (format.storage == Storage::mxfp4)
      return random.many(count, [&] { return std::ldexp(1.f, random.between(-9, -4)); });
    return random.many(count, [&] { return to_float(to_bf16(0.01f + std::abs(random.value()) * 0.04f)); });
  }
  static std::vector<bf16> rounded(const std::vector<float>& values) {
    std::vector<bf16> result;
    for (float value : values) result.push_back(to_bf16(value));
    return result;
  }

  // Biased by 127, as float32's own are.
  static std::vector<std::uint8_t> exponents(const std::vector<float>& scales) {
    std::vector<std::uint8_t> bytes;
    for (float scale : scales) bytes.push_back(static_cast<std::uint8_t>(std::ilogb(scale) + 127));
    return bytes;
  }

  std::ptrdiff_t groups_, scale_stride_;
  std::vector<float> scales_;
  AtPageEnd<std::uint8_t> data_;
  AtPageEnd<float> float_scales_;
  AtPageEnd<bf16> bf16_scales_;
  AtPageEnd<std::uint8_t> exponents_;
};

}  // namespace ktbridge
