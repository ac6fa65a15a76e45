// Everything that is compiled once per ISA, as one table of functions. moe/ calls these and contains no
// arithmetic on large data itself.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "gemm/strip.h"
#include "weights/matrix.h"

namespace ktbridge {

// Up to `count` rows of bf16 picked out of a matrix: row i is source[index[i]].
struct Tokens {
  const bf16* source = nullptr;
  std::ptrdiff_t stride = 0;  // elements from row to row of the source
  const int* index = nullptr;
  int count = 0, columns = 0;
  const bf16* row(int i) const { return source + index[i] * stride; }
  // token_pairs_to_right only, null for all: `kept_bits` of these rows from its column on, so many words
  // each.
  const std::uint32_t* kept = nullptr;
  int kept_words = 0;
};

// What LoRA's dropout is made from for some rows: two seeds a row, and the bound below which 16 bits drop
// an element (moe/dropout.h).
struct Seeds {
  const std::uint32_t *first, *second;
  std::uint16_t threshold;
};

// How h is made where it isn't silu(g) u: h = g' sigmoid(alpha g') (u' + offset), of g' = min(g, limit) and
// u' = u within [-limit, limit]; no gradient passes a limit. gpt-oss has alpha 1.702 and offset 1.
struct Gating {
  float limit = std::numeric_limits<float>::infinity();
  float alpha = 1.f, offset = 0.f;
  const float *gate_bias = nullptr, *up_bias = nullptr;  // 32 of each, for what is at hand; or null
};

// One strip of tokens and one tile's worth (32) of the intermediate size, in backward.
struct InnerTile {
  const float* result;    // 2 blocks of dh~ [16 tokens][16]
  const bf16 *gate, *up;  // pre-activations, left tiles [16 tokens][32]
  const float* weight;    // [16] routing weights, 0 where there is no token
  bf16 *d_gate, *d_up, *h;
  float* d_weight;                      // [16] out: <dh~, h> over these 32
  const std::uint32_t* kept = nullptr;  // [16] the bits of h that are written, all of it where null
  const Gating* gating = nullptr;       // null: silu(g) u; g and u have their biases already
};

// left [rows][rank] times right, of whose columns 32 lie together: [columns / 32][rank][32], zeros behind the
// last one: what is added to `rows` rows that are `stride` values apart.
struct Delta {
  const float *left, *right;
  int rank, rows, columns;
  std::ptrdiff_t stride;
};

// rows [rows][columns] of bf16 if `halves`, else of float32.
struct Unquantized {
  const void* values;
  bool halves;
  int rows, columns;
};

struct Kernels {
  // Around each thread's share of a pass (AMX needs its tiles configured).
  void (*begin)();
  void (*end)();

  Gemm gemm;
  // Whether left rows that begin between two lines of the cache cost more than a tile of zeros.
  bool wants_aligned_rows;

  // W's rows [row, row + 16) as a left strip; rows past the end become zeros.
  void (*pack_left)(const Matrix& w, int row, bf16* strip);
  // W's columns from `column` (a multiple of 32) as 1 to 8 right strips; the reduction runs down W's rows
  // and is padded with zeros to whole tiles of `reduction`, which is W's rows or, where W has none, any.
  void (*pack_right)(const Matrix& w, int reduction, int column, Strips target);
  // At most 16 rows as one strip, the reduction running along them.
  void (*tokens_to_left)(const Tokens& tokens, bf16* strip);
  void (*tokens_to_right)(const Tokens& tokens, bf16* strip);
  // Any number of rows as right strips of their columns from `column`, the reduction running over tokens.
  void (*token_pairs_to_right)(const Tokens& tokens, int column, Strips target);
  // Tile `tile` of token strips (left), as two right strips, the reduction running over tokens.
  void (*tiles_to_right)(Strips left, int tile, Strips target);

  // [m][n] blocks -> left tiles: row i of block row m, times scale and column_scale (or null), rounded.
  void (*blocks_to_left)(const float* blocks, int m, int n, float scale, const float* column_scale,
                         bf16* left, std::ptrdiff_t stride);
  // [m][n] blocks -> right tiles of n strips: rows become the reduction.
  void (*blocks_to_right)(const float* blocks, int m, int n, float scale, bf16* right, std::ptrdiff_t stride);
  // [m][n] blocks -> [n][m] blocks, each transposed.
  void (*transpose_blocks)(const float* blocks, int m, int n, float* target);

  // g0 g1 u0 u1 of one token strip (blocks [16 of I][16 tokens]; `apart` floats from one to the next) ->
  // h as a right tile (or null), and g, u as left tiles (or null), 64-byte aligned. `gating` null: h is
  // silu(g) u, and there are no biases; else they are added to g and u first.
  void (*activate)(const float* blocks, std::ptrdiff_t apart, bf16* h, bf16* gate, bf16* up,
                   const Gating* gating);
  void (*inner_gradients)(const InnerTile& tile);
  // Two blocks [16 of H][16 tokens], `apart` floats apart, plus `bias` [32] (or null), times the tokens'
  // weights, as rows [live][32].
  void (*weigh_rows)(const float* blocks, std::ptrdiff_t apart, const float* bias, const float* weight,
                     int live, bf16* target, std::ptrdiff_t stride);
  // products[i] = <row i, vector>, whose padding to whole tiles is there.
  void (*row_products)(const Tokens& tokens, const float* vector, float* products);
  // Two neighbouring blocks [16 tokens][16 of H] as rows [live][32].
  void (*round_rows)(const float* blocks, int live, bf16* target, std::ptrdiff_t stride);
  // target[columns] = the sum of `count` rows; reads up to whole tiles of each, writes `columns`.
  void (*sum_rows)(const bf16* rows, std::ptrdiff_t stride, const int* index, int count, int columns,
                   bf16* target);
  // target[row0 + i][column0 + j] += blocks, within [rows, columns]; `transposed` swaps i and j.
  void (*add_blocks)(const float* blocks, int m, int n, float* target, int rows, int columns, int column0,
                     bool transposed);

  // A right strip of 16 rows of `seeds` with `tiles` tiles, from column 0 on, without what is dropped.
  void (*drop_right)(const bf16* strip, int tiles, const Seeds& seeds, bf16* target);
  // Bit c of bits[row * words + w]: whether column + 32 w + c of a row is kept; `column` is even.
  void (*kept_bits)(const Seeds& seeds, int rows, int column, int words, std::uint32_t* bits);
  // Two neighbouring blocks [16][16] += those of `part` where the bits of rows, `words` apart, are set.
  void (*add_kept)(float* blocks, const float* part, const std::uint32_t* bits, int words);

  // values (bf16 if `halves`, else float32) += delta: summed in float32, in order, and rounded once to
  // nearest even. How many are others than before, or -1 if one isn't finite now.
  std::int64_t (*add_delta)(const Delta& delta, void* values, bool halves);

  // Rows as INT8 with a float32 scale each, or INT4 with a bf16 scale for 32 columns: codes and scales as
  // ktbridge/adapter/quantize.py stores them. False where a value isn't finite; what is written is void then.
  bool (*quantize)(const Unquantized& from, Storage storage, void* codes, void* scales);

  // FLOPs of `rounds` of independent products out of registers: the ceiling of docs/kernels.md.
  double (*peak)(long rounds);
};

const Kernels& kernels_scalar();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512_bf16();
const Kernels& kernels_amx_bf16();

// Names of those that this CPU can run, in rising order of preference.
std::vector<std::string> available_isas();

// Throws std::invalid_argument for a name that isn't available.
const Kernels& kernels_for(const std::string& isa);

}  // namespace ktbridge
