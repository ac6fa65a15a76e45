#include "common/faults.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace ktbridge {
namespace {

// A handler may neither lock nor allocate. Words are never freed: another thread's may be writing them.
std::atomic<const char*> words_before{nullptr}, words_behind{nullptr};
std::atomic_flag told;
struct sigaction previous;

void write_all(const char* text) {
  while (*text != '\0') {
    const ssize_t count = write(2, text, std::strlen(text));
    if (count <= 0) return;
    text += count;
  }
}

// Reads a line of /proc/self/maps into `line`, cut to its size; false at the end.
bool next_line(int file, char* line, std::size_t size) {
  std::size_t used = 0;
  for (char c; read(file, &c, 1) == 1;) {
    if (c == '\n') {
      line[used] = '\0';
      return true;
    }
    if (used + 1 < size) line[used++] = c;
  }
  return false;
}

// "begin-end rights offset device inode     path"
const char* path_of(std::uintptr_t address, const char* line) {
  const char* const stop = line + std::strlen(line);
  std::uintptr_t begin = 0, end = 0;
  const char* dash = std::from_chars(line, stop, begin, 16).ptr;
  if (*dash != '-') return nullptr;
  std::from_chars(dash + 1, stop, end, 16);
  return begin <= address && address < end ? std::strchr(line, '/') : nullptr;
}

void on_fault(int, siginfo_t* info, void*) {
  char line[4200];
  const int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  while (file >= 0 && next_line(file, line, sizeof line))
    if (const char* path = path_of(reinterpret_cast<std::uintptr_t>(info->si_addr), line)) {
      while (told.test_and_set()) pause();  // the words of another thread, which end the process
      write_all(words_before);
      write_all(path);
      write_all(words_behind);
      _exit(1);
    }
  if (file >= 0) close(file);
  sigaction(SIGBUS, &previous, nullptr);  // the instruction runs again, and meets what was there before
}

}  // namespace

void explain_faults(const std::string& before, const std::string& behind) {
  words_before = strdup(before.c_str());
  words_behind = strdup(behind.c_str());
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, &previous);
  });
}

}  // namespace ktbridge
