// What happens to result blocks on their way out, against plain scalar code. Reordering, scaling and
// rounding are exact, so they must be equal bit for bit; the activation and its gradient are near.
#include <string>

#include "support.h"

using namespace ktbridge;

namespace {

float at(const std::vector<float>& blocks, int n, int i, int j, int row, int column) {
  return blocks[(i * n + j) * kBlock + row * kStrip + column];
}

void to_strips(const Kernels& kernels) {
  Random random(1);
  for (int m = 1; m <= 5; ++m)
    for (int n = 1; n <= 5; ++n) {
      const check::Case name(std::to_string(m) + " x " + std::to_string(n) + " blocks");
      const float scale = random.value();
      const std::vector<float> blocks = random.values(m * n * kBlock), weights = random.values(n * kStrip);
      const AtPageEnd<float> input(blocks), weight(weights);
      const int left_tiles = ceil_div(n, 2), right_tiles = ceil_div(m, 2);
      const std::ptrdiff_t left_stride = left_tiles * kTile + 64, right_stride = right_tiles * kTile + 64;
      for (bool weighted : {false, true}) {
        Output<bf16> left(m * left_stride);
        std::vector<bf16> want = left.all_untouched();
        for (int i = 0; i < m; ++i)
          for (int r = 0; r < kStrip; ++r)
            for (int k = 0; k < left_tiles * kSteps; ++k) {
              const int j = k / kStrip, c = k % kStrip;
              const float value = j < n ? at(blocks, n, i, j, r, c) * scale : 0.f;
              want[i * left_stride + left_at(r, k)] = to_bf16(j < n && weighted ? value * weights[k] : value);
            }
        kernels.blocks_to_left(input.data(), m, n, scale, weighted ? weight.data() : nullptr, left.data(),
                               left_stride);
        CHECK(first_difference(left.data(), want) == -1);
        CHECK(left.guards_intact());
      }
      Output<bf16> right(n * right_stride);
      std::vector<bf16> want = right.all_untouched();
      for (int j = 0; j < n; ++j)
        for (int k = 0; k < right_tiles * kSteps; ++k)
          for (int c = 0; c < kStrip; ++c)
            want[j * right_stride + right_at(k, c)] =
                k / kStrip < m ? to_bf16(at(blocks, n, k / kStrip, j, k % kStrip, c) * scale) : bf16{0};
      kernels.blocks_to_right(input.data(), m, n, scale, right.data(), right_stride);
      CHECK(first_difference(right.data(), want) == -1);
      CHECK(right.guards_intact());
    }
}

void transposes(const Kernels& kernels) {
  Random random(2);
  for (int m = 1; m <= 4; ++m)
    for (int n = 1; n <= 4; ++n) {
      const std::vector<float> blocks = random.values(m * n * kBlock);
      const AtPageEnd<float> input(blocks);
      std::vector<float> want(blocks.size());
      for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j)
          for (int r = 0; r < kStrip; ++r)
            for (int c = 0; c < kStrip; ++c)
              want[(j * m + i) * kBlock + c * kStrip + r] = at(blocks, n, i, j, r, c);
      Output<float> target(want.size());
      kernels.transpose_blocks(input.data(), m, n, target.data());
      CHECK(first_difference(target.data(), want) == -1);
      CHECK(target.guards_intact());
    }
}

void to_rows(const Kernels& kernels) {
  Random random(3);
  for (int live = 1; live <= kStrip; ++live) {
    const check::Case name(std::to_string(live) + " live rows");
    const std::ptrdiff_t apart = random.between(1, 3) * kBlock, stride = kSteps + random.below(3) * 16;
    const std::vector<float> blocks = random.values(apart + kBlock), weights = random.values(kStrip);
    const std::vector<float> biases = random.values(kSteps);
    const AtPageEnd<float> input(blocks), weight(weights), bias(biases);
    const std::vector<float> neighbours = random.values(2 * kBlock);
    const AtPageEnd<float> neighbour(neighbours);
    Output<bf16> weighed(live * stride), rounded(live * stride);
    std::vector<bf16> want_weighed = weighed.all_untouched(), want_rounded = want_weighed;
    for (int i = 0; i < live; ++i)
      for (int c = 0; c < kSteps; ++c) {
        want_weighed[i * stride + c] = to_bf16(
            (blocks[c / kStrip * apart + c % kStrip * kStrip + i] + (live % 2 ? biases[c] : 0)) * weights[i]);
        want_rounded[i * stride + c] = to_bf16(neighbours[c / kStrip * kBlock + i * kStrip + c % kStrip]);
      }
    kernels.weigh_rows(input.data(), apart, live % 2 ? bias.data() : nullptr, weight.data(), live,
                       weighed.data(), stride);
    kernels.round_rows(neighbour.data(), live, rounded.data(), stride);
    CHECK(first_difference(weighed.data(), want_weighed) == -1);
    CHECK(first_difference(rounded.data(), want_rounded) == -1);
    CHECK(weighed.guards_intact() && rounded.guards_intact());
  }
}

void sums_rows(const Kernels& kernels) {
  Random random(4);
  constexpr int kRows = 12;
  for (int i = 0; i < 60; ++i) {
    const int count = random.below(9), columns = random.between(1, 150);
    const check::Case name(std::to_string(count) + " rows of " + std::to_string(columns));
    const std::ptrdiff_t stride = tiles_of(columns) * kSteps;
    const std::vector<bf16> rows = random.halves(kRows * stride);
    std::vector<int> index = random.many(count, [&] { return random.below(kRows); });
    if (count > 0) index.back() = kRows - 1;
    const AtPageEnd<bf16> input(rows);
    const AtPageEnd<int> indices(index);
    std::vector<bf16> want(columns);
    for (int c = 0; c < columns; ++c) {
      float sum = 0;
      for (int row : index) sum += to_float(rows[row * stride + c]);
      want[c] = to_bf16(sum);
    }
    Output<bf16> target(columns);
    kernels.sum_rows(input.data(), stride, indices.data(), count, columns, target.data());
    CHECK(first_difference(target.data(), want) == -1);
    CHECK(target.guards_intact());
  }
}

void adds_blocks(const Kernels& kernels) {
  Random random(5);
  for (int i = 0; i < 100; ++i) {
    const int m = random.between(1, 4), n = random.between(1, 4);
    const int rows = random.between(1, m * kStrip + 5), columns = random.between(1, 100);
    const int column0 = random.below(tiles_of(columns)) * kSteps;
    const bool transposed = i % 2 == 1;
    const check::Case name(std::to_string(m) + " x " + std::to_string(n) + " blocks into " +
                           std::to_string(rows) + " x " + std::to_string(columns) + " from " +
                           std::to_string(column0));
    const std::vector<float> blocks = random.values(m * n * kBlock);
    const AtPageEnd<float> input(blocks);
    std::vector<float> want = random.values(rows * columns);
    Output<float> target(want.size());
    std::copy(want.begin(), want.end(), target.data());
    for (int r = 0; r < std::min(rows, m * kStrip); ++r)
      for (int c = column0; c < std::min(columns, column0 + n * kStrip); ++c)
        want[transposed ? c * rows + r : r * columns + c] +=
            at(blocks, n, r / kStrip, (c - column0) / kStrip, r % kStrip, (c - column0) % kStrip);
    kernels.add_blocks(input.data(), m, n, target.data(), rows, columns, column0, transposed);
    CHECK(first_difference(target.data(), want) == -1);
    CHECK(target.guards_intact());
  }
}

}  // namespace

int main() {
  for_each_isa([](const Kernels& kernels) {
    to_strips(kernels);
    transposes(kernels);
    to_rows(kernels);
    sums_rows(kernels);
    adds_blocks(kernels);
  });
  return check::report();
}
