// Memory that is used again. The test is linked with its own mmap and munmap around the real ones
// (CMakeLists.txt), so it sees what the recycler holds.
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "common/buffer.h"
#include "support.h"

using namespace ktbridge;

namespace {

std::atomic<std::size_t> held{0};

std::size_t held_bytes() { return held; }

constexpr std::size_t kMega = 1 << 20;

void start_afresh() {
  release_memory();
  CHECK(held_bytes() == 0u);
}

}  // namespace

extern "C" {
void* __real_mmap(void* at, std::size_t bytes, int protection, int flags, int file, off_t offset);
int __real_munmap(void* at, std::size_t bytes);
void* __wrap_mmap(void* at, std::size_t bytes, int protection, int flags, int file, off_t offset) {
  held += bytes;
  return __real_mmap(at, bytes, protection, flags, file, offset);
}
int __wrap_munmap(void* at, std::size_t bytes) {
  held -= bytes;
  return __real_munmap(at, bytes);
}
}

namespace {

bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 64 == 0; }

void gives_what_is_asked_for() {
  start_afresh();
  for (std::size_t wish : {std::size_t{1}, std::size_t{63}, std::size_t{64}, 5 * kMega / 10, kMega - 64,
                           kMega, kMega + 1, 3 * kMega}) {
    std::size_t bytes = wish;
    char* pointer = static_cast<char*>(take_memory(bytes));
    CHECK(aligned(pointer));
    CHECK(bytes >= wish);
    std::memset(pointer, 1, bytes);
    give_memory(pointer, bytes);
  }
  start_afresh();
}

void takes_the_same_again() {
  start_afresh();
  char* first;
  {
    Buffer<char> buffer(10 * kMega);
    first = buffer.data();
  }
  CHECK(held_bytes() == 10 * kMega);
  for (std::size_t bytes : {10 * kMega, 9 * kMega, 8 * kMega}) CHECK(Buffer<char>(bytes).data() == first);
  // A block that is far too large would be a waste.
  CHECK(Buffer<char>(2 * kMega).data() != first);
  start_afresh();
}

void small_blocks_are_not_kept() {
  start_afresh();
  for (std::size_t bytes : {std::size_t{1}, std::size_t{100}, kMega / 2}) {
    {
      Buffer<char> buffer(bytes);
    }
    CHECK(held_bytes() == 0u);
  }
}

// Blocks of random sizes come and go; what is held, in use or not, is never more than was in use at once.
void keeps_no_more_than_the_peak() {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    start_afresh();
    Random random(seed);
    std::vector<std::pair<char*, std::size_t>> blocks;
    std::size_t used = 0, peak = 0;
    for (int i = 0; i < 400; ++i) {
      if (blocks.empty() || random.below(5) < (i / 50 % 2 ? 2 : 3)) {
        std::size_t bytes = kMega + random.below(40 * kMega);
        char* pointer = static_cast<char*>(take_memory(bytes));
        blocks.emplace_back(pointer, bytes);
        used += bytes;
      } else {
        std::swap(blocks[random.below(static_cast<int>(blocks.size()))], blocks.back());
        give_memory(blocks.back().first, blocks.back().second);
        used -= blocks.back().second;
        blocks.pop_back();
      }
      peak = std::max(peak, used);
      CHECK(held_bytes() <= peak);
    }
    // Released while some is in use: the rest is freed when it is given back, or by the next release.
    release_memory();
    CHECK(held_bytes() == used);
    for (const auto& [pointer, bytes] : blocks) give_memory(pointer, bytes);
    CHECK(held_bytes() <= used);
    start_afresh();
  }
}

// Growing sizes, of which none fits the next: each is dropped for its successor.
void outgrown_blocks_are_dropped() {
  start_afresh();
  for (std::size_t mega = 2; mega <= 100; mega += mega / 2 + mega % 2) {
    {
      Buffer<char> buffer(mega * kMega);
    }
    CHECK(held_bytes() <= (mega + 1) * kMega);
  }
  start_afresh();
}

// Sizes around the smallest that is kept mustn't upset the accounts.
void keeps_its_accounts() {
  for (std::size_t bytes : {kMega - 65, kMega - 64, kMega - 63, kMega - 1, kMega, kMega + 1}) {
    const check::Case name("after " + std::to_string(bytes) + " bytes");
    {
      Buffer<char> buffer(bytes);
    }
    outgrown_blocks_are_dropped();
  }
}

void many_threads_at_once() {
  start_afresh();
  std::atomic<std::size_t> used{0}, peak{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      Random random(100 + t);
      for (int i = 0; i < 150; ++i) {
        std::size_t bytes = kMega + random.below(4 * kMega);
        // Counted before it is taken, so that the peak is at least the recycler's.
        const std::size_t now = used += bytes + 4 * kMega;
        for (std::size_t most = peak; most < now && !peak.compare_exchange_weak(most, now);) {
        }
        const std::size_t wish = bytes;
        char* pointer = static_cast<char*>(take_memory(bytes));
        pointer[0] = pointer[bytes - 1] = static_cast<char>(t);
        if (i % 50 == 49) release_memory();
        CHECK(pointer[0] == t && pointer[bytes - 1] == t);  // nobody else has it
        give_memory(pointer, bytes);
        used -= wish + 4 * kMega;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(held_bytes() <= peak);
  start_afresh();
}

}  // namespace

int main() {
  gives_what_is_asked_for();
  takes_the_same_again();
  keeps_no_more_than_the_peak();
  outgrown_blocks_are_dropped();
  small_blocks_are_not_kept();
  keeps_its_accounts();
  many_threads_at_once();
  return check::report();
}
