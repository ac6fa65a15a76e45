// A thin product of float32 added to stored rows: W + scale B A, as merging an adapter needs it.
#pragma once

#include "isa/kernels.h"
#include "isa/lanes.h"

namespace ktbridge {
namespace {

constexpr int kDeltaRows = 8 / kParts;  // that many rows' sums fit the registers

// What became of values, lane by lane.
struct Tally {
  Lanes wrong = every(0.f);  // NaN where one isn't finite
  Lanes changed = every(0.f);
  void note(Lanes made, Lanes old) {
    wrong = wrong + (made - made);
    changed = changed + ones_where_unequal(made, old);
  }
};

// 32 values of a row += sums, rounded to nearest even.
inline void add_row(const float* sums, bf16* values, Tally& tally) {
  Lanes old[2], made[2];
  widen(load_pairs(values), old[0], old[1]);
  const Pairs rounded = sequence_exactly(old[0] + load(sums), old[1] + load(sums + kStrip));
  store(values, rounded);
  widen(rounded, made[0], made[1]);
  tally.note(made[0], old[0]);
  tally.note(made[1], old[1]);
}
inline void add_row(const float* sums, float* values, Tally& tally) {
  for (int half = 0; half < kSteps; half += kStrip) {
    const Lanes old = load(values + half), made = old + load(sums + half);
    store(values + half, made);
    tally.note(made, old);
  }
}

// sums [kRows][32] = left [kRows][rank] times right [rank][32]
template <int kRows>
inline void multiply_thin(const float* left, int rank, const float* right, float* sums) {
  for (int half = 0; half < kSteps; half += kStrip) {
    Lanes sum[kRows];
    for (int i = 0; i < kRows; ++i) sum[i] = every(0.f);
    for (int k = 0; k < rank; ++k) {
      const Lanes columns = load(right + k * kSteps + half);
      for (int i = 0; i < kRows; ++i) sum[i] = fma(every(left[i * rank + k]), columns, sum[i]);
    }
    for (int i = 0; i < kRows; ++i) store(sums + i * kSteps + half, sum[i]);
  }
}

template <class T>
inline std::int64_t add_delta(const Delta& delta, T* values) {
  float sums[kDeltaRows * kSteps];
  Tally tally;
  std::int64_t changed = 0;
  for (int column = 0; column < delta.columns; column += kSteps) {
    const float *left = delta.left, *right = delta.right + static_cast<std::ptrdiff_t>(column) * delta.rank;
    const int width = delta.columns - column < kSteps ? delta.columns - column : kSteps;
    T* at = values + column;
    for (int row = 0; row < delta.rows;) {
      const int count = delta.rows - row < kDeltaRows ? 1 : kDeltaRows;
      count == 1 ? multiply_thin<1>(left, delta.rank, right, sums)
                 : multiply_thin<kDeltaRows>(left, delta.rank, right, sums);
      for (int i = 0; i < count; ++i, at += delta.stride) {
        T whole[kSteps] = {};  // what lies behind the last column is somebody else's
        if (width < kSteps) __builtin_memcpy(whole, at, width * sizeof(T));
        add_row(sums + i * kSteps, width < kSteps ? whole : at, tally);
        if (width < kSteps) __builtin_memcpy(at, whole, width * sizeof(T));
      }
      row += count;
      left += static_cast<std::ptrdiff_t>(count) * delta.rank;
    }
    changed += static_cast<std::int64_t>(sum(tally.changed));  // whole, and below 2^24
    tally.changed = every(0.f);
  }
  return sum(tally.wrong) == 0 ? changed : -1;
}

inline std::int64_t add_delta_halves(const Delta& delta, bf16* values) { return add_delta(delta, values); }
inline std::int64_t add_delta_floats(const Delta& delta, float* values) { return add_delta(delta, values); }

}  // namespace
}  // namespace ktbridge
