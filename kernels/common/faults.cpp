#include "common/faults.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace ktbridge {
namespace {

// A handler may neither lock nor allocate, so it reads a table of fixed size; `end` is written last and
// cleared first. Sentences are never freed: a handler on another thread may be writing one.
struct Map {
  std::atomic<std::uintptr_t> begin{0}, end{0};
  std::atomic<const char*> sentence{nullptr};
};
constexpr int kMost = 4096;
Map maps[kMost];
std::atomic<const char*> behind{nullptr};
std::mutex mutex;
struct sigaction previous;

void write_all(const char* text) {
  for (std::size_t left = text == nullptr ? 0 : std::strlen(text); left > 0;) {
    const ssize_t count = write(2, text, left);
    if (count <= 0) return;
    text += count;
    left -= static_cast<std::size_t>(count);
  }
}

void on_fault(int, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const Map& map : maps)
    if (at < map.end.load(std::memory_order_acquire) && at >= map.begin.load()) {
      write_all(map.sentence.load());
      write_all(behind.load());
      _exit(1);
    }
  sigaction(SIGBUS, &previous, nullptr);  // the instruction runs again, and what was there before has it
}

const char* kept(const std::string& text) {
  return std::strcpy(new char[text.size() + 1], text.c_str());
}

}  // namespace

int watch_map(const void* begin, std::size_t bytes, const std::string& sentence) {
  std::lock_guard lock(mutex);
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGBUS, &action, &previous) == 0;
  }();
  for (int i = 0; installed && i < kMost; ++i)
    if (maps[i].end == 0) {
      const auto at = reinterpret_cast<std::uintptr_t>(begin);
      maps[i].begin = at;
      maps[i].sentence = kept(sentence);
      maps[i].end.store((at + bytes + 4095) / 4096 * 4096, std::memory_order_release);
      return i;
    }
  throw std::runtime_error("no more mapped files can be watched");
}

void forget_map(int number) {
  std::lock_guard lock(mutex);
  maps[number].end = 0;
}

void after_fault(const std::string& text) { behind = kept(text.substr(0, 1000)); }

}  // namespace ktbridge
