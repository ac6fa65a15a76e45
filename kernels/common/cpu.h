// Which instruction sets this CPU (and its operating system) can run, and which one we take.
#pragma once

#include <string>
#include <vector>

namespace ktbridge {

// In rising order of preference: the last available one is the default.
enum class Isa { scalar, avx2, avx512_bf16, amx_bf16 };

const char* isa_name(Isa isa);

// Every path this CPU can run, worst first. `scalar` is always there.
const std::vector<Isa>& available_isas();

// Why the kernels don't use this CPU's AMX; "" where they do, or where it has none.
std::string why_no_tiles();

// The path for a wish: "auto" takes KTBRIDGE_ISA if set, else the best available; a name forces that
// path. Throws std::invalid_argument, saying what is available, when the wish can't be granted.
Isa choose_isa(const std::string& wish);

// Whether float32 multiply-adds are faster here than vdpbf16ps, which has half their rate on Intel's CPUs
// and twice on AMD's.
bool multiplies_floats_faster();

}  // namespace ktbridge
