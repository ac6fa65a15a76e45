#include <mutex>

#include "moe/gate_up.h"
#include "moe/pass.h"
#include "moe/schedule.h"

namespace ktbridge {
namespace {

// Panels of the down projection: 64 rows of H.
constexpr int kDownStrips = 4;

class Forward : Pass {
 public:
  Forward(const Pass& pass, Saved& saved)
      : Pass(pass),
        saved_(saved),
        gate_up_{pass},
        h_stride_(tile_elements(kMargin + sizes.inner_tiles + kMargin + sizes.rank_tiles)),
        y_stride_(slot_stride(sizes)),
        h_(routing.first_strip.back() * h_stride_),
        y_(routing.slots() * y_stride_) {}

  // One expert's panels of I: g, u and h.
  void gate_up(Unit unit) { gate_up_.run(unit, {h_.data() + tile_elements(kMargin), h_stride_, &saved_}); }

  // t = s (h Ad^T), behind h in the same strips; and w t for backward.
  void thin_down(int expert) {
    for_token_blocks(routing, expert, [&](TokenBlock block) {
      const Strips h = h_strips(expert, block);
      gate_up_.thin(kDown, expert, block, h, thin_strips_behind(h), saved_);
    });
  }

  // One expert's panels of H: w y, by slots.
  void down(Unit unit) {
    const int expert = unit.expert;
    bf16* room = workspace(kPanel, kDownStrips * h_stride_);
    const Matrix& w = experts.weight[kDown][expert];
    const Matrix b = factor_b(kDown, expert);
    for_token_blocks(routing, expert, [&](TokenBlock block) {
      const std::ptrdiff_t apart = static_cast<std::ptrdiff_t>(block.count) * kBlock;
      const Strips h = h_strips(expert, block);
      const auto strips_from = [&](int row) {
        return std::min(kDownStrips, 2 * tiles_of(sizes.hidden - row));
      };
      const auto add_panel = [&](int p, const Chunk& chunk, float* result) {
        const int row = p * kDownStrips * kStrip;
        add_rows(kernels, chunk, w, b, row, strips_from(row), h, thin_strips_behind(h), room, result);
      };
      const auto finish_panel = [&](int p, const float* result) {
        const int row = p * kDownStrips * kStrip;
        for (int j = 0; j < block.count; ++j) {
          float weights[kStrip];
          strip_weights(expert, block.begin + j, weights);
          const int slot = first_slot(expert, block.begin + j);
          for (int i = 0; i < strips_from(row); i += 2)
            kernels.weigh_rows(result + i * apart + j * kBlock, apart,
                               experts.bias_at(kDown, expert, row + i * kStrip), weights,
                               live_rows(expert, block.begin + j),
                               y_.data() + slot * y_stride_ + row + i * kStrip, y_stride_);
        }
      };
      for_panels(
          {unit, block.count, kDownStrips, {sizes.inner_tiles, sizes.rank_tiles}, chunk_unit(w, false)},
          add_panel, finish_panel);
    });
  }

  void combine(int unit, bf16* out) { sum_slots(y_.data(), out, unit); }

 private:
  Strips h_strips(int expert, TokenBlock block) const {
    const std::ptrdiff_t strip = routing.first_strip[expert] + block.begin;
    return token_strips(expert, block, h_.data() + strip * h_stride_ + tile_elements(kMargin), h_stride_);
  }

  Strips thin_strips_behind(Strips h) const { return behind(h, sizes.inner_tiles + kMargin); }

  Saved& saved_;
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
  const Pass pass{*machine.kernels, experts,      lora,  Sizes(experts, lora.rank),
                  saved->routing,   saved->seeds, hidden};
  if (keep == Keep::retain) reserve_inner(*saved, pass);
  if (keep != Keep::nothing) saved->thin.reset(thin_elements(pass.sizes, pass.routing.first_double.back()));

  std::lock_guard lock(machine.pool->guard());
  Forward forward(pass, *saved);
  Work work;
  work.first_panels = pass.sizes.inner_tiles;
  work.second_panels = ceil_div(experts.hidden, kDownStrips * kStrip);
  work.last_units = ceil_div(tokens, Pass::kTokensAtOnce);
  work.first = [&](Unit unit) { forward.gate_up(unit); };
  work.between = [&](int expert) { forward.thin_down(expert); };
  work.second = [&](Unit unit) { forward.down(unit); };
  work.last = [&](int unit) { forward.combine(unit, out); };
  run_work(machine, experts, saved->routing, work);
  return keep == Keep::nothing ? nullptr : std::move(saved);
}

}  // namespace ktbridge
