// Which instruction sets this CPU (and its operating system) can run.
#pragma once

#include <string>

namespace ktbridge {

bool runs_avx2();         // Haswell, Zen and later: AVX2 + FMA
bool runs_avx512_bf16();  // Cooper Lake, Sapphire Rapids, Zen 4 and later: AVX-512 F, DQ, BW, VL, BF16
bool runs_amx_bf16();     // Sapphire Rapids and later: AMX tiles with BF16, beside AVX-512 BF16

// Why the kernels don't use this CPU's AMX; "" where they do, or where it has none.
std::string why_no_tiles();

}  // namespace ktbridge
