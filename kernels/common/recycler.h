// Large blocks of memory, used again. A pass needs some hundred MB of activations for milliseconds; the
// system would hand them out page by page, zeroed, which costs as much as the pass itself.
#pragma once

#include <cstddef>

namespace ktbridge {

// At least `bytes`, 64-byte aligned, contents undefined; `bytes` becomes what was really taken and is what
// must be given back. Throws std::bad_alloc. Never keeps more than was in use at once so far.
void* take_memory(std::size_t& bytes);
// What `take_memory` takes where nothing that is kept for later fits: large blocks are whole huge pages.
std::size_t memory_taken(std::size_t bytes);
void give_memory(void* pointer, std::size_t bytes) noexcept;

// Frees everything that is kept for later.
void release_memory() noexcept;

}  // namespace ktbridge
