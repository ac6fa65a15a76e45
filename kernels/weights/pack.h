// Matrices and token rows -> strips in cache (gemm/strip.h says what a strip is).
#pragma once

#include "gemm/strip.h"
#include "isa/kernels.h"
#include "weights/decode.h"

namespace ktbridge {
namespace {

// A panel of columns touches a new page with every row, where hardware doesn't read ahead; so we do, into
// L2 and not L1, because rows a power of two apart share the same few sets of L1.
constexpr int kRowsAhead = 48;
// Sixteen rows at a time are more streams than hardware follows closely. Further ahead they would push each
// other out of L1 (docs/kernel-log.md, entry 43).
constexpr int kBytesAhead = 256;

// Matrices come by value here: stores of vectors may alias anything, so fields of a reference would be
// loaded again after each.
template <Storage kStorage>
inline void rows_to_left(const Matrix w, int row, bf16* strip) {
  const int live = w.rows - row < kStrip ? w.rows - row : kStrip;
  const int whole_columns = w.columns / kSteps * kSteps;
  const std::ptrdiff_t end = stored_bytes(kStorage, whole_columns);
  for (int column = 0; column < whole_columns; column += kSteps, strip += kTile) {
    const std::ptrdiff_t at = stored_bytes(kStorage, column);
    const char* ahead = static_cast<const char*>(w.data) + row * w.stride + at + kBytesAhead;
    if (at + kBytesAhead >= end) ahead += kStrip * w.stride - end;  // the next strip's beginning
    for (int r = 0; r < live && at % 64 == 0; ++r)  // a hint only, so it may point past the end
      __builtin_prefetch(ahead + r * w.stride);
    for (int r = 0; r < live; ++r) store(strip + r * kSteps, decode<kStorage>(w, row + r, column));
  }
  if (whole_columns < w.columns)
    for (int r = 0; r < live; ++r) store(strip + r * kSteps, decode_end<kStorage>(w, row + r, whole_columns));
}

// One pair of rows, all columns of the panel.
template <Storage kStorage>
inline void row_pair_to_right(const Matrix w, int k, int column, Strips target) {
  const Pairs zero = pairs(every(0.f), every(0.f));
  const char* line = static_cast<const char*>(w.data) + k * w.stride + stored_bytes(kStorage, column);
  const std::ptrdiff_t width = stored_bytes(kStorage, target.count * kStrip);
  if (k + kRowsAhead < w.rows)
    for (std::ptrdiff_t byte = 0; byte < width; byte += 64) {
      __builtin_prefetch(line + kRowsAhead * w.stride + byte, 0, 2);
      __builtin_prefetch(line + (kRowsAhead + 1) * w.stride + byte, 0, 2);
    }
  bf16* to = const_cast<bf16*>(target.data) + static_cast<std::ptrdiff_t>(k) * kStrip;
  for (int strip = 0; strip < target.count; strip += 2, to += 2 * target.stride) {
    const int c = column + strip * kStrip;
    Pairs first = zero, second = zero;
    if (c + kSteps <= w.columns && k + 1 < w.rows)
      interleave(decode<kStorage>(w, k, c), decode<kStorage>(w, k + 1, c), first, second);
    else if (c < w.columns)
      interleave(decode_any<kStorage>(w, k, c), k + 1 < w.rows ? decode_any<kStorage>(w, k + 1, c) : zero,
                 first, second);
    store(to, first);
    if (strip + 1 < target.count) store(to + target.stride, second);
  }
}

// A panel of 64 or 128 columns that are all there, in a loop without conditions: most of a large matrix.
// Near its end it asks for the first rows of the next panel, which arrive while this one is multiplied.
template <Storage kStorage, int kStrips>
inline int whole_panel_to_right(const Matrix w, int column, Strips target) {
  constexpr int kWidth = stored_bytes(kStorage, kStrips * kStrip);
  const char* panel = static_cast<const char*>(w.data) + stored_bytes(kStorage, column);
  const char* ahead = panel + kRowsAhead * w.stride;
  bf16* to = const_cast<bf16*>(target.data);
  const std::ptrdiff_t stride = target.stride;
  // A piece that doesn't begin with a line has the beginning of one more.
  const bool straddles = reinterpret_cast<std::uintptr_t>(panel) % 64 != 0;
  int k = 0;
  for (; k + 1 < w.rows; k += 2, ahead += 2 * w.stride, to += 2 * kStrip) {
    if (k == (w.rows - kRowsAhead) / 2 * 2) ahead = panel + kWidth;
    // Hints only, so they may point outside of the matrix.
    for (int byte = 0; byte < kWidth; byte += 64) {
      __builtin_prefetch(ahead + byte, 0, 2);
      __builtin_prefetch(ahead + w.stride + byte, 0, 2);
    }
    if (straddles) {
      __builtin_prefetch(ahead + kWidth - 1, 0, 2);
      __builtin_prefetch(ahead + w.stride + kWidth - 1, 0, 2);
    }
    for (int half = 0; half < kStrips / 2; ++half) {
      Pairs first, second;
      interleave(decode<kStorage>(w, k, column + half * kSteps),
                 decode<kStorage>(w, k + 1, column + half * kSteps), first, second);
      store(to + 2 * half * stride, first);
      store(to + (2 * half + 1) * stride, second);
    }
  }
  return k;
}

template <Storage kStorage>
inline void columns_to_right(const Matrix w, int column, Strips target) {
  const bool whole = column + target.count * kStrip <= w.columns;
  if (target.count > 4 && !(whole && target.count == 8)) {
    Strips first = target, rest = target;
    first.count = 4;
    rest.count -= 4;
    rest.data += 4 * target.stride;
    columns_to_right<kStorage>(w, column, first);
    return columns_to_right<kStorage>(w, column + 4 * kStrip, rest);
  }
  int k = 0;
  if (whole && target.count == 8) k = whole_panel_to_right<kStorage, 8>(w, column, target);
  if (whole && target.count == 4) k = whole_panel_to_right<kStorage, 4>(w, column, target);
  for (; k < w.rows; k += 2) row_pair_to_right<kStorage>(w, k, column, target);
}

inline void zero_fill(bf16* p, std::ptrdiff_t count) { __builtin_memset(p, 0, count * sizeof(bf16)); }

// Calls f.template operator()<storage>() for a storage known at run time.
template <class F>
inline void with_storage(Storage storage, F f) {
  switch (storage) {
    case Storage::bf16: return f.template operator()<Storage::bf16>();
    case Storage::fp32: return f.template operator()<Storage::fp32>();
    case Storage::fp8: return f.template operator()<Storage::fp8>();
    case Storage::int8: return f.template operator()<Storage::int8>();
    case Storage::int4: return f.template operator()<Storage::int4>();
    case Storage::mxfp4: return f.template operator()<Storage::mxfp4>();
  }
}

inline void pack_left(const Matrix& w, int row, bf16* strip) {
  if (row + kStrip > w.rows) zero_fill(strip, static_cast<std::ptrdiff_t>(tiles_of(w.columns)) * kTile);
  if (row < w.rows)
    with_storage(w.storage, [&]<Storage kStorage>() { rows_to_left<kStorage>(w, row, strip); });
}

inline void pack_right(const Matrix& w, int reduction, int column, Strips target) {
  const std::ptrdiff_t size = static_cast<std::ptrdiff_t>(tiles_of(reduction)) * kTile;
  if (w.rows % kSteps != 0 || w.rows == 0)
    for (int strip = 0; strip < target.count; ++strip)
      zero_fill(const_cast<bf16*>(target.data) + strip * target.stride, size);
  with_storage(w.storage, [&]<Storage kStorage>() { columns_to_right<kStorage>(w, column, target); });
}

// 32 elements of a bf16 row from `column`; zeros past its end.
inline Pairs row_part(const bf16* row, int column, int columns) {
  if (column + kSteps <= columns) return load_pairs(row + column);
  alignas(64) bf16 part[kSteps] = {};
  if (column < columns) __builtin_memcpy(part, row + column, (columns - column) * sizeof(bf16));
  return load_pairs(part);
}

inline void row_products(const Tokens& tokens, const float* vector, float* products) {
  for (int i = 0; i < tokens.count; ++i) {
    Lanes sums[2] = {every(0.f), every(0.f)};
    for (int c = 0; c < tokens.columns; c += kSteps) {
      Lanes first, second;
      widen(row_part(tokens.row(i), c, tokens.columns), first, second);
      sums[0] = fma(first, load(vector + c), sums[0]);
      sums[1] = fma(second, load(vector + c + kStrip), sums[1]);
    }
    products[i] = sum(sums[0] + sums[1]);
  }
}

inline void tokens_to_left(const Tokens& tokens, bf16* strip) {
  if (tokens.count < kStrip) zero_fill(strip, static_cast<std::ptrdiff_t>(tiles_of(tokens.columns)) * kTile);
  for (int i = 0; i < tokens.count; ++i) {
    const bf16* row = tokens.row(i);
    for (int c = 0; c < tokens.columns; c += kSteps)
      store(strip + static_cast<std::ptrdiff_t>(c / kSteps) * kTile + i * kSteps,
            row_part(row, c, tokens.columns));
  }
}

inline void tokens_to_right(const Tokens& tokens, bf16* strip) {
  const Pairs zero = pairs(every(0.f), every(0.f));
  for (int c = 0; c < tokens.columns; c += kSteps, strip += kTile) {
    Pairs rows[16];
    for (int i = 0; i < kStrip; ++i)
      rows[i] = i < tokens.count ? row_part(tokens.row(i), c, tokens.columns) : zero;
    transpose(rows);
    for (int i = 0; i < kStrip; ++i) store(strip + i * kSteps, rows[i]);
  }
}

template <bool kAll>
inline void pairs_to_right(const Tokens& tokens, int column, Strips target) {
  const auto part = [&](int i, int c) {
    if (i >= tokens.count) return pairs(every(0.f), every(0.f));
    const Pairs row = row_part(tokens.row(i), c, tokens.columns);
    return kAll ? row : keep(row, tokens.kept[i * tokens.kept_words + (c - column) / kSteps]);
  };
  const int padded = tiles_of(tokens.count) * kSteps;
  for (int i = 0; i < padded; i += 2)
    for (int strip = 0; strip < target.count; strip += 2) {
      const int c = column + strip * kStrip;
      Pairs first, second;
      interleave(part(i, c), part(i + 1, c), first, second);
      bf16* to =
          const_cast<bf16*>(target.data) + strip * target.stride + static_cast<std::ptrdiff_t>(i) * kStrip;
      store(to, first);
      store(to + target.stride, second);
    }
}

inline void token_pairs_to_right(const Tokens& tokens, int column, Strips target) {
  tokens.kept == nullptr ? pairs_to_right<true>(tokens, column, target)
                         : pairs_to_right<false>(tokens, column, target);
}

inline void tiles_to_right(Strips left, int tile, Strips target) {
  const Pairs zero = pairs(every(0.f), every(0.f));
  for (int strip = 0; strip < left.count + left.count % 2; ++strip) {
    const bf16* rows = left.data + strip * left.stride + static_cast<std::ptrdiff_t>(tile) * kTile;
    bf16* to = const_cast<bf16*>(target.data) + static_cast<std::ptrdiff_t>(strip) * (kTile / 2);
    for (int i = 0; i < kStrip; i += 2, to += 2 * kStrip) {
      Pairs first = zero, second = zero;
      if (strip < left.count)
        interleave(load_pairs(rows + i * kSteps), load_pairs(rows + (i + 1) * kSteps), first, second);
      store(to, first);
      store(to + target.stride, second);
    }
  }
}

}  // namespace
}  // namespace ktbridge
