// A weight where it lies: in a torch tensor, in a fused [E, 2I, H] tensor, in a mapped checkpoint. Nothing
// is ever copied but the strips in cache (weights/pack.h), and only weights/decode.h knows what a storage
// format's bits mean.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktbridge {

enum class Storage {
  bf16,
  fp32,   // LoRA masters; rounded to bf16 on the way
  fp8,    // e4m3 (no infinities), scale per block of rows x columns, as DeepSeek-V3 ships
  int8,   // symmetric, scale per row
  int4,   // two in a byte, low nibble first, value + 8; scale per row and group of columns, as
          // compressed-tensors' pack-quantized (Kimi-K2) ships
  mxfp4,  // two e2m1 in a byte, low nibble first; scale e8m0 per row and 32 columns, as gpt-oss ships
          // (OCP Microscaling Formats 1.0)
};

// Row-major [rows, columns]. value = stored * scale[row >> row_shift][column >> column_shift].
struct Matrix {
  const void* data = nullptr;
  std::ptrdiff_t stride = 0;  // bytes from row to row
  int rows = 0, columns = 0;  // zero rows read as zeros everywhere
  Storage storage = Storage::bf16;
  const void* scale = nullptr;
  std::ptrdiff_t scale_stride = 0;  // scales from row of scales to row of scales
  bool scale_is_bf16 = false;       // else float32; e8m0 for mxfp4
  int row_shift = 0, column_shift = 0;
};

// Bytes that `columns` neighbouring elements of one row take.
constexpr std::ptrdiff_t stored_bytes(Storage storage, std::ptrdiff_t columns) {
  switch (storage) {
    case Storage::bf16: return columns * 2;
    case Storage::fp32: return columns * 4;
    case Storage::int4:
    case Storage::mxfp4: return (columns + 1) / 2;
    default: return columns;
  }
}

// Rows from `row` and columns from `column` of `w`, so many or as many as there are. Where they don't begin
// at one of its scales, all of them share one.
inline Matrix part_of(Matrix w, int row, int rows, int column, int columns) {
  w.data = static_cast<const char*>(w.data) + row * w.stride + stored_bytes(w.storage, column);
  const std::ptrdiff_t scales = (row >> w.row_shift) * w.scale_stride + (column >> w.column_shift);
  const int bytes = w.storage == Storage::mxfp4 ? 1 : w.scale_is_bf16 ? 2 : 4;
  if (w.scale != nullptr) w.scale = static_cast<const char*>(w.scale) + scales * bytes;
  w.rows = w.rows - row < rows ? (w.rows > row ? w.rows - row : 0) : rows;
  w.columns = w.columns - column < columns ? w.columns - column : columns;
  return w;
}

}  // namespace ktbridge
