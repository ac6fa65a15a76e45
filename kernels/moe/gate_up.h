// The first half of forward, which backward repeats under Keep::recompute: x -> g, u and h of one expert's
// panels of I.
#pragma once

#include "moe/pass.h"
#include "moe/schedule.h"

namespace ktbridge {

// Where it goes. Null or empty targets are skipped.
struct GateUpTarget {
  bf16* h;  // right strips, with a margin on either side
  std::ptrdiff_t h_stride;
  Saved* saved;  // g, u and the thin products, as far as it has room for them
};

struct GateUp : Pass {
  void run(Unit unit, const GateUpTarget& target) const;

  // t = s (input A^T) of one block of tokens, as right strips; and for backward in `kept`, if it has room,
  // times the tokens' weights for down.
  void thin(Projection projection, int expert, TokenBlock block, Strips input, Strips t, Saved& kept) const;

 private:
  // Zeros in x A^T, blocks [strips of r][count strips of tokens from `begin`], where a token has no LoRA.
  void clear_others(int expert, int begin, int count, int strips, float* result) const;
};

// g and u again, where forward didn't keep them; else null.
std::unique_ptr<Saved> recomputed(const Machine& machine, const Pass& pass, Keep keep);

// Room for g and u in `saved`.
void reserve_inner(Saved& saved, const Pass& pass);

}  // namespace ktbridge
