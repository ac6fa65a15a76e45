#include "common/parts.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <vector>

#include "common/buffer.h"

namespace ktbridge {
namespace {

constexpr int kLeftStrips = 2, kPanelStrips = 4;  // as forward and backward take them

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Values like weights, for the clock depends on the data; a block of them again and again.
void fill(bf16* data, std::ptrdiff_t count) {
  std::uint32_t random = 1;
  const std::ptrdiff_t block = std::min<std::ptrdiff_t>(count, 1 << 18);
  for (std::ptrdiff_t i = 0; i < block; ++i) {
    random = random * 1664525u + 1013904223u;
    data[i] = static_cast<bf16>(0x3c00u | (random >> 16 & 0x81ffu));  // 2^-7 .. 2^-3, either sign
  }
  for (std::ptrdiff_t i = block; i < count; i += block)
    std::copy_n(data, std::min(block, count - i), data + i);
}

// One thread's matrices and operands. `tokens` has whole strips of the longer reduction.
struct Share {
  Buffer<bf16> weights, tokens, panel;
  Buffer<float> result;
  int matrices = 0, strips, inner, hidden;

  Share(int strips, int inner, int hidden) : strips(strips), inner(inner), hidden(hidden) {}

  void prepare(int count) {
    matrices = count;
    const int longest = tiles_of(std::max(inner, hidden));
    const std::ptrdiff_t size = static_cast<std::ptrdiff_t>(inner) * hidden;
    weights.reset(matrices * size);
    tokens.reset(static_cast<std::ptrdiff_t>(strips) * longest * kTile);
    panel.reset(static_cast<std::ptrdiff_t>(kPanelStrips) * tiles_of(inner) * kTile);
    result.reset(static_cast<std::ptrdiff_t>(strips) * kPanelStrips * kBlock);
    fill(weights.data(), matrices * size);
    fill(tokens.data(), static_cast<std::ptrdiff_t>(strips) * longest * kTile);
    fill(panel.data(), static_cast<std::ptrdiff_t>(kPanelStrips) * tiles_of(inner) * kTile);
  }

  Strips token_strips(int tiles) {
    return {tokens.data(), static_cast<std::ptrdiff_t>(tiles) * kTile, strips};
  }

  void rows(const Kernels& kernels, const bf16* w, bool cold) {
    const int tiles = hidden / kSteps;
    for (int row = 0; row + kLeftStrips * kStrip <= inner; row += kLeftStrips * kStrip) {
      const bf16* at = cold ? w + static_cast<std::ptrdiff_t>(row) * hidden : w;
      const Product product{
          {at, static_cast<std::ptrdiff_t>(kStrip) * hidden, kLeftStrips, hidden, kSteps, cold},
          token_strips(tiles),
          tiles};
      kernels.gemm(&product, 1, result.data(), false);
    }
  }

  void columns(const Kernels& kernels, const bf16* w, bool multiply) {
    const Matrix matrix{w, static_cast<std::ptrdiff_t>(hidden) * 2, inner, hidden, Storage::bf16};
    const int tiles = tiles_of(inner);
    const Strips right{panel.data(), static_cast<std::ptrdiff_t>(tiles) * kTile, kPanelStrips};
    for (int column = 0; column + kPanelStrips * kStrip <= hidden; column += kPanelStrips * kStrip) {
      kernels.pack_right(matrix, inner, column, right);
      const Product product{token_strips(tiles), right, tiles};
      if (multiply) kernels.gemm(&product, 1, result.data(), false);
    }
  }

  void walk(const Kernels& kernels, Part part) {
    const std::ptrdiff_t size = static_cast<std::ptrdiff_t>(inner) * hidden;
    for (int i = 0; i < matrices; ++i) {
      const bf16* w = weights.data() + i * size;
      if (part == Part::products || part == Part::forward)
        rows(kernels, part == Part::forward ? w : weights.data(), part == Part::forward);
      else
        columns(kernels, w, part == Part::backward);
    }
  }
};

}  // namespace

double measure_part(const Kernels& kernels, Pool& pool, Part part, int strips, int inner, int hidden,
                    std::size_t bytes, double seconds) {
  std::lock_guard lock(pool.guard());
  const std::size_t matrix = static_cast<std::size_t>(inner) * hidden * sizeof(bf16);
  const int count = std::max(1, static_cast<int>(bytes / pool.threads() / matrix));
  std::vector<Share> shares;
  for (int i = 0; i < pool.threads(); ++i) shares.emplace_back(strips, inner, hidden);
  pool.run([&](int thread) { shares[thread].prepare(count); });
  std::vector<double> took;
  const double start = now();
  while (took.size() < 4 || now() - start < seconds) {
    const double before = now();
    pool.run([&](int thread) {
      kernels.begin();
      shares[thread].walk(kernels, part);
      kernels.end();
    });
    took.push_back(now() - before);
  }
  took.erase(took.begin());  // cold
  std::nth_element(took.begin(), took.begin() + took.size() / 2, took.end());
  return took[took.size() / 2] * static_cast<double>(bytes) /
         (static_cast<double>(matrix) * count * pool.threads());
}

}  // namespace ktbridge
