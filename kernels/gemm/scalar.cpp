// Any x86-64. Also the reference that the other paths are compared with.
#include "gemm/body.h"

namespace ktbridge {
namespace {

struct Scalar {
  using Vector = float;
  struct Pair {
    float first, second;
  };
  using Row = Pair;
  static constexpr int kWidth = 1, kVectors = 4, kRows = 2;

  static float load(const float* p) { return *p; }
  static void store(float* p, float value) { *p = value; }
  static Pair panel(const bf16* p) { return {to_float(p[0]), to_float(p[1])}; }
  static Row row(const bf16* p) { return panel(p); }
  static float fma(float sum, Row row, Pair pair) {
    return sum + row.first * pair.first + row.second * pair.second;
  }
};

}  // namespace

void gemm_scalar(int rows, int pairs, const bf16* a, std::ptrdiff_t lda, const bf16* panel, float* c,
                 std::ptrdiff_t ldc) {
  gemm_body<Scalar>(rows, pairs, a, lda, panel, c, ldc);
}

}  // namespace ktbridge
