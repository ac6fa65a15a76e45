// Gradients of moe/layer.h's forward. With dy = d_out[token] (not yet weighted) and w the slot's weight:
//
//   dh~ = dy Wd + s (dy Bd) Ad             d w = <dh~, h>          dh = w dh~
//   dg  = dh u silu'(g)                    du  = dh silu(g)
//   dX  = dg Wg + s (dg Bg) Ag + du Wu + s (du Bu) Au,  summed over the token's slots
//   dB  = d^T t                            dA  = (s d B)^T input,   t = s (input A^T)
//
// The weighted quantities enter dB and dA of down through the thin factors: (w t) and (w s dy Bd).
#include <mutex>

#include "moe/gate_up.h"
#include "moe/pass.h"
#include "moe/schedule.h"

namespace ktbridge {
namespace {

// Panels are 64 columns: 128 bytes of each row, which memory delivers as fast as whole rows.
constexpr int kStrips = 4, kPanelTiles = 2;
constexpr int kPanelsAtOnce = 4;

class Backward {
 public:
  Backward(const Machine& machine, const Experts& experts, const LoraWeights& lora, const Saved& saved,
           const Saved& inner, const bf16* hidden, const bf16* d_out, const LoraGradients& d_lora)
      : kernels_(*machine.kernels),
        experts_(experts),
        lora_(lora),
        sizes_(experts, lora.rank),
        saved_(saved),
        inner_(inner),
        routing_(saved.routing),
        hidden_(hidden),
        d_out_(d_out),
        d_lora_(d_lora),
        d_stride_(gradient_stride(sizes_)),
        dx_stride_(slot_stride(sizes_)),
        d_(routing_.first_strip.back() * d_stride_),
        dx_(routing_.slots() * dx_stride_),
        d_weight_(weight_gradients(sizes_, routing_.slots())),
        thin_(thin_elements(sizes_, routing_.first_double.back())) {}

  // One expert's panels of I: dh~, from it dg, du, partial d w, and the LoRA gradients of these columns.
  void inner(Unit unit) {
    const int expert = unit.expert, tiles = sizes_.hidden_tiles + sizes_.rank_tiles;
    const std::ptrdiff_t stride = tile_elements(tiles);
    const Strips b = pack_factor_b(kDown, sizes_.hidden, expert);
    for_token_blocks(routing_, expert, tiles, kStrips * tiles, [&](TokenBlock block) {
      bf16* dy = workspace(kTokens, block.count * stride);
      for (int j = 0; j < block.count; ++j)
        kernels_.tokens_to_left(strip_tokens(routing_, expert, block.begin + j, d_out_, sizes_.hidden),
                                dy + j * stride);
      const Strips left{dy, stride, block.count};
      Strips thin;
      if (sizes_.rank > 0) thin = thin_inner(expert, block, left, b);

      bf16* panel = workspace(kPanel, kStrips * stride);
      float* result = result_blocks(kMain, block.count * kStrips);
      bf16* h = workspace(kLocal, block.count * tile_elements(kPanelTiles));
      for (int p = unit.begin; p < unit.end; ++p) {
        const int column = p * kStrips * kStrip,
                  live = std::min(kPanelTiles, sizes_.inner_tiles - p * kPanelTiles);
        const Strips right{panel, stride, 2 * live};
        kernels_.pack_right(experts_.weight[kDown][expert], sizes_.hidden, column, right);
        if (sizes_.rank > 0)
          kernels_.pack_right(factor_a(lora_, kDown, sizes_, expert), sizes_.rank, column,
                              {panel + tile_elements(sizes_.hidden_tiles), stride, 2 * live});
        multiply(kernels_, {{left, right, tiles}}, result);
        for (int j = 0; j < block.count; ++j)
          for (int t = 0; t < live; ++t)
            inner_tile(expert, block.begin + j, p * kPanelTiles + t,
                       result + (j * 2 * live + 2 * t) * kBlock, h + (j * kPanelTiles + t) * kTile);
        if (sizes_.rank == 0) continue;
        for (int t = 0; t < live; ++t) {
          const int tile = p * kPanelTiles + t;
          gradient_b(kGate, expert, block, sizes_.rank_tiles + tile, tile * kSteps);
          gradient_b(kUp, expert, block, sizes_.rank_tiles + sizes_.inner_tiles + tile, tile * kSteps);
          if (d_lora_.a[kDown] != nullptr) {
            const Strips turned = over_tokens({h, tile_elements(kPanelTiles), block.count}, t);
            add_gradient(thin, turned, block, d_lora_.a[kDown], expert, sizes_.inner, tile * kSteps, false);
          }
        }
      }
    });
  }

  // s (dg Bg) and s (du Bu) around dg and du in the same strips, and their transposes for dA.
  void thin_hidden(int expert) {
    if (sizes_.rank == 0) return;
    const int strips = sizes_.rank_strips;
    for (Projection projection : {kGate, kUp}) {
      const Strips right = pack_factor_b(projection, sizes_.inner, expert);
      for_token_blocks(routing_, expert, sizes_.inner_tiles, 0, [&](TokenBlock block) {
        Strips d = d_strips(expert, block);
        const bf16* row = d.data;
        d.data += tile_elements(sizes_.rank_tiles + (projection == kUp ? sizes_.inner_tiles : 0));
        float* t = result_blocks(kSmall, block.count * strips);
        multiply(kernels_, {{d, right, sizes_.inner_tiles}}, t);
        const std::ptrdiff_t behind = tile_elements(sizes_.rank_tiles + 2 * sizes_.inner_tiles);
        kernels_.blocks_to_left(t, block.count, strips, lora_.scale, nullptr,
                                const_cast<bf16*>(projection == kGate ? row : row + behind), d_stride_);
        transpose_to(t, block, nullptr,
                     from(thin_strips(thin_, routing_, sizes_, expert, projection), block));
      });
    }
  }

  // One expert's panels of H: dX by slots, and the LoRA gradients of these columns.
  void outer(Unit unit) {
    const int expert = unit.expert, tiles = 2 * sizes_.inner_tiles + 2 * sizes_.rank_tiles;
    const std::ptrdiff_t stride = tile_elements(tiles);
    bf16* panel = workspace(kPanel, kStrips * stride);
    for_token_blocks(routing_, expert, tiles, kStrips * tiles, [&](TokenBlock block) {
      float* result = result_blocks(kMain, block.count * kStrips);
      Strips x, dy;
      for (int p = unit.begin; p < unit.end; ++p) {
        const int column = p * kStrips * kStrip,
                  strips = std::min(kStrips, 2 * tiles_of(sizes_.hidden - column));
        bf16* at = panel;
        const auto pack = [&](const Matrix& matrix, int reduction) {
          kernels_.pack_right(matrix, reduction, column, {at, stride, strips});
          at += tile_elements(tiles_of(reduction));
        };
        pack(factor_a(lora_, kGate, sizes_, expert), sizes_.rank);
        pack(experts_.weight[kGate][expert], sizes_.inner);
        pack(experts_.weight[kUp][expert], sizes_.inner);
        pack(factor_a(lora_, kUp, sizes_, expert), sizes_.rank);
        multiply(kernels_, {{d_strips(expert, block), {panel, stride, strips}, tiles}}, result);
        for (int j = 0; j < block.count; ++j) {
          const int strip = block.begin + j;
          for (int i = 0; i < strips; i += 2)
            kernels_.round_rows(
                result + (j * strips + i) * kBlock, live_rows(routing_, expert, strip),
                dx_.data() + first_slot(routing_, expert, strip) * dx_stride_ + column + i * kStrip,
                dx_stride_);
        }
        if (sizes_.rank == 0) continue;
        const int turn = (p - unit.begin) % kPanelsAtOnce;
        if (turn == 0) {
          const int panels = std::min(kPanelsAtOnce, unit.end - p);
          x = rows_over_tokens(hidden_, kGradient, expert, block, column, panels);
          dy = rows_over_tokens(d_out_, kLocal, expert, block, column, panels);
        }
        const auto part = [&](Strips all) {
          return Strips{all.data + turn * kStrips * all.stride, all.stride, strips};
        };
        outer_gradients(expert, block, column, part(x), part(dy));
      }
    });
  }

  void combine(int unit, bf16* d_hidden, float* d_weights) {
    sum_slots(kernels_, routing_, dx_.data(), dx_stride_, sizes_.hidden, d_hidden, unit);
    const int end = std::min(routing_.tokens, (unit + 1) * kTokensAtOnce) * routing_.top_k;
    for (int source = unit * kTokensAtOnce * routing_.top_k; source < end; ++source) {
      const float* part = d_weight_.data() + routing_.slot_of[source];
      float total = 0.f;
      for (int tile = 0; tile < sizes_.inner_tiles; ++tile)
        total += part[static_cast<std::ptrdiff_t>(tile) * routing_.slots()];
      d_weights[source] = total;
    }
  }

  int inner_panels() const { return ceil_div(sizes_.inner, kStrips * kStrip); }
  int outer_panels() const { return ceil_div(sizes_.hidden, kStrips * kStrip); }

 private:
  // dg and du of one block of tokens: left strips [s dg Bg][dg][du][s du Bu].
  Strips d_strips(int expert, TokenBlock block) const {
    return {d_.data() + (routing_.first_strip[expert] + block.begin) * d_stride_, d_stride_, block.count};
  }

  // B as right strips: r is its width, and the reduction runs down its rows.
  Strips pack_factor_b(Projection projection, int rows, int expert) const {
    const std::ptrdiff_t stride = tile_elements(tiles_of(rows));
    const Strips right{workspace(kFactor, sizes_.rank_strips * stride), stride, sizes_.rank_strips};
    if (sizes_.rank > 0) kernels_.pack_right(factor_b(lora_, projection, sizes_, expert), rows, 0, right);
    return right;
  }

  // s (dy Bd) behind dy in the same strips; returns w s (dy Bd) transposed.
  Strips thin_inner(int expert, TokenBlock block, Strips dy, Strips b) const {
    const int strips = sizes_.rank_strips;
    float* t = result_blocks(kSmall, block.count * strips);
    multiply(kernels_, {{dy, b, sizes_.hidden_tiles}}, t);
    kernels_.blocks_to_left(t, block.count, strips, lora_.scale, nullptr,
                            writable(dy) + tile_elements(sizes_.hidden_tiles), dy.stride);
    const std::ptrdiff_t stride = tile_elements(ceil_div(block.count, 2));
    const Strips turned{workspace(kThin, strips * stride), stride, strips};
    float* weights = result_blocks(kWeights, block.count);
    for (int i = 0; i < block.count; ++i)
      strip_weights(routing_, expert, block.begin + i, weights + i * kStrip);
    transpose_to(t, block, weights, turned);
    return turned;
  }

  // t [token strips][strips of r] -> left strips over tokens, times s and the tokens' weights (or null).
  void transpose_to(const float* t, TokenBlock block, const float* weights, Strips target) const {
    float* turned = result_blocks(kTurned, block.count * sizes_.rank_strips);
    kernels_.transpose_blocks(t, block.count, sizes_.rank_strips, turned);
    kernels_.blocks_to_left(turned, sizes_.rank_strips, block.count, lora_.scale, weights, writable(target),
                            target.stride);
  }

  // One strip of tokens, one tile of I: everything that follows from dh~.
  void inner_tile(int expert, int strip, int tile, const float* result, bf16* h) {
    const std::ptrdiff_t row = routing_.first_strip[expert] + strip;
    const std::ptrdiff_t kept = tile_elements(row * sizes_.inner_tiles + tile);
    bf16* d = d_.data() + row * d_stride_ + tile_elements(sizes_.rank_tiles + tile);
    float weight[kStrip], d_weight[kStrip];
    strip_weights(routing_, expert, strip, weight);
    kernels_.inner_gradients({result, inner_.gate.data() + kept, inner_.up.data() + kept, weight, d,
                              d + tile_elements(sizes_.inner_tiles), h, d_weight});
    float* part = d_weight_.data() + static_cast<std::ptrdiff_t>(tile) * routing_.slots() +
                  first_slot(routing_, expert, strip);
    std::copy_n(d_weight, live_rows(routing_, expert, strip), part);
  }

  // target += thin^T right for one block of tokens; target is [r, columns], or its transpose.
  void add_gradient(Strips thin, Strips right, TokenBlock block, float* tensor, int expert, int columns,
                    int column, bool transposed) const {
    float* sums = result_blocks(kSmall, thin.count * right.count);
    multiply(kernels_, {{thin, right, ceil_div(block.count, 2)}}, sums);
    kernels_.add_blocks(sums, thin.count, right.count,
                        tensor + static_cast<std::ptrdiff_t>(expert) * sizes_.rank * columns, sizes_.rank,
                        columns, column, transposed);
  }

  // dB of gate or up for one tile of I, from tile `tile` of the d strips.
  void gradient_b(Projection projection, int expert, TokenBlock block, int tile, int column) const {
    if (d_lora_.b[projection] == nullptr) return;
    const Strips turned = over_tokens(d_strips(expert, block), tile);
    add_gradient(from(thin_strips(saved_.thin, routing_, sizes_, expert, projection), block), turned, block,
                 d_lora_.b[projection], expert, sizes_.inner, column, true);
  }

  // x or dy of one block of tokens as right strips over tokens, for `panels` panels from `column`: a
  // token's row is read in pieces of up to 512 bytes instead of 128.
  Strips rows_over_tokens(const bf16* source, Purpose purpose, int expert, TokenBlock block, int column,
                          int panels) const {
    const int begin = block.begin * kStrip,
              count = std::min(block.count * kStrip, routing_.rows(expert) - begin);
    const int strips = std::min(panels * kStrips, 2 * tiles_of(sizes_.hidden - column));
    const std::ptrdiff_t stride = tile_elements(ceil_div(block.count, 2));
    const Strips right{workspace(purpose, kPanelsAtOnce * kStrips * stride), stride, strips};
    const int* index = routing_.token.data() + routing_.first[expert] + begin;
    kernels_.token_pairs_to_right({source, sizes_.hidden, index, count, sizes_.hidden}, column, right);
    return right;
  }

  // dA of gate and up, and dB of down, for the columns of H at `column`, whose x and dy are given.
  void outer_gradients(int expert, TokenBlock block, int column, Strips x, Strips dy) const {
    const auto add = [&](const Buffer<bf16>& thin, Projection projection, Strips right, float* tensor,
                         bool transposed) {
      if (tensor != nullptr)
        add_gradient(from(thin_strips(thin, routing_, sizes_, expert, projection), block), right, block,
                     tensor, expert, sizes_.hidden, column, transposed);
    };
    add(thin_, kGate, x, d_lora_.a[kGate], false);
    add(thin_, kUp, x, d_lora_.a[kUp], false);
    add(saved_.thin, kDown, dy, d_lora_.b[kDown], true);
  }

  Strips over_tokens(Strips left, int tile) const {
    const std::ptrdiff_t stride = tile_elements(ceil_div(left.count, 2));
    const Strips right{workspace(kGradient, 2 * stride), stride, 2};
    kernels_.tiles_to_right(left, tile, right);
    return right;
  }

  static Strips from(Strips thin, TokenBlock block) {
    thin.data += tile_elements(block.begin / 2);
    return thin;
  }

  const Kernels& kernels_;
  const Experts& experts_;
  const LoraWeights& lora_;
  const Sizes sizes_;
  const Saved& saved_;  // routing and thin products
  const Saved& inner_;  // g and u
  const Routing& routing_;
  const bf16 *hidden_, *d_out_;
  const LoraGradients& d_lora_;
  const std::ptrdiff_t d_stride_, dx_stride_;
  Buffer<bf16> d_;          // see d_strips
  Buffer<bf16> dx_;         // dX by slots
  Buffer<float> d_weight_;  // partial d w: [tiles of I, slots]
  Buffer<bf16> thin_;       // (s dg Bg)^T and (s du Bu)^T, as Saved::thin
};

// g and u again, where forward didn't keep them.
std::unique_ptr<Saved> recomputed(const Machine& machine, const Experts& experts, const LoraWeights& lora,
                                  const Saved& saved, const bf16* hidden) {
  if (saved.keep == Keep::retain) return nullptr;
  auto again = std::make_unique<Saved>();
  const Sizes sizes(experts, lora.rank);
  reserve_inner(*again, saved.routing, sizes);
  const GateUp gate_up{*machine.kernels, experts, lora, sizes, saved.routing, hidden};
  Work work;
  work.first_panels = sizes.inner_tiles;
  work.first = [&](Unit unit) { gate_up.run(unit, {nullptr, 0, again.get()}); };
  run_work(machine, experts, saved.routing, work);
  return again;
}

}  // namespace

std::size_t backward_memory(int hidden, int intermediate, int rank, const Load& load, Keep keep) {
  const Sizes sizes(hidden, intermediate, rank);
  std::size_t taken = memory_taken(load.strips * gradient_stride(sizes) * sizeof(bf16)) +
                      memory_taken(load.slots * slot_stride(sizes) * sizeof(bf16)) +
                      memory_taken(weight_gradients(sizes, load.slots) * sizeof(float)) +
                      memory_taken(thin_elements(sizes, load.doubles) * sizeof(bf16));
  if (keep == Keep::recompute) taken += 2 * memory_taken(inner_elements(sizes, load.strips) * sizeof(bf16));
  return taken;
}

void backward(const Machine& machine, const Experts& experts, const LoraWeights& lora, const Saved& saved,
              const bf16* hidden, const bf16* d_out, bf16* d_hidden, float* d_weights,
              const LoraGradients& d_lora) {
  std::lock_guard lock(machine.pool->guard());
  const std::unique_ptr<Saved> again = recomputed(machine, experts, lora, saved, hidden);
  Backward pass(machine, experts, lora, saved, again ? *again : saved, hidden, d_out, d_lora);
  Work work;
  work.first_panels = pass.inner_panels();
  work.second_panels = pass.outer_panels();
  work.last_units = ceil_div(saved.routing.tokens, kTokensAtOnce);
  work.first = [&](Unit unit) { pass.inner(unit); };
  work.between = [&](int expert) { pass.thin_hidden(expert); };
  work.second = [&](Unit unit) { pass.outer(unit); };
  work.last = [&](int unit) { pass.combine(unit, d_hidden, d_weights); };
  run_work(machine, experts, saved.routing, work);
}

}  // namespace ktbridge
