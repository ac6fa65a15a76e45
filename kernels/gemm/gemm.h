// The one matrix product everything is made of, and the table of its implementations.
//
//     C[m, n] += sum_k A[m, k] * P[k, n]        bf16 x bf16 -> fp32,  n in [0, kPanel)
//
// P is a *panel*: kPanel columns of the right operand, stored by pairs along the reduction,
//     panel[(k / 2) * kPanel * 2 + n * 2 + (k % 2)],
// which is the order that AMX tiles and vdpbf16ps take and that AVX2 splits with one shift and one
// mask. weights/panel.h makes panels out of whatever the checkpoint stores.
#pragma once

#include <cstddef>

#include "common/bf16.h"
#include "common/cpu.h"

namespace ktbridge {

constexpr int kPanel = 32;

// `pairs` is the reduction length divided by two, rounded up. Rows of A must be readable, and zero
// where the reduction was rounded up. C is row-major with row stride `ldc`; only kPanel columns are
// touched.
using Gemm = void (*)(int rows, int pairs, const bf16* a, std::ptrdiff_t lda, const bf16* panel, float* c,
                      std::ptrdiff_t ldc);

void gemm_scalar(int, int, const bf16*, std::ptrdiff_t, const bf16*, float*, std::ptrdiff_t);
void gemm_avx2(int, int, const bf16*, std::ptrdiff_t, const bf16*, float*, std::ptrdiff_t);
void gemm_avx512_bf16(int, int, const bf16*, std::ptrdiff_t, const bf16*, float*, std::ptrdiff_t);

inline Gemm gemm_for(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return gemm_avx2;
    case Isa::avx512_bf16:
      return gemm_avx512_bf16;
    default:
      return gemm_scalar;
  }
}

}  // namespace ktbridge
