// The register-blocked loop, written once over a vector type V that each ISA's file names.
//
// V provides: Vector; Pair (one vector's worth of panel columns, two reduction steps); Row (a pair of A
// broadcast); kWidth floats a Vector; kVectors and kRows of the register block; zero, load, store,
// panel, row, fma.
//
// Everything here has internal linkage and uses no library template: this header is compiled with the
// ISA's own flags, and a shared inline function would let the linker hand, say, AVX-512 code to a CPU
// that has none.
#pragma once

#include "gemm/gemm.h"

namespace ktbridge {
namespace {

template <class V, int kRows>
inline void gemm_block(int pairs, const bf16* a, std::ptrdiff_t lda, const bf16* panel, float* c,
                       std::ptrdiff_t ldc) {
  typename V::Vector sum[kRows][V::kVectors];
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < V::kVectors; ++v) sum[m][v] = V::load(c + m * ldc + v * V::kWidth);
  for (int k = 0; k < pairs; ++k) {
    typename V::Pair columns[V::kVectors];
    for (int v = 0; v < V::kVectors; ++v)
      columns[v] = V::panel(panel + (static_cast<std::ptrdiff_t>(k) * kPanel + v * V::kWidth) * 2);
    for (int m = 0; m < kRows; ++m) {
      const typename V::Row row = V::row(a + m * lda + 2 * static_cast<std::ptrdiff_t>(k));
      for (int v = 0; v < V::kVectors; ++v) sum[m][v] = V::fma(sum[m][v], row, columns[v]);
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < V::kVectors; ++v) V::store(c + m * ldc + v * V::kWidth, sum[m][v]);
}

// The last rows, fewer than a full block: the block of exactly that many.
template <class V, int kRows>
inline void gemm_rest(int rows, int pairs, const bf16* a, std::ptrdiff_t lda, const bf16* panel, float* c,
                      std::ptrdiff_t ldc) {
  if constexpr (kRows > 0) {
    if (rows == kRows)
      gemm_block<V, kRows>(pairs, a, lda, panel, c, ldc);
    else
      gemm_rest<V, kRows - 1>(rows, pairs, a, lda, panel, c, ldc);
  }
}

template <class V>
inline void gemm_body(int rows, int pairs, const bf16* a, std::ptrdiff_t lda, const bf16* panel, float* c,
                      std::ptrdiff_t ldc) {
  constexpr int kColumns = V::kWidth * V::kVectors;
  for (int n = 0; n < kPanel; n += kColumns) {
    int m = 0;
    for (; m + V::kRows <= rows; m += V::kRows)
      gemm_block<V, V::kRows>(pairs, a + m * lda, lda, panel + 2 * n, c + m * ldc + n, ldc);
    gemm_rest<V, V::kRows - 1>(rows - m, pairs, a + m * lda, lda, panel + 2 * n, c + m * ldc + n, ldc);
  }
}

}  // namespace
}  // namespace ktbridge
