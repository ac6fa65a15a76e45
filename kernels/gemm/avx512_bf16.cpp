// AVX-512 BF16: vdpbf16ps takes the panel's pairs as they lie.
#include <immintrin.h>

#include "gemm/body.h"

namespace ktbridge {
namespace {

struct Avx512Bf16 {
  using Vector = __m512;
  using Pair = __m512i;
  using Row = __m512i;
  // 12 x 2 accumulators, 2 panel vectors and one broadcast: 27 of 32 registers.
  static constexpr int kWidth = 16, kVectors = 2, kRows = 12;

  static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vector value) { _mm512_storeu_ps(p, value); }
  static Pair panel(const bf16* p) { return _mm512_loadu_si512(p); }
  static Row row(const bf16* p) {
    int bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  static Vector fma(Vector sum, Row row, Pair pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)row, (__m512bh)pair);
  }
};

}  // namespace

void gemm_avx512_bf16(int rows, int pairs, const bf16* a, std::ptrdiff_t lda, const bf16* panel, float* c,
                      std::ptrdiff_t ldc) {
  gemm_body<Avx512Bf16>(rows, pairs, a, lda, panel, c, ldc);
}

}  // namespace ktbridge
