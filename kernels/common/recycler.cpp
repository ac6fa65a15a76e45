#include "common/recycler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace ktbridge {
namespace {

// Smaller blocks are malloc's business.
constexpr std::size_t kSmallest = 1 << 20;
constexpr std::size_t kHugePage = 2 << 20;

// Straight from the system and back to it, for malloc's heap would keep the holes. Null if there is none.
void* map(std::size_t bytes) {
  void* whole = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (whole == MAP_FAILED) return nullptr;
  // Aligned to a huge page; what is before and behind goes back.
  char* const begin = static_cast<char*>(whole);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + bytes, kHugePage - before);
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // one fault for 2 MB instead of 512; a wish only
  return begin + before;
}

class Recycler {
 public:
  void* take(std::size_t& bytes) {
    std::lock_guard lock(mutex_);
    const auto found = kept_.lower_bound(bytes);
    void* pointer;
    if (found != kept_.end() && found->first <= bytes + bytes / 4) {
      bytes = found->first;
      pointer = found->second;
      kept_.erase(found);
      kept_bytes_ -= bytes;
    } else {
      bytes = memory_taken(bytes);
      // What doesn't fit is dropped before the peak grows.
      while (!kept_.empty() && used_ + kept_bytes_ + bytes > std::max(most_, used_ + bytes)) drop();
      pointer = map(bytes);
      if (pointer == nullptr) {  // what is kept may be what is missing
        while (!kept_.empty()) drop();
        pointer = map(bytes);
      }
      if (pointer == nullptr) throw std::bad_alloc();
    }
    used_ += bytes;
    most_ = std::max(most_, used_);
    return pointer;
  }

  void give(void* pointer, std::size_t bytes) noexcept {
    std::lock_guard lock(mutex_);
    used_ -= bytes;
    try {
      kept_.emplace(bytes, pointer);
      kept_bytes_ += bytes;
    } catch (...) {
      munmap(pointer, bytes);
    }
  }

  void release() noexcept {
    std::lock_guard lock(mutex_);
    while (!kept_.empty()) drop();
    most_ = used_;
  }

 private:
  void drop() {
    const auto largest = std::prev(kept_.end());
    kept_bytes_ -= largest->first;
    munmap(largest->second, largest->first);
    kept_.erase(largest);
  }

  std::mutex mutex_;
  std::multimap<std::size_t, void*> kept_;
  std::size_t kept_bytes_ = 0, used_ = 0, most_ = 0;
};

// Never destroyed: threads' workspaces may be given back after the statics are gone.
Recycler& recycler() {
  static auto& only = *new Recycler;
  return only;
}

}  // namespace

std::size_t memory_taken(std::size_t bytes) {
  const std::size_t unit = bytes < kSmallest ? 64 : kHugePage;
  return (bytes + unit - 1) / unit * unit;
}

void* take_memory(std::size_t& bytes) {
  // Rounded first: what was taken here must be told apart by its size when it is given back.
  bytes = std::max<std::size_t>((bytes + 63) / 64 * 64, 64);
  if (bytes >= kSmallest) return recycler().take(bytes);
  void* pointer = std::aligned_alloc(64, bytes);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}

void give_memory(void* pointer, std::size_t bytes) noexcept {
  if (bytes >= kSmallest)
    recycler().give(pointer, bytes);
  else
    std::free(pointer);
}

void release_memory() noexcept { recycler().release(); }

}  // namespace ktbridge
