// AVX2 + FMA: a pair of bf16 in 32 bits splits into two floats by a shift and a mask.
#include <immintrin.h>

#include "gemm/body.h"

namespace ktbridge {
namespace {

struct Avx2 {
  using Vector = __m256;
  struct Pair {
    __m256 first, second;
  };
  using Row = Pair;
  // 4 x 2 accumulators, 2 x 2 panel halves and one broadcast pair fill the 16 registers.
  static constexpr int kWidth = 8, kVectors = 2, kRows = 4;

  static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vector value) { _mm256_storeu_ps(p, value); }
  static Pair split(__m256i bits) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)))};
  }
  static Pair panel(const bf16* p) {
    return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Row row(const bf16* p) {
    int bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return split(_mm256_set1_epi32(bits));
  }
  static Vector fma(Vector sum, Row row, Pair pair) {
    return _mm256_fmadd_ps(row.second, pair.second, _mm256_fmadd_ps(row.first, pair.first, sum));
  }
};

}  // namespace

void gemm_avx2(int rows, int pairs, const bf16* a, std::ptrdiff_t lda, const bf16* panel, float* c,
               std::ptrdiff_t ldc) {
  gemm_body<Avx2>(rows, pairs, a, lda, panel, c, ldc);
}

}  // namespace ktbridge
