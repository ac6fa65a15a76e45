// Tokens picked out of a matrix, as strips of either side, against plain scalar code.
#include <string>

#include "support.h"

using namespace ktbridge;

namespace {

// `count` of `rows` rows in any order, some twice; the last row of the source ends where its page does, and
// is always among them.
struct Batch {
  Batch(Random& random, int count, int columns)
      : gap(random.below(2) * 7),
        index(random.many(count, [&] { return random.below(kRows); })),
        source(random.any_bits((kRows - 1) * (columns + gap) + columns)),
        at_end(source),
        index_at_end(last_among(index)) {
    tokens = {at_end.data(), columns + gap, index_at_end.data(), count, columns};
  }
  bf16 at(int token, int column) const {
    return token < tokens.count && column < tokens.columns ? tokens.row(token)[column] : bf16{0};
  }
  static constexpr int kRows = 20;
  int gap;
  std::vector<int> index;
  std::vector<bf16> source;
  AtPageEnd<bf16> at_end;
  AtPageEnd<int> index_at_end;
  Tokens tokens;

 private:
  static const std::vector<int>& last_among(std::vector<int>& index) {
    if (!index.empty()) index.back() = kRows - 1;
    return index;
  }
};

void one_strip(const Kernels& kernels) {
  Random random(1);
  for (int count = 0; count <= kStrip; ++count)
    for (int columns : {1, 2, 31, 32, 33, 64, random.between(1, 300)}) {
      const check::Case name(std::to_string(count) + " tokens of " + std::to_string(columns));
      const Batch batch(random, count, columns);
      std::vector<bf16> left(tiles_of(columns) * kTile), right = left;
      for (int k = 0; k < columns; ++k)
        for (int i = 0; i < kStrip; ++i) left[left_at(i, k)] = right[right_at(k, i)] = batch.at(i, k);
      Output<bf16> strip(left.size()), other(right.size());
      kernels.tokens_to_left(batch.tokens, strip.data());
      kernels.tokens_to_right(batch.tokens, other.data());
      CHECK(first_difference(strip.data(), left) == -1);
      CHECK(first_difference(other.data(), right) == -1);
      CHECK(strip.guards_intact() && other.guards_intact());
    }
}

void pairs_of_tokens(const Kernels& kernels) {
  Random random(2);
  for (int i = 0; i < 80; ++i) {
    const int count = i < 34 ? i : random.between(1, 150), columns = random.between(1, 200);
    const int column = random.below(tiles_of(columns)) * kSteps, strips = 2 * random.between(1, 2);
    const check::Case name(std::to_string(count) + " tokens of " + std::to_string(columns) + " from " +
                           std::to_string(column));
    const Batch batch(random, count, columns);
    const std::ptrdiff_t stride = tiles_of(count) * kTile + random.below(2) * 64;
    Output<bf16> target(strips * stride);
    std::vector<bf16> want = target.all_untouched();
    for (int s = 0; s < strips; ++s)
      for (int k = 0; k < tiles_of(count) * kSteps; ++k)
        for (int c = 0; c < kStrip; ++c)
          want[s * stride + right_at(k, c)] = batch.at(k, column + s * kStrip + c);
    kernels.token_pairs_to_right(batch.tokens, column, {target.data(), stride, strips});
    CHECK(first_difference(target.data(), want) == -1);
    CHECK(target.guards_intact());
  }
}

void tiles_of_strips(const Kernels& kernels) {
  Random random(3);
  for (int strips = 1; strips <= 6; ++strips)
    for (int tile = 0; tile < 3; ++tile) {
      const check::Case name(std::to_string(strips) + " strips, tile " + std::to_string(tile));
      const std::ptrdiff_t left_stride = 3 * kTile + 32, stride = ceil_div(strips, 2) * kTile + 64;
      const std::vector<bf16> values = random.any_bits((strips - 1) * left_stride + (tile + 1) * kTile);
      const AtPageEnd<bf16> left(values);
      Output<bf16> target(2 * stride);
      std::vector<bf16> want = target.all_untouched();
      for (int s = 0; s < 2; ++s)
        for (int token = 0; token < ceil_div(strips, 2) * kSteps; ++token)
          for (int c = 0; c < kStrip; ++c)
            want[s * stride + right_at(token, c)] =
                token / kStrip < strips ? values[token / kStrip * left_stride +
                                                 left_at(token % kStrip, tile * kSteps + s * kStrip + c)]
                                        : bf16{0};
      kernels.tiles_to_right({left.data(), left_stride, strips}, tile, {target.data(), stride, 2});
      CHECK(first_difference(target.data(), want) == -1);
      CHECK(target.guards_intact());
    }
}

}  // namespace

int main() {
  for_each_isa([](const Kernels& kernels) {
    one_strip(kernels);
    pairs_of_tokens(kernels);
    tiles_of_strips(kernels);
  });
  return check::report();
}
