#include "moe/gate_up.h"

namespace ktbridge {
namespace {

// A panel is 32 rows of I of both projections: strips gate, gate, up, up of the result.
constexpr int kStrips = 4;

}  // namespace

void GateUp::run(Unit unit, const GateUpTarget& target) const {
  const int expert = unit.expert, tiles = sizes.hidden_tiles + 2 * kMargin + 2 * sizes.rank_tiles;
  const std::ptrdiff_t token_stride = tile_elements(tiles), stride = tile_elements(sizes.hidden_tiles);
  const std::ptrdiff_t thin_stride = tile_elements(sizes.rank_tiles);
  bf16* room = workspace(kPanel, 2 * (stride + thin_stride));
  for_token_blocks(routing, expert, [&](TokenBlock block) {
    // Token strips are [margin][x][margin][t of gate][t of up].
    bf16* tokens = workspace(kTokens, block.count * token_stride) + tile_elements(kMargin);
    const auto strips = [&](const bf16* data) { return token_strips(expert, block, data, token_stride); };
    const Strips x = strips(tokens);
    for (int j = 0; j < block.count; ++j) {
      kernels.tokens_to_right(strip_tokens(expert, block.begin + j, hidden), tokens + j * token_stride);
      zero_margins(tokens + j * token_stride, sizes.hidden_tiles);
    }
    bf16* thin_tokens = tokens + stride + tile_elements(kMargin);
    const Strips t[2] = {strips(thin_tokens), strips(thin_tokens + thin_stride)};
    Saved nowhere;  // only the unit that has the expert's first panel keeps them
    for (Projection projection : {kGate, kUp})
      thin(projection, expert, block, x, t[projection], unit.begin == 0 ? *target.saved : nowhere);

    const std::ptrdiff_t apart = static_cast<std::ptrdiff_t>(block.count) * kBlock;
    const auto add_panel = [&](int p, const Chunk& chunk, float* result) {
      for (Projection projection : {kGate, kUp}) {
        add_rows(kernels, chunk, experts.weight[projection][expert], factor_b(projection, expert), p * kSteps,
                 2, x, t[projection], room, result + projection * 2 * apart);
      }
    };
    const auto finish_panel = [&](int p, const float* result) {
      Gating room_for_gating;
      const Gating* gating = experts.gating_at(expert, p * kSteps, room_for_gating);
      for (int j = 0; j < block.count; ++j) {
        const std::ptrdiff_t strip = routing.first_strip[expert] + block.begin + j;
        if (p == 0 && target.h != nullptr)
          zero_margins(target.h + strip * target.h_stride, sizes.inner_tiles);
        const std::ptrdiff_t kept = tile_elements(strip * sizes.inner_tiles + p);
        const bool keep = target.saved->gate.data() != nullptr;
        kernels.activate(
            result + j * kBlock, apart,
            target.h == nullptr ? nullptr : target.h + strip * target.h_stride + tile_elements(p),
            keep ? target.saved->gate.data() + kept : nullptr,
            keep ? target.saved->up.data() + kept : nullptr, gating);
      }
    };
    const int chunk = chunk_unit(experts.weight[kGate][expert], false);
    for_panels({unit, block.count, kStrips, {sizes.hidden_tiles, sizes.rank_tiles}, chunk}, add_panel,
               finish_panel);
  });
}

void GateUp::clear_others(int expert, int begin, int count, int strips, float* result) const {
  for (int token = begin * kStrip; token < std::min((begin + count) * kStrip, routing.rows(expert));
       ++token) {
    if (lora.of_token[routing.token[routing.first[expert] + token]]) continue;
    const int strip = token / kStrip - begin, column = token % kStrip;
    for (int row = 0; row < strips * kStrip; ++row)
      result[(row / kStrip * count + strip) * kBlock + row % kStrip * kStrip + column] = 0.f;
  }
}

void GateUp::thin(Projection projection, int expert, TokenBlock block, Strips input, Strips t,
                  Saved& kept) const {
  if (sizes.rank == 0) return;
  const int strips = sizes.rank_strips, tiles = projection == kDown ? sizes.inner_tiles : sizes.hidden_tiles;
  bf16* room = workspace(kFactor, strips * tile_elements(tiles));
  const Strips a = left_rows(kernels, factor_a(projection, expert), 0, strips, room);
  const auto product = [&](int first, Strips some) {
    float* result = result_blocks(kSmall, strips * some.count);
    multiply(kernels, {{a, some, tiles}}, result);
    const int begin = block.begin + first;
    if (lora.of_token != nullptr) clear_others(expert, begin, some.count, strips, result);
    kernels.blocks_to_right(result, strips, some.count, lora.scale, writable(t) + first * t.stride, t.stride);
    if (kept.thin.data() == nullptr) return;
    float* weights = projection == kDown ? result_blocks(kWeights, some.count) : nullptr;
    for (int i = 0; i < some.count && weights != nullptr; ++i)
      strip_weights(expert, begin + i, weights + i * kStrip);
    const Strips thin = thin_strips(kept.thin, projection, expert);
    kernels.blocks_to_left(result, strips, some.count, lora.scale, weights,
                           writable(thin) + tile_elements(begin / 2), thin.stride);
  };
  for_lora_input(projection, expert, block, input, tiles, product);
}

void reserve_inner(Saved& saved, const Pass& pass) {
  const std::ptrdiff_t elements = inner_elements(pass.sizes, pass.routing.first_strip.back());
  saved.gate.reset(elements);
  saved.up.reset(elements);
}

std::unique_ptr<Saved> recomputed(const Machine& machine, const Pass& pass, Keep keep) {
  if (keep == Keep::retain) return nullptr;
  auto again = std::make_unique<Saved>();
  reserve_inner(*again, pass);
  const GateUp gate_up{pass};
  Work work;
  work.first_panels = pass.sizes.inner_tiles;
  work.first = [&](Unit unit) { gate_up.run(unit, {nullptr, 0, again.get()}); };
  run_work(machine, pass.experts, pass.routing, work);
  return again;
}

Memory pass_memory(int hidden, int intermediate, int rank, const Load& load, Keep keep) {
  const Sizes sizes(hidden, intermediate, rank);
  const std::size_t thin = memory_taken(thin_elements(sizes, load.doubles) * sizeof(bf16));
  const std::size_t inner = 2 * memory_taken(inner_elements(sizes, load.strips) * sizeof(bf16));
  const std::size_t taken = memory_taken(load.strips * gradient_stride(sizes) * sizeof(bf16)) +
                            memory_taken(load.slots * slot_stride(sizes) * sizeof(bf16)) +
                            memory_taken(weight_gradients(sizes, load.slots) * sizeof(float)) + thin;
  return keep == Keep::retain ? Memory{thin + inner, taken} : Memory{thin, taken + inner};
}

}  // namespace ktbridge
