// Every ISA's product, and AMX's block logic on ordinary memory, against sums in double. The operands are
// multiples of 1/8, so float32 sums are exact and must be equal.
#include <cmath>
#include <string>

#include "gemm/amx.h"
#include "support.h"

using namespace ktbridge;

namespace {

constexpr int kMostStrips = 5, kMostTiles = 7;
constexpr bf16 kNan = 0x7fc0;

bf16 eighths(Random& random) { return to_bf16(static_cast<float>(random.between(-16, 16)) / 8); }

// Five strips, with NaNs between one and the next: whatever is read there shows.
struct Operand {
  static constexpr std::ptrdiff_t kStride = (kMostTiles + 1) * kTile;
  std::vector<bf16> values;
  explicit Operand(Random& random) : values(kMostStrips * kStride - kTile, kNan) {
    for (int strip = 0; strip < kMostStrips; ++strip)
      for (int i = 0; i < kMostTiles * kTile; ++i) values[strip * kStride + i] = eighths(random);
  }
};

// result[i][j][m][n] over the first `tiles` tiles.
std::vector<double> reference(const Operand& left, const Operand& right, int tiles) {
  std::vector<double> result(kMostStrips * kMostStrips * kBlock);
  std::size_t at = 0;
  for (int i = 0; i < kMostStrips; ++i)
    for (int j = 0; j < kMostStrips; ++j)
      for (int m = 0; m < kStrip; ++m)
        for (int n = 0; n < kStrip; ++n, ++at)
          for (int k = 0; k < tiles * kSteps; ++k)
            result[at] += static_cast<double>(to_float(left.values[i * Operand::kStride + left_at(m, k)])) *
                          to_float(right.values[j * Operand::kStride + right_at(k, n)]);
  return result;
}

void gemm_is_right(Gemm gemm) {
  Random random(1);
  const Operand left(random), right(random);
  const AtPageEnd<bf16> a(left.values), b(right.values);
  for (int tiles = 0; tiles <= kMostTiles; ++tiles) {
    const std::vector<double> products = reference(left, right, tiles);
    for (int m = 1; m <= kMostStrips; ++m)
      for (int n = 1; n <= kMostStrips; ++n)
        for (bool add : {false, true}) {
          const check::Case name(std::to_string(m) + "x" + std::to_string(n) + " strips, " + std::to_string(tiles) +
                                 " tiles" + (add ? ", added" : ""));
          Output<float> result(m * n * kBlock);
          std::vector<float> want(m * n * kBlock);
          for (std::size_t i = 0; i < want.size(); ++i) {
            const std::size_t block = i / kBlock, of = block / n * kMostStrips + block % n;
            const float before = static_cast<float>(random.between(-64, 64)) / 64;
            want[i] = static_cast<float>(products[of * kBlock + i % kBlock] + (add ? before : 0));
            if (add) result.data()[i] = before;
          }
          gemm({a.data(), Operand::kStride, m}, {b.data(), Operand::kStride, n}, tiles,
               result.data(), add);
          CHECK(first_difference(result.data(), want) == -1);
          CHECK(result.guards_intact());
        }
  }
}

// One strip by one whose last tile is the last thing in its page.
void reads_no_further(Gemm gemm) {
  Random random(2);
  for (int tiles = 1; tiles <= 3; ++tiles) {
    const std::vector<bf16> values = random.many(tiles * kTile, [&] { return eighths(random); });
    const AtPageEnd<bf16> a(values), b(values);
    Output<float> result(kBlock);
    gemm({a.data(), tiles * kTile, 1}, {b.data(), tiles * kTile, 1}, tiles, result.data(), false);
    double corner = 0;
    for (int k = 0; k < tiles * kSteps; ++k)
      corner += static_cast<double>(to_float(values[left_at(15, k)])) * to_float(values[right_at(k, 15)]);
    CHECK(result.data()[kBlock - 1] == corner);
    CHECK(result.guards_intact());
  }
}

// Sums are float32, not bfloat16 or less: random values, whose sums aren't exact.
void sums_in_float32(Gemm gemm) {
  constexpr int kTiles = 40;
  Random random(3);
  const std::vector<bf16> left = random.halves(kTiles * kTile), right = random.halves(kTiles * kTile);
  Output<float> result(kBlock);
  gemm({left.data(), 0, 1}, {right.data(), 0, 1}, kTiles, result.data(), false);
  double worst = 0;
  for (int m = 0; m < kStrip; ++m)
    for (int n = 0; n < kStrip; ++n) {
      double sum = 0;
      for (int k = 0; k < kTiles * kSteps; ++k)
        sum += static_cast<double>(to_float(left[left_at(m, k)])) * to_float(right[right_at(k, n)]);
      worst = std::max(worst, std::abs(sum - result.data()[m * kStrip + n]));
    }
  CHECK(worst < 2e-4);  // the sums themselves are about 10
}

}  // namespace

int main() {
  const auto all = [](Gemm gemm) {
    gemm_is_right(gemm);
    reads_no_further(gemm);
    sums_in_float32(gemm);
  };
  for_each_isa([&](const Kernels& kernels) { all(kernels.gemm); });
  const check::Case name("emulated AMX");
  all(gemm_amx);
  return check::report();
}
