// Every ISA's product, and AMX's block logic on ordinary memory, against sums in double. The operands are
// multiples of 1/8, so float32 sums are exact and must be equal.
#include <cmath>
#include <string>

#include "gemm/amx.h"
#include "support.h"

using namespace ktbridge;

namespace {

constexpr bf16 kNan = 0x7fc0;

bf16 eighths(Random& random) { return to_bf16(static_cast<float>(random.between(-16, 16)) / 8); }

// Strips with NaNs between one and the next, which show when they are read; the last ends with its page.
struct Operand {
  // Left strips as packed, or as the rows of a matrix where it lies. Of the last strip's rows only the first
  // `live` hold anything.
  static Operand left(Random& random, int count, int tiles, bool in_place, int live) {
    Strips shape{nullptr, tiles * kTile + 32, count};
    if (in_place) {
      const std::ptrdiff_t row = tiles * kSteps + random.below(3);
      shape = {nullptr, kStrip * row, count, row, kSteps, random.below(2) == 1};
    }
    shape.live = live;
    return Operand(random, shape, tiles, false);
  }
  // Of the last strip's columns only the first `live` hold anything.
  static Operand right(Random& random, int count, int tiles, int live) {
    Strips shape{nullptr, tiles * kTile + 64, count};
    shape.live = live;
    return Operand(random, shape, tiles, true);
  }

  float at(int strip, std::ptrdiff_t in_tile, int tile) const {
    return to_float(strips.data[strip * strips.stride + in_tile + tile * strips.tile]);
  }

  Strips strips;
  std::vector<AtPageEnd<bf16>> memory;

 private:
  Operand(Random& random, Strips shape, int tiles, bool columns) : strips(shape) {
    const auto place = [&](int strip, int tile, int row, int step) {
      return strip * shape.stride + tile * shape.tile + row * shape.row + step;
    };
    std::vector<bf16> values(tiles == 0 ? 1 : place(shape.count - 1, tiles - 1, kStrip - 1, kSteps - 1) + 1,
                             kNan);
    for (int strip = 0; strip < shape.count; ++strip)
      for (int tile = 0; tile < tiles; ++tile)
        for (int row = 0; row < kStrip; ++row)
          for (int step = 0; step < kSteps; ++step) {
            const bool dead = strip == shape.count - 1 && (columns ? step / 2 : row) >= shape.live;
            values[place(strip, tile, row, step)] = dead ? bf16{0} : eighths(random);
          }
    memory.emplace_back(values);
    strips.data = memory.back().data();
  }
};

void add_products(const Operand& left, const Operand& right, int tiles, std::vector<double>& sums) {
  std::size_t at = 0;
  for (int i = 0; i < left.strips.count; ++i)
    for (int j = 0; j < right.strips.count; ++j)
      for (int m = 0; m < kStrip; ++m)
        for (int n = 0; n < kStrip; ++n, ++at)
          for (int tile = 0; tile < tiles; ++tile)
            for (int k = 0; k < kSteps; ++k)
              sums[at] += static_cast<double>(left.at(i, m * left.strips.row + k, tile)) *
                          right.at(j, right_at(k, n), tile);
}

void check_products(Gemm gemm, Random& random, int m, int n, const std::vector<int>& tiles, int live = kStrip,
                    int live_rows = kStrip) {
  std::vector<Operand> lefts, rights;
  std::vector<Product> products;
  std::vector<double> sums(m * n * kBlock);
  std::string name = std::to_string(m) + " x " + std::to_string(n) + " strips, " + std::to_string(live_rows) +
                     " x " + std::to_string(live) + " live";
  for (int count : tiles) {
    const bool in_place = random.below(2) == 1;
    lefts.push_back(Operand::left(random, m, count, in_place, live_rows));
    rights.push_back(Operand::right(random, n, count, live));
    add_products(lefts.back(), rights.back(), count, sums);
    products.push_back({lefts.back().strips, rights.back().strips, count});
    name += ", " + std::to_string(count) + " tiles" + (in_place ? " in place" : "");
  }
  const check::Case here(name);
  Output<float> result(sums.size());
  gemm(products.data(), static_cast<int>(products.size()), result.data(), false);
  CHECK(first_difference(result.data(), std::vector<float>(sums.begin(), sums.end())) == -1);
  CHECK(result.guards_intact());
  // Cut anywhere and added up: the same.
  const int first = random.below(static_cast<int>(products.size()) + 1);
  Output<float> added(sums.size());
  if (first > 0) gemm(products.data(), first, added.data(), false);
  gemm(products.data() + first % products.size(), static_cast<int>(products.size()) - first % products.size(),
       added.data(), first > 0 && first < static_cast<int>(products.size()));
  if (first < static_cast<int>(products.size()))
    CHECK(first_difference(added.data(), std::vector<float>(sums.begin(), sums.end())) == -1);
}

void every_shape(Gemm gemm) {
  Random random(1);
  for (int m = 1; m <= 5; ++m)
    for (int n = 1; n <= 5; ++n) {
      for (int tiles = 0; tiles <= 7; ++tiles) check_products(gemm, random, m, n, {tiles});
      check_products(gemm, random, m, n, {random.below(4), random.below(4)});
      check_products(gemm, random, m, n,
                     {random.below(3), random.below(6), random.below(3), random.below(6)});
    }
}

// Last strips that are part full, however long the reduction.
void part_full(Gemm gemm) {
  Random random(3);
  for (int live = 1; live <= kStrip; ++live)
    for (int m = 1; m <= 5; ++m)
      for (int n = 1; n <= 3; ++n) {
        check_products(gemm, random, m, n, {random.between(0, 7)}, live);
        check_products(gemm, random, m, n, {random.between(1, 6), random.below(3)}, live,
                       random.between(1, kStrip));
      }
}

// A column's bits are its own: the same beside fifteen others and alone.
void columns_do_not_see_each_other(Gemm gemm) {
  constexpr int kTiles = 20;
  Random random(4);
  const std::vector<bf16> left = random.halves(3 * kTiles * kTile), all = random.halves(kTiles * kTile);
  Product product{{left.data(), kTiles * kTile, 3}, {all.data(), 0, 1}, kTiles};
  std::vector<float> want(3 * kBlock);
  gemm(&product, 1, want.data(), false);
  for (int live = 1; live < kStrip; ++live) {
    const check::Case name(std::to_string(live) + " columns");
    std::vector<bf16> some = all;
    for (int step = 0; step < kTiles * kSteps; ++step)
      for (int column = live; column < kStrip; ++column) some[right_at(step, column)] = 0;
    product.right.data = some.data();
    product.right.live = live;
    Output<float> got(want.size());
    gemm(&product, 1, got.data(), false);
    std::vector<float> expected = want;
    for (int i = 0; i < 3 * kStrip; ++i)
      for (int column = live; column < kStrip; ++column) expected[i * kStrip + column] = 0;
    CHECK(first_difference(got.data(), expected) == -1);
    CHECK(got.guards_intact());
  }
}

// Sums are float32, not bfloat16 or less: random values, whose sums aren't exact.
void sums_in_float32(Gemm gemm) {
  constexpr int kTiles = 40;
  Random random(2);
  const std::vector<bf16> left = random.halves(kTiles * kTile), right = random.halves(kTiles * kTile);
  const Product product{{left.data(), 0, 1}, {right.data(), 0, 1}, kTiles};
  Output<float> result(kBlock);
  gemm(&product, 1, result.data(), false);
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
    every_shape(gemm);
    part_full(gemm);
    columns_do_not_see_each_other(gemm);
    sums_in_float32(gemm);
  };
  for_each_isa([&](const Kernels& kernels) {
    all(kernels.gemm);
    CHECK(kernels.peak(1000) > 0);
  });
  const check::Case name("emulated AMX");
  all(gemm_amx);
  return check::report();
}
