#include "weights/panel.h"

#include <algorithm>
#include <cstring>

namespace ktbridge {
namespace {

inline bf16 element(const bf16* p) { return *p; }
inline bf16 element(const float* p) { return to_bf16(*p); }

template <class T>
void rows_of(const Matrix& w, int row, bf16* panel) {
  const int live = std::min(kPanel, w.rows - row);
  const int pairs = (w.columns + 1) / 2;
  if (live < kPanel) std::memset(panel, 0, panel_size(w.columns) * sizeof(bf16));
  for (int n = 0; n < live; ++n) {
    const T* source = static_cast<const T*>(w.data) + (row + n) * w.stride;
    bf16* target = panel + 2 * n;
    for (int k = 0; k < w.columns / 2; ++k, target += 2 * kPanel) {
      target[0] = element(source + 2 * k);
      target[1] = element(source + 2 * k + 1);
    }
    if (w.columns % 2 != 0) {
      target = panel + static_cast<std::ptrdiff_t>(pairs - 1) * 2 * kPanel + 2 * n;
      target[0] = element(source + w.columns - 1);
      target[1] = 0;
    }
  }
}

template <class T>
void columns_of(const Matrix& w, int column, bf16* panel) {
  const int live = std::min(kPanel, w.columns - column);
  if (live < kPanel || w.rows % 2 != 0) std::memset(panel, 0, panel_size(w.rows) * sizeof(bf16));
  for (int k = 0; k < w.rows; ++k) {
    const T* source = static_cast<const T*>(w.data) + k * w.stride + column;
    bf16* target = panel + static_cast<std::ptrdiff_t>(k / 2) * 2 * kPanel + k % 2;
    for (int n = 0; n < live; ++n) target[2 * n] = element(source + n);
  }
}

}  // namespace

void load_rows(const Matrix& w, int row, bf16* panel) {
  w.storage == Storage::bf16 ? rows_of<bf16>(w, row, panel) : rows_of<float>(w, row, panel);
}

void load_columns(const Matrix& w, int column, bf16* panel) {
  w.storage == Storage::bf16 ? columns_of<bf16>(w, column, panel) : columns_of<float>(w, column, panel);
}

}  // namespace ktbridge
