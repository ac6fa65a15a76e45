#include <mutex>

#include "moe/gate_up.h"
#include "moe/pass.h"
#include "moe/schedule.h"

namespace ktbridge {
namespace {

// Panels of the down projection: 64 rows of H.
constexpr int kDownStrips = 4;

class Forward {
 public:
  Forward(const Machine& machine, const Experts& experts, const LoraWeights& lora, Saved& saved,
          const bf16* hidden)
      : kernels_(*machine.kernels),
        experts_(experts),
        lora_(lora),
        sizes_(experts, lora.rank),
        saved_(saved),
        routing_(saved.routing),
        gate_up_{kernels_, experts, lora, sizes_, routing_, saved.seeds, hidden},
        h_stride_(tile_elements(kMargin + sizes_.inner_tiles + kMargin + sizes_.rank_tiles)),
        y_stride_(slot_stride(sizes_)),
        h_(routing_.first_strip.back() * h_stride_),
        y_(routing_.slots() * y_stride_) {}

  // One expert's panels of I: g, u and h.
  void gate_up(Unit unit) { gate_up_.run(unit, {h_.data() + tile_elements(kMargin), h_stride_, &saved_}); }

  // t = s (h Ad^T), behind h in the same strips; and w t for backward.
  void thin_down(int expert) {
    for_token_blocks(routing_, expert, [&](TokenBlock block) {
      const Strips h = h_strips(expert, block);
      gate_up_.thin(kDown, expert, block, h, thin_strips_behind(h), saved_);
    });
  }

  // One expert's panels of H: w y, by slots.
  void down(Unit unit) {
    const int expert = unit.expert;
    const std::ptrdiff_t stride = tile_elements(sizes_.inner_tiles);
    bf16* room = workspace(kPanel, kDownStrips * h_stride_);
    const Matrix& w = experts_.weight[kDown][expert];
    const Matrix b = factor_b(lora_, kDown, sizes_, expert);
    for_token_blocks(routing_, expert, [&](TokenBlock block) {
      const std::ptrdiff_t apart = static_cast<std::ptrdiff_t>(block.count) * kBlock;
      const Strips h = h_strips(expert, block);
      const auto strips_from = [&](int row) {
        return std::min(kDownStrips, 2 * tiles_of(sizes_.hidden - row));
      };
      const auto add_panel = [&](int p, const Chunk& chunk, float* result) {
        const int row = p * kDownStrips * kStrip;
        Product products[2];
        for (int i = 0; i < chunk.count; ++i) {
          const Stretch at = chunk.stretches[i];
          const bool main = at.part == 0;
          products[i] =
              rows_product(kernels_, main ? w : b, at, row, strips_from(row),
                           main ? h : thin_strips_behind(h), main ? room : room + kDownStrips * stride);
        }
        kernels_.gemm(products, chunk.count, result, !chunk.first);
      };
      const auto finish_panel = [&](int p, const float* result) {
        const int row = p * kDownStrips * kStrip;
        for (int j = 0; j < block.count; ++j) {
          float weights[kStrip];
          strip_weights(routing_, expert, block.begin + j, weights);
          const int slot = first_slot(routing_, expert, block.begin + j);
          for (int i = 0; i < strips_from(row); i += 2)
            kernels_.weigh_rows(result + i * apart + j * kBlock, apart,
                                experts_.bias_at(kDown, expert, row + i * kStrip), weights,
                                live_rows(routing_, expert, block.begin + j),
                                y_.data() + slot * y_stride_ + row + i * kStrip, y_stride_);
        }
      };
      for_panels(
          {unit, block.count, kDownStrips, {sizes_.inner_tiles, sizes_.rank_tiles}, chunk_unit(w, false)},
          add_panel, finish_panel);
    });
  }

  void combine(int unit, bf16* out) {
    sum_slots(kernels_, routing_, y_.data(), y_stride_, sizes_.hidden, out, unit);
  }

  int gate_up_panels() const { return sizes_.inner_tiles; }
  int down_panels() const { return ceil_div(sizes_.hidden, kDownStrips * kStrip); }

 private:
  Strips h_strips(int expert, TokenBlock block) const {
    const std::ptrdiff_t strip = routing_.first_strip[expert] + block.begin;
    return token_strips(routing_, expert, block, h_.data() + strip * h_stride_ + tile_elements(kMargin),
                        h_stride_);
  }

  Strips thin_strips_behind(Strips h) const { return behind(h, sizes_.inner_tiles + kMargin); }

  const Kernels& kernels_;
  const Experts& experts_;
  const LoraWeights& lora_;
  const Sizes sizes_;
  Saved& saved_;
  const Routing& routing_;
  const GateUp gate_up_;
  const std::ptrdiff_t h_stride_, y_stride_;
  Buffer<bf16> h_;  // right strips [margin][h][margin][t of down], tiles of I and of r
  Buffer<bf16> y_;  // weighted outputs by slot
};

}  // namespace

std::unique_ptr<Saved> forward(const Machine& machine, const Experts& experts, const LoraWeights& lora,
                               int tokens, int top_k, const bf16* hidden, const std::int64_t* ids,
                               const float* weights, bf16* out, Keep keep, const Dropout& dropout) {
  auto saved = std::make_unique<Saved>();
  saved->routing = route(experts.count(), tokens, top_k, ids, weights);
  saved->keep = keep;
  if (lora.rank > 0) saved->seeds = drop_seeds(dropout, saved->routing);
  const Sizes sizes(experts, lora.rank);
  if (keep == Keep::retain) reserve_inner(*saved, saved->routing, sizes);
  if (keep != Keep::nothing) reserve_thin(*saved, saved->routing, sizes);

  std::lock_guard lock(machine.pool->guard());
  Forward pass(machine, experts, lora, *saved, hidden);
  Work work;
  work.first_panels = pass.gate_up_panels();
  work.second_panels = pass.down_panels();
  work.last_units = ceil_div(tokens, kTokensAtOnce);
  work.first = [&](Unit unit) { pass.gate_up(unit); };
  work.between = [&](int expert) { pass.thin_down(expert); };
  work.second = [&](Unit unit) { pass.down(unit); };
  work.last = [&](int unit) { pass.combine(unit, out); };
  run_work(machine, experts, saved->routing, work);
  return keep == Keep::nothing ? nullptr : std::move(saved);
}

}  // namespace ktbridge
