// What the kernel tests share: random values from a fixed seed, memory that tells when it is overrun, and
// where gemm/strip.h says an element of a strip lies.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "check.h"
#include "common/bf16.h"
#include "common/buffer.h"
#include "common/pool.h"
#include "cpus.h"
#include "isa/kernels.h"

namespace ktbridge {

// SplitMix64 (Steele et al., OOPSLA 2014): the same values with every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int end) { return static_cast<int>(bits() % end); }
  int between(int first, int last) { return first + below(last - first + 1); }
  // In (-1, 1), and never so small that a product of two is subnormal: AVX-512's bf16 instructions flush
  // those.
  float value() {
    const float magnitude = static_cast<float>((bits() >> 40) + 1) * 0x1p-24f;
    return bits() % 2 ? magnitude : -magnitude;
  }
  bf16 half() { return to_bf16(value()); }

  template <class F>
  auto many(std::size_t count, F one) {
    std::vector<decltype(one())> values(count);
    for (auto& each : values) each = one();
    return values;
  }
  std::vector<float> values(std::size_t count) {
    return many(count, [&] { return value(); });
  }
  std::vector<bf16> halves(std::size_t count) {
    return many(count, [&] { return half(); });
  }
  std::vector<bf16> any_bits(std::size_t count) {
    return many(count, [&] { return static_cast<bf16>(bits()); });
  }

 private:
  std::uint64_t state_;
};

// A copy whose last byte is the last of its page; reading on is a segmentation fault.
template <class T>
class AtPageEnd {
 public:
  explicit AtPageEnd(const std::vector<T>& values) {
    const std::size_t page = sysconf(_SC_PAGESIZE), bytes = values.size() * sizeof(T);
    const std::size_t usable = (bytes + page - 1) / page * page;
    size_ = usable + page;
    base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    char* end = static_cast<char*>(base_) + usable;
    mprotect(end, page, PROT_NONE);
    data_ = reinterpret_cast<T*>(end - bytes);
    if (bytes > 0) std::memcpy(data_, values.data(), bytes);
  }
  AtPageEnd(AtPageEnd&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), size_(other.size_), data_(other.data_) {}
  AtPageEnd& operator=(AtPageEnd&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~AtPageEnd() {
    if (base_ != nullptr) munmap(base_, size_);
  }
  const T* data() const { return data_; }

 private:
  void* base_;
  std::size_t size_;
  T* data_;
};

// The index of the first element that isn't wanted, bit for bit; -1 if there is none.
template <class T>
long first_difference(const T* got, const std::vector<T>& want) {
  for (std::size_t i = 0; i < want.size(); ++i)
    if (std::memcmp(got + i, want.data() + i, sizeof(T)) != 0) return static_cast<long>(i);
  return -1;
}
template <class T>
long first_difference(const std::vector<T>& got, const std::vector<T>& want) {
  return got.size() == want.size() ? first_difference(got.data(), want) : static_cast<long>(want.size());
}

// Room for a kernel's output, as aligned as a Buffer, and filled with a pattern that goes on before and
// behind it to show what is written there.
template <class T>
class Output {
 public:
  static constexpr unsigned char kFill = 0xa5;

  explicit Output(std::size_t count) : count_(count), all_(count + 2 * kGuard) {
    std::memset(all_.data(), kFill, (count + 2 * kGuard) * sizeof(T));
  }
  T* data() { return all_.data() + kGuard; }
  // What an element holds that nobody has written.
  static T untouched() {
    T value;
    std::memset(&value, kFill, sizeof value);
    return value;
  }
  std::vector<T> all_untouched() const { return std::vector<T>(count_, untouched()); }
  bool guards_intact() const {
    const unsigned char *front = bytes(0), *back = bytes(kGuard + count_);
    const auto is_fill = [](unsigned char byte) { return byte == kFill; };
    return std::all_of(front, front + kGuard * sizeof(T), is_fill) &&
           std::all_of(back, back + kGuard * sizeof(T), is_fill);
  }

 private:
  static constexpr std::size_t kGuard = 1024;
  const unsigned char* bytes(std::size_t at) const {
    return reinterpret_cast<const unsigned char*>(all_.data() + at);
  }
  std::size_t count_;
  Buffer<T> all_;
};

// Where strip.h puts an element: row or column within its strip, step of the reduction.
constexpr std::ptrdiff_t left_at(int row, int step) {
  return static_cast<std::ptrdiff_t>(step / kSteps) * kTile + row * kSteps + step % kSteps;
}
constexpr std::ptrdiff_t right_at(int step, int column) {
  return static_cast<std::ptrdiff_t>(step / kSteps) * kTile + (step % kSteps / 2) * 2 * kStrip + 2 * column +
         step % 2;
}

// The ISAs that tests try. Under ThreadSanitizer, where each takes minutes, the best alone: they differ in
// arithmetic, not in what threads do.
inline std::vector<std::string> tested_isas() {
#if defined(__SANITIZE_THREAD__)
  return {available_isas().back()};
#else
  return available_isas();
#endif
}

// Runs `test(kernels)` for each of them, as a thread of a pass would.
template <class Test>
void for_each_isa(Test test) {
  for (const std::string& isa : tested_isas()) {
    const check::Case name(isa);
    const Kernels& kernels = kernels_for(isa);
    kernels.begin();
    test(kernels);
    kernels.end();
  }
}

// Places for more threads than this machine may have CPUs, on alternating nodes if there are several.
inline std::vector<Place> crowd(int threads, int nodes = 1) {
  const std::vector<int> cpus = own_cpus();
  std::vector<Place> places;
  for (int i = 0; i < threads; ++i) places.push_back({cpus[i % cpus.size()], i % nodes});
  return places;
}

}  // namespace ktbridge
