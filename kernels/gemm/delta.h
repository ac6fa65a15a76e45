// A thin product of float32 added to stored rows: W + scale B A, as merging an adapter needs it.
#pragma once

#include <algorithm>

#include "isa/kernels.h"
#include "isa/lanes.h"

namespace ktbridge {
namespace {

inline float stored(float sum, float) { return sum; }
inline bf16 stored(float sum, bf16) { return to_bf16(sum); }
inline float widened(float value) { return value; }
inline float widened(bf16 value) { return to_float(value); }

// Rounded once also where the CPU has no such instruction: what is merged must not depend on the CPU.
inline Lanes fused_once(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX2__)  // its files are compiled with FMA
  return fma(a, b, c);
#else
  float x[kStrip], y[kStrip], z[kStrip];
  store(x, a);
  store(y, b);
  store(z, c);
  for (int i = 0; i < kStrip; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return load(z);
#endif
}

template <class T>
inline std::int64_t add_delta_to(const Delta& delta, T* values) {
  constexpr int kRows = 4;  // sums of so many stay in registers, 16 columns at a time
  std::int64_t changed = 0;
  std::uint32_t largest = 0;  // exponent; the largest there is means that a value isn't finite
  for (int column = 0; column < delta.columns; column += kSteps) {
    const float* right = delta.right + static_cast<std::ptrdiff_t>(column) * delta.rank;
    const int width = delta.columns - column < kSteps ? delta.columns - column : kSteps;
    const auto copy = [width](T* to, const T* from) {  // of a known size it is no call
      if (width == kSteps)
        __builtin_memcpy(to, from, kSteps * sizeof(T));
      else
        __builtin_memcpy(to, from, width * sizeof(T));
    };
    for (int row = 0; row < delta.rows; row += kRows) {
      const float* left = delta.left + static_cast<std::ptrdiff_t>(row) * delta.rank;
      const int rows = delta.rows - row < kRows ? delta.rows - row : kRows;
      float sums[kRows][kSteps];
      for (int half = 0; half < kSteps; half += kStrip) {
        Lanes sum[kRows];
        for (Lanes& each : sum) each = every(0.f);
        for (int k = 0; k < delta.rank; ++k)
          for (int i = 0; i < kRows; ++i)
            sum[i] = fused_once(every(left[(i < rows ? i : 0) * delta.rank + k]),
                                load(right + k * kSteps + half), sum[i]);
        for (int i = 0; i < kRows; ++i) store(sums[i] + half, sum[i]);
      }
      for (int i = 0; i < rows; ++i) {
        T *at = values + (row + i) * delta.stride + column, old[kSteps] = {}, made[kSteps];
        copy(old, at);
        std::uint32_t others = 0, exponents = 0;
        for (int c = 0; c < kSteps; ++c) {
          made[c] = stored(widened(old[c]) + sums[i][c], T{});
          others += widened(made[c]) != widened(old[c]);
          exponents = std::max(exponents, __builtin_bit_cast(std::uint32_t, widened(made[c])) & 0x7f800000u);
        }
        largest = std::max(largest, exponents);
        changed += others;
        copy(at, made);
      }
    }
  }
  return largest < 0x7f800000u ? changed : -1;
}

inline std::int64_t add_delta(const Delta& delta, void* values, bool halves) {
  return halves ? add_delta_to(delta, static_cast<bf16*>(values))
                : add_delta_to(delta, static_cast<float*>(values));
}

}  // namespace
}  // namespace ktbridge
