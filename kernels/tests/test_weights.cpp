// pack_left and pack_right of every storage format against plain scalar code: every element of the strips,
// nothing written beside them, nothing read past the last stored byte or scale. (The prefetches ahead of
// pack_right may point anywhere: they can't fault.)
#include "stored.h"

using namespace ktbridge;

namespace {

std::vector<bf16> left_strip(const Stored& w, int row) {
  std::vector<bf16> strip(tiles_of(w.matrix.columns) * kTile);
  for (int r = 0; r < kStrip; ++r)
    for (int k = 0; k < w.matrix.columns; ++k) strip[left_at(r, k)] = w.at(row + r, k);
  return strip;
}

void packs_left(const Kernels& kernels, const Stored& w) {
  const int past_the_end = (strips_of(w.matrix.rows) + 1) * kStrip;  // forward asks for such strips
  for (int row = 0; row < past_the_end; row += kStrip) {
    const std::vector<bf16> want = left_strip(w, row);
    Output<bf16> strip(want.size());
    kernels.pack_left(w.matrix, row, strip.data());
    CHECK(first_difference(strip.data(), want) == -1);
    CHECK(strip.guards_intact());
  }
}

// `gap` elements from the end of a strip to the next belong to somebody else.
void packs_right(const Kernels& kernels, const Stored& w, int count, int gap) {
  const int tiles = tiles_of(w.matrix.rows), all = 2 * tiles_of(w.matrix.columns);
  const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(tiles) * kTile + gap;
  for (int first = 0; first < all; first += 2) {
    const int strips = std::min(count, all - first);
    Output<bf16> target(strips * stride);
    std::vector<bf16> want = target.all_untouched();
    for (int s = 0; s < strips; ++s)
      for (int k = 0; k < tiles * kSteps; ++k)
        for (int c = 0; c < kStrip; ++c)
          want[s * stride + right_at(k, c)] = w.at(k, (first + s) * kStrip + c);
    kernels.pack_right(w.matrix, w.matrix.rows, first * kStrip, {target.data(), stride, strips});
    CHECK(first_difference(target.data(), want) == -1);
    CHECK(target.guards_intact());
  }
}

void random_sizes(const Kernels& kernels) {
  Random random(1);
  const int edges[] = {1, 2, 15, 16, 17, 31, 32, 33, 64, 65};
  const auto size = [&] { return random.bits() % 2 ? edges[random.below(10)] : random.between(1, 200); };
  for (const Format& format : kFormats) {
    const check::Case name(format.name);
    for (int i = 0; i < 30; ++i) {
      // fp32 rows must stay aligned.
      const int rows = size(), columns = size(),
                gap = random.below(3) * (format.storage == Storage::fp32 ? 4 : 2);
      const check::Case sizes(std::to_string(rows) + " x " + std::to_string(columns));
      const Stored w = Stored::random(random, format, rows, columns, gap, random.below(3));
      packs_left(kernels, w);
      for (int count = 1; count <= 4; ++count) packs_right(kernels, w, count, random.below(2) * 64);
    }
  }
}

// A row with all codes there are, and one with all pairs of int4 codes.
void every_code(const Kernels& kernels) {
  Random random(2);
  for (const Format& format : kFormats) {
    if (stored_bytes(format.storage, 2) > 2) continue;
    const check::Case name(format.name);
    std::vector<std::uint8_t> codes;
    for (int code = 0; code < 256; ++code) codes.push_back(static_cast<std::uint8_t>(code));
    if (format.storage == Storage::fp8)
      codes.erase(std::remove_if(codes.begin(), codes.end(), is_e4m3_nan), codes.end());
    const int columns =
        static_cast<int>(codes.size()) * (3 - static_cast<int>(stored_bytes(format.storage, 2)));
    const Stored w(random, format, 1, columns, codes);
    packs_left(kernels, w);
    packs_right(kernels, w, 4, 0);
  }
}

// The LoRA masters: what rounding does to ties, infinities, NaNs and the largest floats.
void fp32_rounds_to_even(const Kernels& kernels) {
  std::vector<std::uint32_t> bits = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0xbf808000, 0x00000000,
                                     0x80000000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                                     0x7f800001, 0xffbfffff, 0x7fffffff, 0x00800000, 0x80ffffff};
  Random random(3);
  for (int copies = 1; copies <= 3; ++copies) {
    std::vector<std::uint8_t> bytes(bits.size() * 4);
    std::memcpy(bytes.data(), bits.data(), bytes.size());
    const Stored w(random, {"fp32", Storage::fp32}, 1, static_cast<int>(bits.size()), bytes);
    packs_left(kernels, w);
    packs_right(kernels, w, 2, 0);
    bits.insert(bits.end(), bits.begin(), bits.begin() + 17);
  }
}

// A factor that isn't there.
void no_rows_are_zeros(const Kernels& kernels) {
  for (const Format& format : kFormats)
    for (int size : {1, 16, 32, 40}) {
      Matrix none;
      none.columns = size;
      none.storage = format.storage;
      const std::vector<bf16> zeros(tiles_of(size) * kTile);
      Output<bf16> left(zeros.size()), right(2 * zeros.size());
      kernels.pack_left(none, 0, left.data());
      CHECK(first_difference(left.data(), zeros) == -1);
      CHECK(left.guards_intact());
      kernels.pack_right(none, size, 0, {right.data(), static_cast<std::ptrdiff_t>(zeros.size()), 2});
      CHECK(first_difference(right.data(), std::vector<bf16>(2 * zeros.size())) == -1);
      CHECK(right.guards_intact());
    }
}

}  // namespace

int main() {
  for_each_isa([](const Kernels& kernels) {
    random_sizes(kernels);
    every_code(kernels);
    fp32_rounds_to_even(kernels);
    no_rows_are_zeros(kernels);
  });
  return check::report();
}
