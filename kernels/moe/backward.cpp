// Gradients of moe/layer.h's forward. With dy = d_out[token] (not yet weighted) and w the slot's weight:
//
//   dh~ = dy Wd + s (dy Bd) Ad             d w = <dh~, h> + <dy, down's bias>      dh = w dh~
//   dg  = dh u silu'(g)                    du  = dh silu(g)      (for a Gating: moe/epilogues.h)
//   dX  = dg Wg + s (dg Bg) Ag + du Wu + s (du Bu) Au,  summed over the token's slots
//   dB  = d^T t                            dA  = (s d B)^T input,   t = s (input A^T)
//
// With dropout (moe/dropout.h) A's products, which are in dh~ and dX, count only where the input was kept,
// so they are apart from W's; and dA takes the input without what was dropped.
//
// The weighted quantities enter dB and dA of down through the thin factors: (w t) and (w s dy Bd).
#include <mutex>

#include "moe/gate_up.h"
#include "moe/pass.h"
#include "moe/schedule.h"

namespace ktbridge {
namespace {

// Panels are 128 columns: 256 bytes of each row, so that a page, or a line that two panels share, is
// touched half as often as with 128 bytes. Chunks of at most 48 tiles, 1,536 rows: as many pages stay in
// the TLB.
constexpr int kStrips = 8, kPanelTiles = 4, kMostTiles = 48;
constexpr int kPanelsAtOnce = 2;

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
    for_token_blocks(routing_, expert, [&](TokenBlock block) {
      bf16* dy = workspace(kTokens, block.count * stride);
      for (int j = 0; j < block.count; ++j)
        kernels_.tokens_to_left(strip_tokens(routing_, expert, block.begin + j, d_out_, sizes_.hidden),
                                dy + j * stride);
      const Strips left = token_strips(routing_, expert, block, dy, stride);
      Strips thin;
      if (sizes_.rank > 0) thin = thin_inner(expert, block, left, b);

      if (unit.begin == 0)
        bias_products(kernels_, experts_, routing_, expert, block, d_out_,
                      d_weight_.data() + weight_gradients(sizes_, routing_.slots()) - routing_.slots());
      bf16* h = workspace(kLocal, block.count * tile_elements(kPanelTiles));
      const Matrix& w = experts_.weight[kDown][expert];
      const Matrix a = factor_a(lora_, kDown, sizes_, expert);
      const auto live_tiles = [&](int p) {
        return std::min(kPanelTiles, sizes_.inner_tiles - p * kPanelTiles);
      };
      const auto add_panel = [&](int p, const Chunk& chunk, float* result) {
        add_columns(kernels_, chunk, {&w, &a}, p * kStrips * kStrip, 2 * live_tiles(p), left, result);
      };
      const auto finish_panel = [&](int p, float* result) {
        const int live = live_tiles(p);
        const float* part = nullptr;
        if (drops()) part = thin_part(a, p * kStrips * kStrip, 2 * live, behind(left, sizes_.hidden_tiles));
        for (int j = 0; j < block.count; ++j)
          for (int t = 0; t < live; ++t) {
            const int at = (j * 2 * live + 2 * t) * kBlock;
            inner_tile(expert, block.begin + j, p * kPanelTiles + t, result + at,
                       part == nullptr ? nullptr : part + at, h + (j * kPanelTiles + t) * kTile);
          }
        for (int t = 0; t < live && sizes_.rank > 0; ++t) {
          const int tile = p * kPanelTiles + t;
          gradient_b(kGate, expert, block, sizes_.rank_tiles + tile, tile * kSteps);
          gradient_b(kUp, expert, block, sizes_.rank_tiles + sizes_.inner_tiles + tile, tile * kSteps);
          if (d_lora_.a[kDown] != nullptr) {
            const Strips turned = over_tokens({h, tile_elements(kPanelTiles), block.count}, t);
            add_gradient(thin, turned, block, d_lora_.a[kDown], expert, sizes_.inner, tile * kSteps, false);
          }
        }
      };
      const int factor = drops() ? 0 : sizes_.rank_tiles;
      for_panels({unit, block.count, kStrips, {sizes_.hidden_tiles, factor}, chunk_unit(w, true), kMostTiles},
                 add_panel, finish_panel);
    });
  }

  // s (dg Bg) and s (du Bu) around dg and du in the same strips, and their transposes for dA.
  void thin_hidden(int expert) {
    if (sizes_.rank == 0) return;
    const int strips = sizes_.rank_strips;
    for (Projection projection : {kGate, kUp}) {
      const Strips right = pack_factor_b(projection, sizes_.inner, expert);
      for_token_blocks(routing_, expert, [&](TokenBlock block) {
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
    const int expert = unit.expert, rank_tiles = sizes_.rank_tiles, inner_tiles = sizes_.inner_tiles;
    const Matrix a[2] = {factor_a(lora_, kGate, sizes_, expert), factor_a(lora_, kUp, sizes_, expert)};
    const Matrix &gate = experts_.weight[kGate][expert], &up = experts_.weight[kUp][expert];
    for_token_blocks(routing_, expert, [&](TokenBlock block) {
      const Strips d = d_strips(expert, block);
      Strips x[2], dy;
      KeptColumns kept[2];
      const auto strips_from = [&](int column) {
        return std::min(kStrips, 2 * tiles_of(sizes_.hidden - column));
      };
      const auto add_panel = [&](int p, const Chunk& chunk, float* result) {
        const int column = p * kStrips * kStrip;
        add_columns(kernels_, chunk, {&a[kGate], &gate, &up, &a[kUp]}, column, strips_from(column),
                    behind(d, drops() ? rank_tiles : 0), result);
      };
      const auto finish_panel = [&](int p, float* result) {
        const int column = p * kStrips * kStrip, strips = strips_from(column);
        const int turn = (p - unit.begin) % kPanelsAtOnce, panels = std::min(kPanelsAtOnce, unit.end - p);
        if (drops()) {
          for (Projection projection : {kGate, kUp}) {
            if (turn == 0) kept[projection] = kept_columns(projection, expert, block, column, panels);
            const int tiles = projection == kGate ? 0 : rank_tiles + 2 * inner_tiles;
            const float* part = thin_part(a[projection], column, strips, behind(d, tiles));
            add_kept_part(part, block.count, strips, kept[projection], turn * kPanelTiles, result);
          }
        }
        for (int j = 0; j < block.count; ++j) {
          const int strip = block.begin + j;
          for (int i = 0; i < strips; i += 2)
            kernels_.round_rows(
                result + (j * strips + i) * kBlock, live_rows(routing_, expert, strip),
                dx_.data() + first_slot(routing_, expert, strip) * dx_stride_ + column + i * kStrip,
                dx_stride_);
        }
        if (sizes_.rank == 0) return;
        if (turn == 0) {
          x[kGate] = rows_over_tokens(hidden_, kGradient, expert, block, column, panels, kept[kGate]);
          x[kUp] = drops() ? rows_over_tokens(hidden_, kDropped, expert, block, column, panels, kept[kUp])
                           : x[kGate];
          dy = rows_over_tokens(d_out_, kLocal, expert, block, column, panels, {});
        }
        const auto part = [&](Strips all) {
          return Strips{all.data + turn * kStrips * all.stride, all.stride, strips};
        };
        outer_gradients(expert, block, column, part(x[kGate]), part(x[kUp]), part(dy));
      };
      const int factors = drops() ? 0 : rank_tiles;
      for_panels({unit,
                  block.count,
                  kStrips,
                  {factors, inner_tiles, inner_tiles, factors},
                  chunk_unit(gate, true),
                  kMostTiles},
                 add_panel, finish_panel);
    });
  }

  void combine(int unit, bf16* d_hidden, float* d_weights) {
    sum_slots(kernels_, routing_, dx_.data(), dx_stride_, sizes_.hidden, d_hidden, unit);
    const int end = std::min(routing_.tokens, (unit + 1) * kTokensAtOnce) * routing_.top_k;
    for (int source = unit * kTokensAtOnce * routing_.top_k; source < end; ++source) {
      const float* part = d_weight_.data() + routing_.slot_of[source];
      float total = 0.f;
      const int parts = sizes_.inner_tiles + !experts_.bias[kDown].empty();
      for (int tile = 0; tile < parts; ++tile)
        total += part[static_cast<std::ptrdiff_t>(tile) * routing_.slots()];
      d_weights[source] = total;
    }
  }

  int inner_panels() const { return ceil_div(sizes_.inner, kStrips * kStrip); }
  int outer_panels() const { return ceil_div(sizes_.hidden, kStrips * kStrip); }

 private:
  // dg and du of one block of tokens: left strips [s dg Bg][dg][du][s du Bu].
  Strips d_strips(int expert, TokenBlock block) const {
    const std::ptrdiff_t strip = routing_.first_strip[expert] + block.begin;
    return token_strips(routing_, expert, block, d_.data() + strip * d_stride_, d_stride_);
  }

  // B as right strips: r is its width, and the reduction runs down its rows.
  Strips pack_factor_b(Projection projection, int rows, int expert) const {
    const std::ptrdiff_t stride = tile_elements(tiles_of(rows));
    const Strips right{.data = workspace(kFactor, sizes_.rank_strips * stride),
                       .stride = stride,
                       .count = sizes_.rank_strips,
                       .live = sizes_.rank_live()};
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
    const Strips turned{.data = workspace(kThin, strips * stride),
                        .stride = stride,
                        .count = strips,
                        .live = sizes_.rank_live()};
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

  bool drops() const { return saved_.seeds.any(); }

  // With dropout, left times the columns of a factor A isn't in the sums, but in blocks of its own.
  const float* thin_part(const Matrix& a, int column, int strips, Strips left) const {
    const std::ptrdiff_t stride = tile_elements(sizes_.rank_tiles);
    const Strips right{workspace(kPanel, kStrips * stride), stride, strips};
    kernels_.pack_right(a, sizes_.rank, column, right);
    float* part = result_blocks(kPart, left.count * strips);
    multiply(kernels_, {{left, right, sizes_.rank_tiles}}, part);
    return part;
  }

  // One strip of tokens, one tile of I: everything that follows from dh~, whose LoRA's `part` is null where
  // `result` has it already.
  void inner_tile(int expert, int strip, int tile, float* result, const float* part, bf16* h) {
    std::uint32_t kept[kStrip];
    if (part != nullptr) {
      const Seeds seeds = saved_.seeds.from(kDown, first_slot(routing_, expert, strip));
      kernels_.kept_bits(seeds, kStrip, tile * kSteps, 1, kept);
      kernels_.add_kept(result, part, kept, 1);
    }
    const std::ptrdiff_t row = routing_.first_strip[expert] + strip;
    const std::ptrdiff_t at = tile_elements(row * sizes_.inner_tiles + tile);
    bf16* d = d_.data() + row * d_stride_ + tile_elements(sizes_.rank_tiles + tile);
    float weight[kStrip], d_weight[kStrip];
    strip_weights(routing_, expert, strip, weight);
    kernels_.inner_gradients({result, inner_.gate.data() + at, inner_.up.data() + at, weight, d,
                              d + tile_elements(sizes_.inner_tiles), h, d_weight,
                              part == nullptr ? nullptr : kept, experts_.plain ? nullptr : &experts_.gating});
    float* d_weights = d_weight_.data() + static_cast<std::ptrdiff_t>(tile) * routing_.slots() +
                       first_slot(routing_, expert, strip);
    std::copy_n(d_weight, live_rows(routing_, expert, strip), d_weights);
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

  // `kept_bits` of one block of tokens; null where all is kept.
  struct KeptColumns {
    const std::uint32_t* bits = nullptr;
    int words = 0;  // of a token
  };

  // Of gate's or up's input, for `panels` panels from `column`.
  KeptColumns kept_columns(Projection projection, int expert, TokenBlock block, int column,
                           int panels) const {
    thread_local Buffer<std::uint32_t> buffers[2];
    const int words = std::min(panels * kPanelTiles, tiles_of(sizes_.hidden - column));
    const int rows = block.count * kStrip;
    std::uint32_t* bits = buffers[projection].reserve(static_cast<std::size_t>(rows) * words);
    const Seeds seeds = saved_.seeds.from(projection, first_slot(routing_, expert, block.begin));
    kernels_.kept_bits(seeds, rows, column, words, bits);
    return {bits, words};
  }

  // Adds to dX of a panel, whose columns begin at `word` of what is kept, where its input was kept.
  void add_kept_part(const float* part, int count, int strips, KeptColumns kept, int word,
                     float* result) const {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < strips; j += 2) {
        const std::ptrdiff_t at = (static_cast<std::ptrdiff_t>(i) * strips + j) * kBlock;
        const std::uint32_t* bits = kept.bits + i * kStrip * kept.words + word + j / 2;
        kernels_.add_kept(result + at, part + at, bits, kept.words);
      }
  }

  // x or dy of one block of tokens as right strips over tokens, for `panels` panels from `column`: a
  // token's row is read in pieces of up to 512 bytes instead of 128. What isn't `kept` is 0.
  Strips rows_over_tokens(const bf16* source, Purpose purpose, int expert, TokenBlock block, int column,
                          int panels, KeptColumns kept) const {
    const int begin = block.begin * kStrip,
              count = std::min(block.count * kStrip, routing_.rows(expert) - begin);
    const int strips = std::min(panels * kStrips, 2 * tiles_of(sizes_.hidden - column));
    const std::ptrdiff_t stride = tile_elements(ceil_div(block.count, 2));
    const Strips right{workspace(purpose, kPanelsAtOnce * kStrips * stride), stride, strips};
    const int* index = routing_.token.data() + routing_.first[expert] + begin;
    kernels_.token_pairs_to_right({source, sizes_.hidden, index, count, sizes_.hidden, kept.bits, kept.words},
                                  column, right);
    return right;
  }

  // dA of gate and up, and dB of down, for the columns of H at `column`, whose x and dy are given.
  void outer_gradients(int expert, TokenBlock block, int column, Strips x_gate, Strips x_up,
                       Strips dy) const {
    const auto add = [&](const Buffer<bf16>& thin, Projection projection, Strips right, float* tensor,
                         bool transposed) {
      if (tensor != nullptr)
        add_gradient(from(thin_strips(thin, routing_, sizes_, expert, projection), block), right, block,
                     tensor, expert, sizes_.hidden, column, transposed);
    };
    add(thin_, kGate, x_gate, d_lora_.a[kGate], false);
    add(thin_, kUp, x_up, d_lora_.a[kUp], false);
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
  Buffer<float> d_weight_;  // partial d w: [tiles of I, and down's bias; slots]
  Buffer<bf16> thin_;       // (s dg Bg)^T and (s du Bu)^T, as Saved::thin
};

}  // namespace

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
