#include "moe/gate_up.h"

namespace ktbridge {
namespace {

// A panel is 32 rows of I of both projections: strips gate, gate, up, up of the result.
constexpr int kStrips = 4;

}  // namespace

void GateUp::run(Unit unit, const GateUpTarget& target) const {
  const int expert = unit.expert, tiles = sizes.hidden_tiles + 2 * sizes.rank_tiles;
  const std::ptrdiff_t token_stride = tile_elements(tiles), stride = tile_elements(sizes.hidden_tiles);
  const std::ptrdiff_t thin_stride = tile_elements(sizes.rank_tiles);
  bf16* room = workspace(kPanel, 2 * (stride + thin_stride));
  for_token_blocks(routing, expert, tiles, 4 * sizes.hidden_tiles, [&](TokenBlock block) {
    // Token strips are [x][t of gate][t of up].
    bf16* tokens = workspace(kTokens, block.count * token_stride);
    const auto strips = [&](const bf16* data) {
      return token_strips(routing, expert, block, data, token_stride);
    };
    const Strips x = strips(tokens);
    for (int j = 0; j < block.count; ++j)
      kernels.tokens_to_right(strip_tokens(routing, expert, block.begin + j, hidden, sizes.hidden),
                              tokens + j * token_stride);
    const Strips t[2] = {strips(tokens + stride), strips(tokens + stride + thin_stride)};
    for (Projection projection : {kGate, kUp}) thin(projection, unit, block, x, t[projection], target);

    float* result = result_blocks(kMain, kStrips * block.count);
    const std::ptrdiff_t apart = static_cast<std::ptrdiff_t>(block.count) * kBlock;
    for (int p = unit.begin; p < unit.end; ++p) {
      for (Projection projection : {kGate, kUp}) {
        const int row = p * kSteps;
        const Strips w = left_rows(kernels, experts.weight[projection][expert], row, 2, room);
        const Product main{w, x, sizes.hidden_tiles};
        float* half = result + projection * 2 * apart;
        if (sizes.rank == 0) {
          multiply(kernels, {main}, half);
        } else {
          const Strips b =
              left_rows(kernels, factor_b(lora, projection, sizes, expert), row, 2, room + 2 * stride);
          multiply(kernels, {main, {b, t[projection], sizes.rank_tiles}}, half);
        }
      }
      for (int j = 0; j < block.count; ++j) {
        const std::ptrdiff_t strip = routing.first_strip[expert] + block.begin + j;
        const std::ptrdiff_t kept = tile_elements(strip * sizes.inner_tiles + p);
        const bool keep = target.saved->gate.data() != nullptr;
        kernels.activate(
            result + j * kBlock, apart,
            target.h == nullptr ? nullptr : target.h + strip * target.h_stride + tile_elements(p),
            keep ? target.saved->gate.data() + kept : nullptr,
            keep ? target.saved->up.data() + kept : nullptr);
      }
    }
  });
}

// t = s (x A^T) as right strips, and kept for backward by the unit that has the expert's first panel.
void GateUp::thin(Projection projection, Unit unit, TokenBlock block, Strips x, Strips t,
                  const GateUpTarget& target) const {
  if (sizes.rank == 0) return;
  const std::ptrdiff_t stride = tile_elements(sizes.hidden_tiles);
  bf16* room = workspace(kFactor, sizes.rank_strips * stride);
  const Strips a =
      left_rows(kernels, factor_a(lora, projection, sizes, unit.expert), 0, sizes.rank_strips, room);
  float* result = result_blocks(kSmall, sizes.rank_strips * block.count);
  multiply(kernels, {{a, x, sizes.hidden_tiles}}, result);
  kernels.blocks_to_right(result, sizes.rank_strips, block.count, lora.scale, writable(t), t.stride);
  if (unit.begin != 0 || target.saved->thin.data() == nullptr) return;
  const Strips kept = thin_strips(target.saved->thin, routing, sizes, unit.expert, projection);
  kernels.blocks_to_left(result, sizes.rank_strips, block.count, lora.scale, nullptr,
                         writable(kept) + tile_elements(block.begin / 2), kept.stride);
}

void reserve_inner(Saved& saved, const Routing& routing, const Sizes& sizes) {
  saved.gate.reset(inner_elements(sizes, routing.first_strip.back()));
  saved.up.reset(inner_elements(sizes, routing.first_strip.back()));
}

void reserve_thin(Saved& saved, const Routing& routing, const Sizes& sizes) {
  saved.thin.reset(thin_elements(sizes, routing.first_double.back()));
}

std::size_t saved_memory(int hidden, int intermediate, int rank, const Load& load, Keep keep) {
  const Sizes sizes(hidden, intermediate, rank);
  if (keep == Keep::nothing) return 0;
  const std::size_t thin = memory_taken(thin_elements(sizes, load.doubles) * sizeof(bf16));
  const std::size_t inner = memory_taken(inner_elements(sizes, load.strips) * sizeof(bf16));
  return keep == Keep::retain ? thin + 2 * inner : thin;
}

}  // namespace ktbridge
