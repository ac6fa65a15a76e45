#include "moe/gate_up.h"

namespace ktbridge {
namespace {

// A panel is 32 rows of I of both projections: strips gate, gate, up, up.
constexpr int kStrips = 4;

}  // namespace

// Token strips are [t_gate][x][t_up] and panels [Bg][Wg] and [Wu][Bu], so that each projection's LoRA is
// just a longer reduction.
void GateUp::run(Unit unit, const GateUpTarget& target) const {
  const int expert = unit.expert, thin = sizes.rank_tiles, tiles = sizes.hidden_tiles + thin;
  const std::ptrdiff_t token_stride = tile_elements(tiles + thin), stride = tile_elements(tiles);
  bf16* panel = workspace(kPanel, kStrips * stride);
  const Matrix b[2] = {factor_b(lora, kGate, sizes, expert), factor_b(lora, kUp, sizes, expert)};

  for_token_blocks(routing, expert, tiles, [&](TokenBlock block) {
    bf16* tokens = workspace(kTokens, block.count * token_stride);
    bf16* x = tokens + tile_elements(thin);
    for (int j = 0; j < block.count; ++j)
      kernels.tokens_to_right(strip_tokens(routing, expert, block.begin + j, hidden, sizes.hidden), x + j * token_stride);

    for (Projection projection : {kGate, kUp}) {  // t = s (x A^T)
      if (sizes.rank == 0) break;
      bf16* a = workspace(kFactor, sizes.rank_strips * tile_elements(sizes.hidden_tiles));
      for (int i = 0; i < sizes.rank_strips; ++i)
        kernels.pack_left(factor_a(lora, projection, sizes, expert), i * kStrip, a + i * tile_elements(sizes.hidden_tiles));
      float* t = result_blocks(kSmall, sizes.rank_strips * block.count);
      kernels.gemm({a, tile_elements(sizes.hidden_tiles), sizes.rank_strips}, {x, token_stride, block.count},
                   sizes.hidden_tiles, t, false);
      kernels.blocks_to_right(t, sizes.rank_strips, block.count, lora.scale,
                              projection == kGate ? tokens : x + tile_elements(sizes.hidden_tiles), token_stride);
      if (unit.begin == 0 && target.saved->thin.data() != nullptr) {
        const Strips kept = thin_strips(target.saved->thin, routing, sizes, expert, projection);
        kernels.blocks_to_left(t, sizes.rank_strips, block.count, lora.scale, nullptr,
                               writable(kept) + tile_elements(block.begin / 2), kept.stride);
      }
    }

    float* result = result_blocks(kMain, kStrips * block.count);
    const std::ptrdiff_t apart = static_cast<std::ptrdiff_t>(block.count) * kBlock;
    for (int p = unit.begin; p < unit.end; ++p) {
      for (int i = 0; i < kStrips; ++i) {
        const int row = p * kSteps + (i % 2) * kStrip;
        bf16* strip = panel + i * stride;
        const bool gate = i < 2;
        kernels.pack_left(experts.weight[gate ? kGate : kUp][expert], row, gate ? strip + tile_elements(thin) : strip);
        if (sizes.rank > 0)
          kernels.pack_left(b[gate ? 0 : 1], row, gate ? strip : strip + tile_elements(sizes.hidden_tiles));
      }
      kernels.gemm({panel, stride, 2}, {tokens, token_stride, block.count}, tiles, result, false);
      kernels.gemm({panel + 2 * stride, stride, 2}, {x, token_stride, block.count}, tiles, result + 2 * apart, false);
      for (int j = 0; j < block.count; ++j) {
        const std::ptrdiff_t strip = routing.first_strip[expert] + block.begin + j;
        const std::ptrdiff_t kept = tile_elements(strip * sizes.inner_tiles + p);
        const bool keep = target.saved->gate.data() != nullptr;
        kernels.activate(result + j * kBlock, apart,
                         target.h == nullptr ? nullptr : target.h + strip * target.h_stride + tile_elements(p),
                         keep ? target.saved->gate.data() + kept : nullptr,
                         keep ? target.saved->up.data() + kept : nullptr);
      }
    }
  });
}

void reserve_inner(Saved& saved, const Sizes& sizes) {
  const std::ptrdiff_t tiles = static_cast<std::ptrdiff_t>(saved.routing.first_strip.back()) * sizes.inner_tiles;
  saved.gate.reset(tile_elements(tiles));
  saved.up.reset(tile_elements(tiles));
}

void reserve_thin(Saved& saved, const Sizes& sizes) {
  const std::ptrdiff_t doubles = saved.routing.first_double.back();
  saved.thin.reset(tile_elements(kProjections * doubles * sizes.rank_strips));
}

}  // namespace ktbridge
