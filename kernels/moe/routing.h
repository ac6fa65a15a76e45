// Which token goes to which expert, sorted by expert once per pass.
#pragma once

#include <cstdint>
#include <vector>

namespace ktbridge {

// A *slot* is one (token, choice) pair; slots of one expert are neighbours, tokens rising within it.
struct Routing {
  int tokens = 0, top_k = 0;
  std::vector<int> first;         // [E + 1] slots of expert e: first[e] .. first[e + 1]
  std::vector<int> token;         // [S] slot -> token
  std::vector<int> source;        // [S] slot -> token * top_k + choice
  std::vector<int> slot_of;       // [S] token * top_k + choice -> slot
  std::vector<float> weight;      // [S] slot -> routing weight
  std::vector<int> active;        // experts with at least one slot, most slots first
  std::vector<int> first_strip;   // [E + 1] strips of 16 slots; an expert's last may be part full
  std::vector<int> first_double;  // [E + 1] tiles of 32 slots, likewise

  int slots() const { return static_cast<int>(token.size()); }
  int rows(int expert) const { return first[expert + 1] - first[expert]; }
  int strips(int expert) const { return first_strip[expert + 1] - first_strip[expert]; }
  int doubles(int expert) const { return first_double[expert + 1] - first_double[expert]; }
};

// ids and weights are [tokens, top_k]. Throws std::out_of_range when an id isn't in [0, experts).
Routing route(int experts, int tokens, int top_k, const std::int64_t* ids, const float* weights);

}  // namespace ktbridge
