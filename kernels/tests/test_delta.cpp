// A thin product added to stored rows, against plain scalar code: bit for bit, because merged checkpoints
// must not depend on the CPU.
#include <cmath>
#include <limits>
#include <string>

#include "support.h"

using namespace ktbridge;

namespace {

float to_stored(float value, float) { return value; }
bf16 to_stored(float value, bf16) { return to_bf16(value); }
float widened(float value) { return value; }
float widened(bf16 value) { return to_float(value); }
std::int64_t run(const Kernels& kernels, const Delta& delta, bf16* values) {
  return kernels.add_delta(delta, values, true);
}
std::int64_t run(const Kernels& kernels, const Delta& delta, float* values) {
  return kernels.add_delta(delta, values, false);
}

// [rank][columns] as the kernel reads it.
std::vector<float> tiled(const std::vector<float>& right, int rank, int columns) {
  std::vector<float> tiles(static_cast<std::size_t>(tiles_of(columns)) * kSteps * rank);
  for (int k = 0; k < rank; ++k)
    for (int c = 0; c < columns; ++c)
      tiles[(c / kSteps * rank + k) * kSteps + c % kSteps] = right[k * columns + c];
  return tiles;
}

template <class T>
void adds(const Kernels& kernels) {
  Random random(6);
  for (int i = 0; i < 150; ++i) {
    const int rank = random.between(1, 20), rows = random.between(1, 19), columns = random.between(1, 100);
    const std::ptrdiff_t stride = columns + random.below(40);
    const check::Case name(std::to_string(rows) + " x " + std::to_string(columns) + ", rank " +
                           std::to_string(rank) + (sizeof(T) == 2 ? ", halves" : ", floats"));
    const std::vector<float> left = random.values(rows * rank);
    std::vector<float> right = random.values(rank * columns);
    for (int at = 0; at < rank * columns; ++at)
      if (at % columns % 5 == 0) right[at] = 0;
    const AtPageEnd<float> lefts(left), rights(tiled(right, rank, columns));
    Output<T> values((rows - 1) * stride + columns);
    std::vector<T> want = values.all_untouched();
    std::int64_t changed = 0;
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; ++c) {
        // Of all sizes, so that some stay as they were; subnormal ones without a delta, which must not
        // vanish.
        const float scale = c % 5 == 0 ? 1e-39f : std::exp2(static_cast<float>(random.between(-12, 12)));
        const T old = to_stored(random.value() * scale, T{});
        float sum = 0;
        for (int k = 0; k < rank; ++k) {
          const float a = left[r * rank + k], b = right[k * columns + c];
          sum = std::fma(a, b, sum);
        }
        T& place = want[r * stride + c];
        place = to_stored(widened(old) + sum, T{});
        changed += widened(place) != widened(old);
        values.data()[r * stride + c] = old;
      }
    const Delta delta{lefts.data(), rights.data(), rank, rows, columns, stride};
    CHECK(run(kernels, delta, values.data()) == changed);
    CHECK(first_difference(values.data(), want) == -1);
    CHECK(values.guards_intact());
  }
}

template <class T>
void tells_what_isnt_finite(const Kernels& kernels) {
  constexpr int kRows = 9, kColumns = 45;
  const float largest = std::numeric_limits<float>::max();
  for (int at = 0; at < kRows * kColumns; at += 7)
    for (float old : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity(), largest * 0.99f}) {
      const check::Case name(std::to_string(old) + " at " + std::to_string(at));
      std::vector<T> values(kRows * kColumns, to_stored(1.f, T{}));
      values[at] = to_stored(old, T{});
      // In float32 the last sum is finite for halves, and beyond bfloat16's range.
      const std::vector<float> left(kRows, largest * (sizeof(T) == 2 ? 0.01f : 0.02f)), right(kColumns, 1.f);
      const std::vector<float> tiles = tiled(right, 1, kColumns);
      CHECK(run(kernels, {left.data(), tiles.data(), 1, kRows, kColumns, kColumns}, values.data()) == -1);
    }
}

}  // namespace

int main() {
  for_each_isa([](const Kernels& kernels) {
    adds<bf16>(kernels);
    adds<float>(kernels);
    tells_what_isnt_finite<bf16>(kernels);
    tells_what_isnt_finite<float>(kernels);
  });
  return check::report();
}
