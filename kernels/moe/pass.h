// What forward and backward share: sizes in tiles, per-thread workspaces, blocks of tokens, LoRA factors.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "common/buffer.h"
#include "moe/layer.h"
#include "moe/schedule.h"

namespace ktbridge {

inline std::ptrdiff_t tile_elements(std::ptrdiff_t tiles) { return tiles * kTile; }

struct Sizes {
  int hidden, inner, rank;
  int hidden_tiles, inner_tiles;
  int rank_tiles, rank_strips;  // LoRA's r as a reduction, and as rows
  Sizes(const Experts& experts, int lora_rank) : Sizes(experts.hidden, experts.intermediate, lora_rank) {}
  Sizes(int hidden_size, int inner_size, int lora_rank)
      : hidden(hidden_size),
        inner(inner_size),
        rank(lora_rank),
        hidden_tiles(tiles_of(hidden)),
        inner_tiles(tiles_of(inner)),
        rank_tiles(tiles_of(rank)),
        rank_strips(strips_of(rank)) {}
  // Of the last of r's strips.
  int rank_live() const { return rank - (rank_strips - 1) * kStrip; }
};

// One thread's memory, by purpose; kept from unit to unit and from pass to pass.
enum Purpose { kTokens, kPanel, kFactor, kThin, kGradient, kLocal, kDropped, kPurposes };

inline bf16* workspace(Purpose purpose, std::ptrdiff_t elements) {
  thread_local Buffer<bf16> buffers[kPurposes];
  return buffers[purpose].reserve(elements);
}
enum ResultPurpose { kMain, kSmall, kTurned, kWeights, kPart, kResultPurposes };
inline float* result_blocks(ResultPurpose purpose, std::ptrdiff_t blocks) {
  thread_local Buffer<float> buffers[kResultPurposes];
  return buffers[purpose].reserve(blocks * kBlock);
}

// Row stride of results by slot. The extra tile keeps rows of a power of two apart from sharing the same
// few sets of the caches.
inline std::ptrdiff_t slot_stride(const Sizes& sizes) { return (sizes.hidden_tiles + 1) * kSteps; }

// Elements of a pass's buffers, for all strips, doubles or slots of its tokens. Training's plan asks, too.
inline std::ptrdiff_t inner_elements(const Sizes& sizes, std::ptrdiff_t strips) {  // g, or u
  return tile_elements(strips * sizes.inner_tiles);
}
inline std::ptrdiff_t thin_elements(const Sizes& sizes, std::ptrdiff_t doubles) {
  return tile_elements(kProjections * doubles * sizes.rank_strips);
}
// dg and du with their thin products: left strips.
inline std::ptrdiff_t gradient_stride(const Sizes& sizes) {
  return tile_elements(2 * sizes.inner_tiles + 2 * sizes.rank_tiles);
}
// Partial gradients of the routing weights: [tiles of I, and down's bias; slots] float32.
inline std::ptrdiff_t weight_gradients(const Sizes& sizes, std::ptrdiff_t slots) {
  return (sizes.inner_tiles + 1) * slots;
}

inline void multiply(const Kernels& kernels, std::initializer_list<Product> products, float* result) {
  kernels.gemm(products.begin(), static_cast<int>(products.size()), result, false);
}

// Strips of an expert's tokens that are worked on together. Even, so that two strips make one tile over
// tokens.
struct TokenBlock {
  int begin, count;  // strips, counted from the expert's first
};

// An expert's weights pass once for each block, so blocks are large. They don't depend on the machine, for
// LoRA's gradients are summed block by block.
constexpr int kMostStrips = 48;
template <class Body>
void for_token_blocks(const Routing& routing, int expert, Body body) {
  const int strips = routing.strips(expert), blocks = ceil_div(strips, kMostStrips);
  const int each = blocks == 0 ? 1 : 2 * ceil_div(ceil_div(strips, blocks), 2);
  for (int begin = 0; begin < strips; begin += each) body(TokenBlock{begin, std::min(each, strips - begin)});
}

constexpr int kLeastChunk = 8;  // tiles: fewer, and sums are loaded and stored too often

// How a block's products with an expert's panels are cut so that they stay in L2: the reduction into chunks
// of at most `chunk` tiles, and so many panels in a `group`, whose sums wait there from chunk to chunk.
// Bits don't depend on it. Where all of the block's strips fit, each panel is one chunk. Else a group's
// tokens come from memory chunk by chunk and serve all of its panels.
struct Cut {
  int chunk, group;
};
inline Cut cut_for_cache(int strips, int panel_strips, int tiles, int most, int panels) {
  static const int l2_tiles = static_cast<int>(std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 256L << 10) /
                                               static_cast<long>(kTile * sizeof(bf16)));
  const int room = l2_tiles * 3 / 4, sums = strips * panel_strips, together = strips + panel_strips;
  if (tiles <= most && together * tiles + sums <= room) return {tiles, 1};
  const int group = std::clamp(room / 2 / sums, 1, panels);
  return {std::clamp((room - group * sums) / together, kLeastChunk, most), group};
}

// Tiles [begin, begin + tiles) of the part of a reduction that one matrix has.
struct Stretch {
  int part, begin, tiles;
};
struct Chunk {
  std::initializer_list<int> parts;  // all of the reduction
  bool first = true, last = false;
  int tiles = 0, count = 0;
  Stretch stretches[4] = {};
};

// A reduction over matrices of `parts` tiles, one behind the other, in even chunks of at most `most` tiles
// (or a `unit` more) that begin at multiples of `unit` tiles of their matrix.
template <class Body>
void for_chunks(std::initializer_list<int> parts, int most, int unit, Body body) {
  const int total = std::accumulate(parts.begin(), parts.end(), 0);
  const int even = ceil_div(total, std::max(ceil_div(total, most), 1)), each = ceil_div(even, unit) * unit;
  Chunk chunk{parts};
  const auto end = [&](bool last) {
    chunk.last = last;
    body(static_cast<const Chunk&>(chunk));
    chunk.first = false;
    chunk.tiles = chunk.count = 0;
  };
  int part = 0;
  for (int tiles : parts) {
    for (int begin = 0; begin < tiles;) {
      int take = std::min(each - chunk.tiles, tiles - begin);
      if (begin + take < tiles) take -= take % unit;
      if (take == 0) {
        end(false);
        continue;
      }
      chunk.stretches[chunk.count++] = {part, begin, take};
      chunk.tiles += take;
      begin += take;
    }
    ++part;
  }
  end(true);
}

// The sums that a unit's panels have for one block of tokens.
struct Panels {
  Unit unit;
  int strips, panel_strips;              // of the block, of a panel
  std::initializer_list<int> parts;      // tiles of the reduction's matrices
  int chunk_unit, most_tiles = 1 << 20;  // chunks begin at multiples of the one and end before the other
};

// add(panel, chunk, result) for all of a reduction's chunks, then finish(panel, result), panels rising.
template <class Add, class Finish>
void for_panels(const Panels& all, Add add, Finish finish) {
  const int tiles = std::accumulate(all.parts.begin(), all.parts.end(), 0),
            blocks = all.strips * all.panel_strips;
  const int end = all.unit.end, panels = end - all.unit.begin;
  const Cut cut = cut_for_cache(all.strips, all.panel_strips, tiles, all.most_tiles, panels);
  float* results = result_blocks(kMain, static_cast<std::ptrdiff_t>(cut.group) * blocks);
  for (int begin = all.unit.begin; begin < end; begin += cut.group)
    for_chunks(all.parts, cut.chunk, all.chunk_unit, [&](const Chunk& chunk) {
      for (int p = begin; p < std::min(end, begin + cut.group); ++p) {
        float* result = results + static_cast<std::ptrdiff_t>(p - begin) * blocks * kBlock;
        add(p, chunk, result);
        if (chunk.last) finish(p, result);
      }
    });
}

// Chunks of W's reduction begin where its scales do.
inline int chunk_unit(const Matrix& w, bool down_rows) {
  if (w.scale == nullptr) return 1;
  const int shift = down_rows ? w.row_shift : w.column_shift, size = down_rows ? w.rows : w.columns;
  return shift < 31 && (1 << shift) < size ? std::max(1, (1 << shift) / kSteps) : tiles_of(size);
}
inline Matrix columns_of(const Matrix& w, Stretch stretch) {
  return part_of(w, 0, w.rows, stretch.begin * kSteps, stretch.tiles * kSteps);
}
inline Matrix rows_of(const Matrix& w, Stretch stretch) {
  return part_of(w, stretch.begin * kSteps, stretch.tiles * kSteps, 0, w.columns);
}
inline Strips behind(Strips strips, int tiles) {
  strips.data += tile_elements(tiles);
  return strips;
}

// Sixteen rows from `row` as they lie, if they can be multiplied like that.
inline bool lies_ready(const Matrix& w, int row, int count) {
  return w.storage == Storage::bf16 && w.columns % kSteps == 0 && row + count * kStrip <= w.rows;
}

// `count` strips of W's rows from `row`: where they lie, or packed into `room` (count strips of W's
// columns).
inline Strips left_rows(const Kernels& kernels, const Matrix& w, int row, int count, bf16* room) {
  if (lies_ready(w, row, count)) {
    const std::ptrdiff_t stride = w.stride / static_cast<std::ptrdiff_t>(sizeof(bf16));
    const bf16* data = static_cast<const bf16*>(w.data) + row * stride;
    return {data, kStrip * stride, count, stride, kSteps, true};
  }
  const std::ptrdiff_t stride = tile_elements(tiles_of(w.columns));
  for (int i = 0; i < count; ++i) kernels.pack_left(w, row + i * kStrip, room + i * stride);
  const int live = std::clamp(w.rows - row - (count - 1) * kStrip, 0, kStrip);
  return {.data = room, .stride = stride, .count = count, .live = live};
}

// Right strips that follow rows of weights have a tile of zeros on either side. So rows that begin between
// two lines may be multiplied from the line's beginning on: what lies there before and behind them meets
// zeros. The same terms are added in the same order.
constexpr int kMargin = 1;

// `count` strips of W's rows from `row`, one stretch of their columns, times the strips of all columns.
inline Product rows_product(const Kernels& kernels, const Matrix& w, Stretch at, int row, int count,
                            Strips right, bf16* room) {
  Product product{left_rows(kernels, columns_of(w, at), row, count, room), behind(right, at.begin), at.tiles};
  const int before =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(product.left.data) % 64 / sizeof(bf16));
  // The first and the last row have neighbours of which nothing is known; not even that they are finite.
  if (!kernels.wants_aligned_rows || !product.left.cold || before % 2 != 0 || before == 0 ||
      w.columns % kSteps != 0 || w.stride % 64 != 0 || row == 0 || row + count * kStrip >= w.rows)
    return product;
  product.left.data -= before;
  product.right.data -= before * kStrip;
  if (at.begin + at.tiles == tiles_of(w.columns)) ++product.tiles;
  return product;
}
// Adds a chunk of `count` strips of W's and B's rows from `row` times x's and t's strips. `room` is for
// strips of both.
inline void add_rows(const Kernels& kernels, const Chunk& chunk, const Matrix& w, const Matrix& b, int row,
                     int count, Strips x, Strips t, bf16* room, float* result) {
  Product products[2];
  for (int i = 0; i < chunk.count; ++i) {
    const Stretch at = chunk.stretches[i];
    products[i] = at.part == 0 ? rows_product(kernels, w, at, row, count, x, room)
                               : rows_product(kernels, b, at, row, count, t,
                                              room + count * tile_elements(tiles_of(w.columns)));
  }
  kernels.gemm(products, chunk.count, result, !chunk.first);
}
inline void zero_margins(bf16* strip, int tiles) {
  std::fill_n(strip - tile_elements(kMargin), tile_elements(kMargin), bf16{0});
  std::fill_n(strip + tile_elements(tiles), tile_elements(kMargin), bf16{0});
}

// Adds a chunk of left times `strips` strips of the matrices' columns, whose rows are the reduction, one
// matrix behind the other.
inline void add_columns(const Kernels& kernels, const Chunk& chunk,
                        std::initializer_list<const Matrix*> matrices, int column, int strips, Strips left,
                        float* result) {
  const std::ptrdiff_t stride = tile_elements(chunk.tiles);
  const Strips panel{workspace(kPanel, strips * stride), stride, strips};
  Product products[4];
  int tiles = 0;
  for (int i = 0; i < chunk.count; ++i) {
    const Stretch at = chunk.stretches[i];
    const Strips right = behind(panel, tiles);
    kernels.pack_right(rows_of(*matrices.begin()[at.part], at), at.tiles * kSteps, column, right);
    int before = at.begin;
    for (int part = 0; part < at.part; ++part) before += chunk.parts.begin()[part];
    products[i] = {behind(left, before), right, at.tiles};
    tiles += at.tiles;
  }
  kernels.gemm(products, chunk.count, result, !chunk.first);
}

// One expert's factor out of a contiguous [E, rows, columns] tensor; no rows if there is no tensor.
inline Matrix factor(const float* tensor, int expert, int rows, int columns) {
  if (tensor == nullptr) return {nullptr, 0, 0, columns, Storage::fp32};
  return {tensor + static_cast<std::ptrdiff_t>(expert) * rows * columns,
          columns * static_cast<std::ptrdiff_t>(sizeof(float)), rows, columns, Storage::fp32};
}
inline bf16* writable(Strips strips) { return const_cast<bf16*>(strips.data); }

// What a pass works on, and its parts for one expert and its strips of tokens.
struct Pass {
  const Kernels& kernels;
  const Experts& experts;
  const LoraWeights& lora;
  const Sizes sizes;
  const Routing& routing;
  const DropSeeds& seeds;
  const bf16* hidden;

  int first_slot(int expert, int strip) const { return routing.first[expert] + strip * kStrip; }
  int live_rows(int expert, int strip) const {
    return std::min(kStrip, routing.rows(expert) - strip * kStrip);
  }

  // A block's tokens as strips.
  Strips token_strips(int expert, TokenBlock block, const bf16* data, std::ptrdiff_t stride) const {
    Strips strips{data, stride, block.count};
    strips.live = live_rows(expert, block.begin + block.count - 1);
    return strips;
  }

  // x or h of one block of tokens, right strips of `tiles` tiles, as A of a projection sees it: body(first,
  // strips), where `first` counts from the block's. With dropout that are copies of a few strips at a time,
  // an even number; enough for the products' blocks, and few beside x in L2.
  template <class Body>
  void for_lora_input(Projection projection, int expert, TokenBlock block, Strips x, int tiles,
                      Body body) const {
    if (!seeds.any()) return body(0, x);
    constexpr int kAtOnce = 6;
    const std::ptrdiff_t stride = tile_elements(tiles);
    bf16* room = workspace(kDropped, kAtOnce * stride);
    for (int first = 0; first < block.count; first += kAtOnce) {
      Strips some{room, stride, std::min(kAtOnce, block.count - first)};
      for (int i = 0; i < some.count; ++i)
        kernels.drop_right(x.data + (first + i) * x.stride, tiles,
                           seeds.from(projection, first_slot(expert, block.begin + first + i)),
                           room + i * stride);
      if (first + some.count == block.count) some.live = x.live;
      body(first, some);
    }
  }

  // The routing weights of one strip's tokens; 0 where there is no token.
  void strip_weights(int expert, int strip, float* weight) const {
    const int live = live_rows(expert, strip);
    for (int i = 0; i < kStrip; ++i)
      weight[i] = i < live ? routing.weight[first_slot(expert, strip) + i] : 0.f;
  }

  Tokens strip_tokens(int expert, int strip, const bf16* source) const {
    return {source, sizes.hidden, routing.token.data() + first_slot(expert, strip), live_rows(expert, strip),
            sizes.hidden};
  }

  Matrix factor_a(Projection projection, int expert) const {
    return factor(lora.a[projection], expert, sizes.rank, projection == kDown ? sizes.inner : sizes.hidden);
  }
  Matrix factor_b(Projection projection, int expert) const {
    return factor(lora.b[projection], expert, projection == kDown ? sizes.hidden : sizes.inner, sizes.rank);
  }

  // Where Saved::thin holds one projection of one expert: rank_strips left strips over the expert's tokens.
  Strips thin_strips(const Buffer<bf16>& thin, Projection projection, int expert) const {
    const std::ptrdiff_t doubles = routing.doubles(expert);
    const std::ptrdiff_t before = kProjections * static_cast<std::ptrdiff_t>(routing.first_double[expert]);
    return {.data = thin.data() + tile_elements((before + projection * doubles) * sizes.rank_strips),
            .stride = tile_elements(doubles),
            .count = sizes.rank_strips,
            .live = sizes.rank_live()};
  }

  // out[t] = the sum of its slots' rows, which are slot_stride apart, for one unit of kTokensAtOnce tokens.
  static constexpr int kTokensAtOnce = 16;
  void sum_slots(const bf16* rows, bf16* out, int unit) const {
    const int end = std::min(routing.tokens, (unit + 1) * kTokensAtOnce);
    for (std::ptrdiff_t t = unit * kTokensAtOnce; t < end; ++t)
      kernels.sum_rows(rows, slot_stride(sizes), routing.slot_of.data() + t * routing.top_k, routing.top_k,
                       sizes.hidden, out + t * sizes.hidden);
  }
};

}  // namespace ktbridge
