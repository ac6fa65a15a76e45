#include "moe/routing.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gemm/strip.h"

namespace ktbridge {

Routing route(int experts, int tokens, int top_k, const std::int64_t* ids, const float* weights) {
  Routing r;
  r.tokens = tokens;
  r.top_k = top_k;
  const int slots = tokens * top_k;
  r.first.assign(experts + 1, 0);
  for (int i = 0; i < slots; ++i) {
    if (ids[i] < 0 || ids[i] >= experts)
      throw std::out_of_range("topk_ids holds " + std::to_string(ids[i]) + " but there are " +
                              std::to_string(experts) + " experts");
    ++r.first[ids[i] + 1];
  }
  for (int e = 0; e < experts; ++e) {
    if (r.first[e + 1] > 0) r.active.push_back(e);
    r.first[e + 1] += r.first[e];
  }
  r.token.resize(slots);
  r.source.resize(slots);
  r.slot_of.resize(slots);
  r.weight.resize(slots);
  std::vector<int> next(r.first.begin(), r.first.end() - 1);
  for (int i = 0; i < slots; ++i) {
    const int slot = next[ids[i]]++;
    r.token[slot] = i / top_k;
    r.source[slot] = i;
    r.slot_of[i] = slot;
    r.weight[slot] = weights[i];
  }
  r.first_strip.assign(experts + 1, 0);
  r.first_double.assign(experts + 1, 0);
  for (int e = 0; e < experts; ++e) {
    r.first_strip[e + 1] = r.first_strip[e] + strips_of(r.rows(e));
    r.first_double[e + 1] = r.first_double[e] + tiles_of(r.rows(e));
  }
  std::stable_sort(r.active.begin(), r.active.end(), [&](int a, int b) { return r.rows(a) > r.rows(b); });
  return r;
}

}  // namespace ktbridge
