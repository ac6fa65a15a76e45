// What happens to result blocks on their way out of registers: activation, its gradient, rounding and
// reordering (isa/kernels.h says what each owes).
#pragma once

#include "isa/kernels.h"
#include "isa/lanes.h"

namespace ktbridge {
namespace {

constexpr float kInfinity = __builtin_inff();

inline void blocks_to_left(const float* blocks, int m, int n, float scale, const float* column_scale,
                           bf16* left, std::ptrdiff_t stride) {
  const auto row = [&](int i, int j, int r) {
    if (j >= n) return every(0.f);
    const Lanes value =
        load(blocks + (static_cast<std::ptrdiff_t>(i) * n + j) * kBlock + r * kStrip) * every(scale);
    return column_scale == nullptr ? value : value * load(column_scale + j * kStrip);
  };
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; j += 2)
      for (int r = 0; r < kStrip; ++r)
        store(left + i * stride + (j / 2) * kTile + r * kSteps, sequence(row(i, j, r), row(i, j + 1, r)));
}

inline void blocks_to_right(const float* blocks, int m, int n, float scale, bf16* right,
                            std::ptrdiff_t stride) {
  const Pairs zero = pairs(every(0.f), every(0.f));
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < m + m % 2; ++i) {
      bf16* to = right + j * stride + static_cast<std::ptrdiff_t>(i) * (kTile / 2);
      const float* block = blocks + (static_cast<std::ptrdiff_t>(i) * n + j) * kBlock;
      for (int r = 0; r < kStrip; r += 2, to += 2 * kStrip)
        store(to, i < m ? pairs(load(block + r * kStrip) * every(scale),
                                load(block + (r + 1) * kStrip) * every(scale))
                        : zero);
    }
}

// 16 rows of 16 floats, transposed in place; the 32-bit transpose doesn't care what the bits mean.
inline void transpose_block(const float* block, float* target) {
  Pairs rows[16];
  for (int r = 0; r < kStrip; ++r) rows[r] = load_pairs(block + r * kStrip);
  transpose(rows);
  for (int r = 0; r < kStrip; ++r) store(static_cast<void*>(target + r * kStrip), rows[r]);
}

inline void transpose_blocks(const float* blocks, int m, int n, float* target) {
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j)
      transpose_block(blocks + (static_cast<std::ptrdiff_t>(i) * n + j) * kBlock,
                      target + (static_cast<std::ptrdiff_t>(j) * m + i) * kBlock);
}

// h and its derivatives by g and u of pre-activations g and u; `kPlain`: silu(g) u.
template <bool kPlain>
inline Lanes gated(Lanes g, Lanes u, const Gating& gating) {
  if constexpr (kPlain) return g * sigmoid(g) * u;
  const Lanes x = clamp(g, -kInfinity, gating.limit);
  return x * sigmoid(x * every(gating.alpha)) *
         (clamp(u, -gating.limit, gating.limit) + every(gating.offset));
}

template <bool kPlain>
inline void gate_gradients(Lanes g, Lanes u, const Gating& gating, Lanes& h, Lanes& by_g, Lanes& by_u) {
  if constexpr (kPlain) {
    const Lanes s = sigmoid(g);
    by_u = g * s;
    h = by_u * u;
    by_g = u * fma(by_u, every(1.f) - s, s);
    return;
  }
  const Lanes x = clamp(g, -kInfinity, gating.limit);
  const Lanes y = clamp(u, -gating.limit, gating.limit) + every(gating.offset);
  const Lanes s = sigmoid(x * every(gating.alpha)), glu = x * s;
  h = glu * y;
  by_g = keep_within(y * fma(glu * every(gating.alpha), every(1.f) - s, s), g, -kInfinity, gating.limit);
  by_u = keep_within(glu, u, -gating.limit, gating.limit);
}

template <bool kPlain>
inline void activate_by(const float* blocks, std::ptrdiff_t apart, bf16* h, bf16* gate, bf16* up,
                        const Gating& gating) {
  Pairs g[16], u[16];
  for (int i = 0; i < 16; ++i) {
    const float* at = blocks + (i / 8) * apart + (i % 8) * 2 * kStrip;
    const auto row = [&](int projection, int next, const float* bias) {
      const Lanes sum = load(at + 2 * projection * apart + next * kStrip);
      return kPlain || bias == nullptr ? sum : sum + every(bias[2 * i + next]);
    };
    g[i] = pairs(row(0, 0, gating.gate_bias), row(0, 1, gating.gate_bias));
    u[i] = pairs(row(1, 0, gating.up_bias), row(1, 1, gating.up_bias));
  }
  if (h != nullptr)
    for (int i = 0; i < 16; ++i) {
      // From the rounded values, which are what backward will see.
      const Lanes first = gated<kPlain>(low(g[i]), low(u[i]), gating);
      const Lanes second = gated<kPlain>(high(g[i]), high(u[i]), gating);
      store(h + i * kSteps, pairs(first, second));
    }
  if (gate == nullptr) return;
  transpose(g);
  transpose(u);
  for (int i = 0; i < 16; ++i) {
    stream(gate + i * kSteps, g[i]);
    stream(up + i * kSteps, u[i]);
  }
}

inline void activate(const float* blocks, std::ptrdiff_t apart, bf16* h, bf16* gate, bf16* up,
                     const Gating* gating) {
  gating == nullptr ? activate_by<true>(blocks, apart, h, gate, up, {})
                    : activate_by<false>(blocks, apart, h, gate, up, *gating);
}

// dh = w dh~;  d w = <dh~, h>;  dg and du from dh by the gating's derivatives: for h = silu(g) u,
// dg = dh u silu'(g), silu'(g) = s + g s (1 - s) with s = sigmoid(g), and du = dh silu(g).
template <bool kAll, bool kPlain>
inline void inner_gradients_of(const InnerTile& tile, const Gating& gating) {
  for (int i = 0; i < kStrip; ++i) {
    Lanes g[2], u[2], h[2], dg[2], du[2];
    widen(load_pairs(tile.gate + i * kSteps), g[0], g[1]);
    widen(load_pairs(tile.up + i * kSteps), u[0], u[1]);
    const Lanes weight = every(tile.weight[i]);
    Lanes product = every(0.f);
    for (int half = 0; half < 2; ++half) {
      const Lanes d = load(tile.result + half * kBlock + i * kStrip);
      Lanes by_g, by_u;
      gate_gradients<kPlain>(g[half], u[half], gating, h[half], by_g, by_u);
      product = fma(d, h[half], product);
      const Lanes weighted = d * weight;
      du[half] = weighted * by_u;
      dg[half] = weighted * by_g;
    }
    tile.d_weight[i] = sum(product);
    store(tile.d_gate + i * kSteps, sequence(dg[0], dg[1]));
    store(tile.d_up + i * kSteps, sequence(du[0], du[1]));
    const Pairs both = sequence(h[0], h[1]);
    store(tile.h + i * kSteps, kAll ? both : keep(both, tile.kept[i]));
  }
}
inline void inner_gradients(const InnerTile& tile) {
  const auto all = [&]<bool kPlain>(const Gating& gating) {
    tile.kept == nullptr ? inner_gradients_of<true, kPlain>(tile, gating)
                         : inner_gradients_of<false, kPlain>(tile, gating);
  };
  tile.gating == nullptr ? all.operator()<true>({}) : all.operator()<false>(*tile.gating);
}

template <bool kBias>
inline void weigh_rows_with(const float* blocks, std::ptrdiff_t apart, const float* bias, const float* weight,
                            int live, bf16* target, std::ptrdiff_t stride) {
  const Lanes weights = load(weight);
  Pairs rows[16];
  for (int i = 0; i < 16; ++i) {
    const float* at = blocks + (i / 8) * apart + (i % 8) * 2 * kStrip;
    Lanes first = load(at), second = load(at + kStrip);
    if constexpr (kBias) {
      first = first + every(bias[2 * i]);
      second = second + every(bias[2 * i + 1]);
    }
    rows[i] = pairs(first * weights, second * weights);
  }
  transpose(rows);
  for (int i = 0; i < live; ++i) store(target + i * stride, rows[i]);
}
inline void weigh_rows(const float* blocks, std::ptrdiff_t apart, const float* bias, const float* weight,
                       int live, bf16* target, std::ptrdiff_t stride) {
  bias == nullptr ? weigh_rows_with<false>(blocks, apart, bias, weight, live, target, stride)
                  : weigh_rows_with<true>(blocks, apart, bias, weight, live, target, stride);
}

inline void round_rows(const float* blocks, int live, bf16* target, std::ptrdiff_t stride) {
  for (int i = 0; i < live; ++i)
    store(target + i * stride, sequence(load(blocks + i * kStrip), load(blocks + kBlock + i * kStrip)));
}

inline void sum_rows(const bf16* rows, std::ptrdiff_t stride, const int* index, int count, int columns,
                     bf16* target) {
  for (int c = 0; c < columns; c += kSteps) {
    Lanes first = every(0.f), second = every(0.f);
    for (int i = 0; i < count; ++i) {
      Lanes a, b;
      widen(load_pairs(rows + index[i] * stride + c), a, b);
      first = first + a;
      second = second + b;
    }
    const Pairs total = sequence(first, second);
    if (c + kSteps <= columns) {
      store(target + c, total);
    } else {
      bf16 part[kSteps];
      store(part, total);
      __builtin_memcpy(target + c, part, (columns - c) * sizeof(bf16));
    }
  }
}

inline void add_block(const float* block, float* target, int rows, int columns, std::ptrdiff_t stride) {
  if (columns == kStrip) {
    for (int r = 0; r < rows; ++r)
      store(target + r * stride, load(target + r * stride) + load(block + r * kStrip));
    return;
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) target[r * stride + c] += block[r * kStrip + c];
}

inline void add_blocks(const float* blocks, int m, int n, float* target, int rows, int columns, int column0,
                       bool transposed) {
  const auto least = [](int a, int b) { return a < b ? a : b; };
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      const int row = i * kStrip, column = column0 + j * kStrip;
      const int live_rows = least(kStrip, rows - row), live_columns = least(kStrip, columns - column);
      if (live_rows <= 0 || live_columns <= 0) continue;
      const float* block = blocks + (static_cast<std::ptrdiff_t>(i) * n + j) * kBlock;
      if (!transposed) {
        add_block(block, target + static_cast<std::ptrdiff_t>(row) * columns + column, live_rows,
                  live_columns, columns);
      } else {
        float turned[kBlock];
        transpose_block(block, turned);
        add_block(turned, target + static_cast<std::ptrdiff_t>(column) * rows + row, live_columns, live_rows,
                  rows);
      }
    }
}

}  // namespace
}  // namespace ktbridge
