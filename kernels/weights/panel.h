// Stored matrices -> bf16 panels in cache (see gemm/gemm.h for the order inside a panel).
//
// This is the only place that knows how a weight is stored: a new storage format is a new Storage and
// its two loaders, and no GEMM changes. Weights are read where they lie; a panel is the only copy.
#pragma once

#include <cstddef>

#include "common/bf16.h"
#include "common/buffer.h"
#include "gemm/gemm.h"

namespace ktbridge {

enum class Storage { bf16, fp32 };  // fp32 is rounded to bf16 on the way (LoRA master weights)

// A row-major matrix somewhere in memory; `stride` is in elements.
struct Matrix {
  const void* data = nullptr;
  std::ptrdiff_t stride = 0;
  int rows = 0, columns = 0;
  Storage storage = Storage::bf16;
};

// Elements of a panel with that reduction length.
constexpr std::size_t panel_size(int reduction) {
  return round_up(static_cast<std::size_t>(reduction), 2) * kPanel;
}

// Panel of W^T: its columns are rows [row, row + kPanel) of W, the reduction runs along W's columns.
// For X W^T. Columns past the last row are zero.
void load_rows(const Matrix& w, int row, bf16* panel);

// Panel of W: its columns are columns [column, column + kPanel) of W, the reduction runs down W's rows.
// For dY W. Columns past the last column, and the odd row's partner, are zero.
void load_columns(const Matrix& w, int column, bf16* panel);

}  // namespace ktbridge
