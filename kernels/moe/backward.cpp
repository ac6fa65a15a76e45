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

class Backward : Pass {
 public:
  Backward(const Pass& pass, const Saved& saved, const Saved& inner, const bf16* d_out,
           const LoraGradients& d_lora)
      : Pass(pass),
        saved_(saved),
        inner_(inner),
        d_out_(d_out),
        d_lora_(d_lora),
        d_stride_(gradient_stride(sizes)),
        dx_stride_(slot_stride(sizes)),
        d_(routing.first_strip.back() * d_stride_),
        dx_(routing.slots() * dx_stride_),
        d_weight_(weight_gradients(sizes, routing.slots())),
        thin_(thin_elements(sizes, routing.first_double.back())) {}

  // One expert's panels of I: dh~, from it dg, du, partial d w, and the LoRA gradients of these columns.
  void inner(Unit unit) {
    const int expert = unit.expert, tiles = sizes.hidden_tiles + sizes.rank_tiles;
    const std::ptrdiff_t stride = tile_elements(tiles);
    const Strips b = pack_factor_b(kDown, sizes.hidden, expert);
    for_token_blocks(routing, expert, [&](TokenBlock block) {
      bf16* dy = workspace(kTokens, block.count * stride);
      for (int j = 0; j < block.count; ++j)
        kernels.tokens_to_left(strip_tokens(expert, block.begin + j, d_out_), dy + j * stride);
      const Strips left = token_strips(expert, block, dy, stride);
      Strips thin;
      if (sizes.rank > 0) thin = thin_inner(expert, block, left, b);

      if (unit.begin == 0) bias_products(expert, block);
      bf16* h = workspace(kLocal, block.count * tile_elements(kPanelTiles));
      const Matrix& w = experts.weight[kDown][expert];
      const Matrix a = factor_a(kDown, expert);
      const auto live_tiles = [&](int p) {
        return std::min(kPanelTiles, sizes.inner_tiles - p * kPanelTiles);
      };
      const auto add_panel = [&](int p, const Chunk& chunk, float* result) {
        add_columns(kernels, chunk, {&w, &a}, p * kStrips * kStrip, 2 * live_tiles(p), left, result);
      };
      const auto finish_panel = [&](int p, float* result) {
        const int live = live_tiles(p);
        const float* part = nullptr;
        if (drops()) part = thin_part(a, p * kStrips * kStrip, 2 * live, behind(left, sizes.hidden_tiles));
        for (int j = 0; j < block.count; ++j)
          for (int t = 0; t < live; ++t) {
            const int at = (j * 2 * live + 2 * t) * kBlock;
            inner_tile(expert, block.begin + j, p * kPanelTiles + t, result + at,
                       part == nullptr ? nullptr : part + at, h + (j * kPanelTiles + t) * kTile);
          }
        for (int t = 0; t < live && sizes.rank > 0; ++t) {
          const int tile = p * kPanelTiles + t;
          gradient_b(kGate, expert, block, sizes.rank_tiles + tile, tile * kSteps);
          gradient_b(kUp, expert, block, sizes.rank_tiles + sizes.inner_tiles + tile, tile * kSteps);
          if (d_lora_.a[kDown] != nullptr) {
            const Strips turned = over_tokens({h, tile_elements(kPanelTiles), block.count}, t);
            add_gradient(thin, turned, block, d_lora_.a[kDown], expert, sizes.inner, tile * kSteps, false);
          }
        }
      };
      const int factor = drops() ? 0 : sizes.rank_tiles;
      for_panels({unit, block.count, kStrips, {sizes.hidden_tiles, factor}, chunk_unit(w, true), kMostTiles},
                 add_panel, finish_panel);
    });
  }

  // s (dg Bg) and s (du Bu) around dg and du in the same strips, and their transposes for dA.
  void thin_hidden(int expert) {
    if (sizes.rank == 0) return;
    const int strips = sizes.rank_strips;
    for (Projection projection : {kGate, kUp}) {
      const Strips right = pack_factor_b(projection, sizes.inner, expert);
      for_token_blocks(routing, expert, [&](TokenBlock block) {
        Strips d = d_strips(expert, block);
        const bf16* row = d.data;
        d.data += tile_elements(sizes.rank_tiles + (projection == kUp ? sizes.inner_tiles : 0));
        float* t = result_blocks(kSmall, block.count * strips);
        multiply(kernels, {{d, right, sizes.inner_tiles}}, t);
        const std::ptrdiff_t behind = tile_elements(sizes.rank_tiles + 2 * sizes.inner_tiles);
        kernels.blocks_to_left(t, block.count, strips, lora.scale, nullptr,
                               const_cast<bf16*>(projection == kGate ? row : row + behind), d_stride_);
        transpose_to(t, block, nullptr, from(thin_strips(thin_, projection, expert), block));
      });
    }
  }

  // One expert's panels of H: dX by slots, and the LoRA gradients of these columns.
  void outer(Unit unit) {
    const int expert = unit.expert, rank_tiles = sizes.rank_tiles, inner_tiles = sizes.inner_tiles;
    const Matrix a[2] = {factor_a(kGate, expert), factor_a(kUp, expert)};
    const Matrix &gate = experts.weight[kGate][expert], &up = experts.weight[kUp][expert];
    for_token_blocks(routing, expert, [&](TokenBlock block) {
      const Strips d = d_strips(expert, block);
      Strips x[2], dy;
      KeptColumns kept[2];
      const auto strips_from = [&](int column) {
        return std::min(kStrips, 2 * tiles_of(sizes.hidden - column));
      };
      const auto add_panel = [&](int p, const Chunk& chunk, float* result) {
        const int column = p * kStrips * kStrip;
        add_columns(kernels, chunk, {&a[kGate], &gate, &up, &a[kUp]}, column, strips_from(column),
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
            kernels.round_rows(result + (j * strips + i) * kBlock, live_rows(expert, strip),
                               dx_.data() + first_slot(expert, strip) * dx_stride_ + column + i * kStrip,
                               dx_stride_);
        }
        if (sizes.rank == 0) return;
        if (turn == 0) {
          x[kGate] = rows_over_tokens(hidden, kGradient, expert, block, column, panels, kept[kGate]);
          x[kUp] = drops() ? rows_over_tokens(hidden, kDropped, expert, block, column, panels, kept[kUp])
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
    sum_slots(dx_.data(), d_hidden, unit);
    const int end = std::min(routing.tokens, (unit + 1) * kTokensAtOnce) * routing.top_k;
    for (int source = unit * kTokensAtOnce * routing.top_k; source < end; ++source) {
      const float* part = d_weight_.data() + routing.slot_of[source];
      float total = 0.f;
      const int parts = sizes.inner_tiles + !experts.bias[kDown].empty();
      for (int tile = 0; tile < parts; ++tile)
        total += part[static_cast<std::ptrdiff_t>(tile) * routing.slots()];
      d_weights[source] = total;
    }
  }

 private:
  // dg and du of one block of tokens: left strips [s dg Bg][dg][du][s du Bu].
  Strips d_strips(int expert, TokenBlock block) const {
    const std::ptrdiff_t strip = routing.first_strip[expert] + block.begin;
    return token_strips(expert, block, d_.data() + strip * d_stride_, d_stride_);
  }

  // B as right strips: r is its width, and the reduction runs down its rows.
  Strips pack_factor_b(Projection projection, int rows, int expert) const {
    const std::ptrdiff_t stride = tile_elements(tiles_of(rows));
    const Strips right{.data = workspace(kFactor, sizes.rank_strips * stride),
                       .stride = stride,
                       .count = sizes.rank_strips,
                       .live = sizes.rank_live()};
    if (sizes.rank > 0) kernels.pack_right(factor_b(projection, expert), rows, 0, right);
    return right;
  }

  // s (dy Bd) behind dy in the same strips; returns w s (dy Bd) transposed.
  Strips thin_inner(int expert, TokenBlock block, Strips dy, Strips b) const {
    const int strips = sizes.rank_strips;
    float* t = result_blocks(kSmall, block.count * strips);
    multiply(kernels, {{dy, b, sizes.hidden_tiles}}, t);
    kernels.blocks_to_left(t, block.count, strips, lora.scale, nullptr,
                           writable(dy) + tile_elements(sizes.hidden_tiles), dy.stride);
    const std::ptrdiff_t stride = tile_elements(ceil_div(block.count, 2));
    const Strips turned{.data = workspace(kThin, strips * stride),
                        .stride = stride,
                        .count = strips,
                        .live = sizes.rank_live()};
    float* weights = result_blocks(kWeights, block.count);
    for (int i = 0; i < block.count; ++i) strip_weights(expert, block.begin + i, weights + i * kStrip);
    transpose_to(t, block, weights, turned);
    return turned;
  }

  // t [token strips][strips of r] -> left strips over tokens, times s and the tokens' weights (or null).
  void transpose_to(const float* t, TokenBlock block, const float* weights, Strips target) const {
    float* turned = result_blocks(kTurned, block.count * sizes.rank_strips);
    kernels.transpose_blocks(t, block.count, sizes.rank_strips, turned);
    kernels.blocks_to_left(turned, sizes.rank_strips, block.count, lora.scale, weights, writable(target),
                           target.stride);
  }

  bool drops() const { return seeds.any(); }

  // The last part of d w, <dy, down's bias>, where there is one, for a block of an expert's tokens.
  void bias_products(int expert, TokenBlock block) {
    const float* bias = experts.bias_at(kDown, expert, 0);
    float* parts = d_weight_.data() + static_cast<std::ptrdiff_t>(sizes.inner_tiles) * routing.slots();
    for (int j = block.begin; bias != nullptr && j < block.begin + block.count; ++j)
      kernels.row_products(strip_tokens(expert, j, d_out_), bias, parts + first_slot(expert, j));
  }

  // With dropout, left times the columns of a factor A isn't in the sums, but in blocks of its own.
  const float* thin_part(const Matrix& a, int column, int strips, Strips left) const {
    const std::ptrdiff_t stride = tile_elements(sizes.rank_tiles);
    const Strips right{workspace(kPanel, kStrips * stride), stride, strips};
    kernels.pack_right(a, sizes.rank, column, right);
    float* part = result_blocks(kPart, left.count * strips);
    multiply(kernels, {{left, right, sizes.rank_tiles}}, part);
    return part;
  }

  // One strip of tokens, one tile of I: everything that follows from dh~, whose LoRA's `part` is null where
  // `result` has it already.
  void inner_tile(int expert, int strip, int tile, float* result, const float* part, bf16* h) {
    std::uint32_t kept[kStrip];
    if (part != nullptr) {
      kernels.kept_bits(seeds.from(kDown, first_slot(expert, strip)), kStrip, tile * kSteps, 1, kept);
      kernels.add_kept(result, part, kept, 1);
    }
    const std::ptrdiff_t row = routing.first_strip[expert] + strip;
    const std::ptrdiff_t at = tile_elements(row * sizes.inner_tiles + tile);
    bf16* d = d_.data() + row * d_stride_ + tile_elements(sizes.rank_tiles + tile);
    float weight[kStrip], d_weight[kStrip];
    strip_weights(expert, strip, weight);
    kernels.inner_gradients({result, inner_.gate.data() + at, inner_.up.data() + at, weight, d,
                             d + tile_elements(sizes.inner_tiles), h, d_weight,
                             part == nullptr ? nullptr : kept, experts.plain ? nullptr : &experts.gating});
    float* d_weights =
        d_weight_.data() + static_cast<std::ptrdiff_t>(tile) * routing.slots() + first_slot(expert, strip);
    std::copy_n(d_weight, live_rows(expert, strip), d_weights);
  }

  // target += thin^T right for one block of tokens; target is [r, columns], or its transpose.
  void add_gradient(Strips thin, Strips right, TokenBlock block, float* tensor, int expert, int columns,
                    int column, bool transposed) const {
    float* sums = result_blocks(kSmall, thin.count * right.count);
    multiply(kernels, {{thin, right, ceil_div(block.count, 2)}}, sums);
    kernels.add_blocks(sums, thin.count, right.count,
                       tensor + static_cast<std::ptrdiff_t>(expert) * sizes.rank * columns, sizes.rank,
                       columns, column, transposed);
  }

  // dB of gate or up for one tile of I, from tile `tile` of the d strips.
  void gradient_b(Projection projection, int expert, TokenBlock block, int tile, int column) const {
    if (d_lora_.b[projection] == nullptr) return;
    const Strips turned = over_tokens(d_strips(expert, block), tile);
    add_gradient(from(thin_strips(saved_.thin, projection, expert), block), turned, block,
                 d_lora_.b[projection], expert, sizes.inner, column, true);
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
    const int words = std::min(panels * kPanelTiles, tiles_of(sizes.hidden - column));
    const int rows = block.count * kStrip;
    std::uint32_t* bits = buffers[projection].reserve(static_cast<std::size_t>(rows) * words);
    kernels.kept_bits(seeds.from(projection, first_slot(expert, block.begin)), rows, column, words, bits);
    return {bits, words};
  }

  // Adds to dX of a panel, whose columns begin at `word` of what is kept, where its input was kept.
  void add_kept_part(const float* part, int count, int strips, KeptColumns kept, int word,
                     float* result) const {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < strips; j += 2) {
        const std::ptrdiff_t at = (static_cast<std::ptrdiff_t>(i) * strips + j) * kBlock;
        const std::uint32_t* bits = kept.bits + i * kStrip * kept.words + word + j / 2;
        kernels.add_kept(result + at, part + at, bits, kept.words);
      }
  }

  // x or dy of one block of tokens as right strips over tokens, for `panels` panels from `column`: a
  // token's row is read in pieces of up to 512 bytes instead of 128. What isn't `kept` is 0.
  Strips rows_over_tokens(const bf16* source, Purpose purpose, int expert, TokenBlock block, int column,
                          int panels, KeptColumns kept) const {
    const int begin = block.begin * kStrip,
              count = std::min(block.count * kStrip, routing.rows(expert) - begin);
    const int strips = std::min(panels * kStrips, 2 * tiles_of(sizes.hidden - column));
    const std::ptrdiff_t stride = tile_elements(ceil_div(block.count, 2));
    const Strips right{workspace(purpose, kPanelsAtOnce * kStrips * stride), stride, strips};
    const int* index = routing.token.data() + routing.first[expert] + begin;
    kernels.token_pairs_to_right({source, sizes.hidden, index, count, sizes.hidden, kept.bits, kept.words},
                                 column, right);
    return right;
  }

  // dA of gate and up, and dB of down, for the columns of H at `column`, whose x and dy are given.
  void outer_gradients(int expert, TokenBlock block, int column, Strips x_gate, Strips x_up,
                       Strips dy) const {
    const auto add = [&](const Buffer<bf16>& thin, Projection projection, Strips right, float* tensor,
                         bool transposed) {
      if (tensor != nullptr)
        add_gradient(from(thin_strips(thin, projection, expert), block), right, block, tensor, expert,
                     sizes.hidden, column, transposed);
    };
    add(thin_, kGate, x_gate, d_lora_.a[kGate], false);
    add(thin_, kUp, x_up, d_lora_.a[kUp], false);
    add(saved_.thin, kDown, dy, d_lora_.b[kDown], true);
  }

  Strips over_tokens(Strips left, int tile) const {
    const std::ptrdiff_t stride = tile_elements(ceil_div(left.count, 2));
    const Strips right{workspace(kGradient, 2 * stride), stride, 2};
    kernels.tiles_to_right(left, tile, right);
    return right;
  }

  static Strips from(Strips thin, TokenBlock block) {
    thin.data += tile_elements(block.begin / 2);
    return thin;
  }

  const Saved& saved_;  // thin products
  const Saved& inner_;  // g and u
  const bf16* d_out_;
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
  const Pass pass{*machine.kernels, experts,     lora,  Sizes(experts, lora.rank),
                  saved.routing,    saved.seeds, hidden};
  const std::unique_ptr<Saved> again = recomputed(machine, pass, saved.keep);
  Backward backward(pass, saved, again ? *again : saved, d_out, d_lora);
  Work work;
  work.first_panels = ceil_div(experts.intermediate, kStrips * kStrip);
  work.second_panels = ceil_div(experts.hidden, kStrips * kStrip);
  work.last_units = ceil_div(saved.routing.tokens, Pass::kTokensAtOnce);
  work.first = [&](Unit unit) { backward.inner(unit); };
  work.between = [&](int expert) { backward.thin_hidden(expert); };
  work.second = [&](Unit unit) { backward.outer(unit); };
  work.last = [&](int unit) { backward.combine(unit, d_hidden, d_weights); };
  run_work(machine, experts, saved.routing, work);
}

}  // namespace ktbridge
