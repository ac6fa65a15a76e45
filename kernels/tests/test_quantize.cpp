// Rows as INT8 and INT4 against plain scalar code: bit for bit, because what is quantized on one machine is
// used on others.
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

template <class T>
std::vector<T> drawn(Random& random, int rows, int columns) {
  std::vector<T> values(static_cast<std::size_t>(rows) * columns);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) {
      // Rows of zeros and of denormals; elsewhere sizes that differ, and magnitudes that are there twice.
      const float scale = r % 5 == 1 ? 0.f : r % 5 == 2 ? 1e-39f : std::exp2(1.f * random.between(-9, 3));
      const float value = c % 7 == 3 ? (c % 2 ? 9.f : -9.f) : random.value();
      values[r * columns + c] = to_stored(value * scale, T{});
    }
  return values;
}

template <class T>
void int8(const Kernels& kernels) {
  Random random(7);
  for (int i = 0; i < 60; ++i) {
    const int rows = random.between(1, 11), columns = random.between(1, 150);
    const check::Case name(std::to_string(rows) + " x " + std::to_string(columns));
    const std::vector<T> values = drawn<T>(random, rows, columns);
    const AtPageEnd<T> source(values);
    Output<std::int8_t> codes(rows * columns);
    Output<float> scales(rows);
    std::vector<std::int8_t> want(rows * columns);
    std::vector<float> units(rows);
    for (int r = 0; r < rows; ++r) {
      float largest = 0;
      for (int c = 0; c < columns; ++c)
        largest = std::max(largest, std::fabs(widened(values[r * columns + c])));
      units[r] = std::max(largest / 127.f, std::numeric_limits<float>::min());
      for (int c = 0; c < columns; ++c)
        want[r * columns + c] =
            static_cast<std::int8_t>(std::nearbyint(widened(values[r * columns + c]) / units[r]));
    }
    CHECK(kernels.quantize({source.data(), sizeof(T) == 2, rows, columns}, Storage::int8, codes.data(),
                           scales.data()));
    CHECK(first_difference(codes.data(), want) == -1);
    CHECK(first_difference(scales.data(), units) == -1);
    CHECK(codes.guards_intact() && scales.guards_intact());
  }
}

template <class T>
void int4(const Kernels& kernels) {
  Random random(8);
  for (int i = 0; i < 60; ++i) {
    const int rows = random.between(1, 11), groups = random.between(1, 5), columns = 32 * groups;
    const check::Case name(std::to_string(rows) + " x " + std::to_string(columns));
    const std::vector<T> values = drawn<T>(random, rows, columns);
    const AtPageEnd<T> source(values);
    Output<std::uint8_t> codes(rows * columns / 2);
    Output<bf16> scales(rows * groups);
    std::vector<std::uint8_t> want(rows * columns / 2);
    std::vector<bf16> units(rows * groups);
    for (int g = 0; g < rows * groups; ++g) {
      float extreme = 0;  // the first of the largest magnitude
      for (int c = 0; c < 32; ++c) {
        const float value = widened(values[32 * g + c]);
        if (std::fabs(value) > std::fabs(extreme)) extreme = value;
      }
      float unit = extreme / -8.f;
      if (std::fabs(unit) < std::numeric_limits<float>::min()) unit = std::numeric_limits<float>::min();
      units[g] = to_bf16(unit);
      for (int c = 0; c < 32; ++c) {
        const float value = std::nearbyint(widened(values[32 * g + c]) / to_float(units[g]));
        const int code = static_cast<int>(std::min(7.f, std::max(-8.f, value))) + 8;
        want[16 * g + c / 2] = static_cast<std::uint8_t>(want[16 * g + c / 2] | code << 4 * (c % 2));
      }
    }
    CHECK(kernels.quantize({source.data(), sizeof(T) == 2, rows, columns}, Storage::int4, codes.data(),
                           scales.data()));
    CHECK(first_difference(codes.data(), want) == -1);
    CHECK(first_difference(scales.data(), units) == -1);
    CHECK(codes.guards_intact() && scales.guards_intact());
  }
}

template <class T>
void tells_what_isnt_finite(const Kernels& kernels) {
  for (Storage storage : {Storage::int8, Storage::int4})
    for (float wrong : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                        -std::numeric_limits<float>::infinity()})
      for (int at = 0; at < 3 * 64; at += 5) {
        std::vector<T> values(3 * 64, to_stored(1.f, T{}));
        values[at] = to_stored(wrong, T{});
        std::vector<std::int8_t> codes(3 * 64);
        std::vector<float> scales(3 * 2);
        CHECK(
            !kernels.quantize({values.data(), sizeof(T) == 2, 3, 64}, storage, codes.data(), scales.data()));
      }
}

}  // namespace

int main() {
  for_each_isa([](const Kernels& kernels) {
    int8<bf16>(kernels);
    int8<float>(kernels);
    int4<bf16>(kernels);
    int4<float>(kernels);
    tells_what_isnt_finite<bf16>(kernels);
    tells_what_isnt_finite<float>(kernels);
  });
  return check::report();
}
