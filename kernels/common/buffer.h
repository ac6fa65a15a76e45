// Owned, 64-byte aligned memory for panels and activations.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace ktbridge {

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Fixed-size array of a trivial type. Contents are undefined until written: whoever pads rows is the
// one who zeroes the padding.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t count) { reset(count); }

  void reset(std::size_t count) {
    const std::size_t bytes = round_up(count * sizeof(T), 64);
    data_.reset(bytes == 0 ? nullptr : static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (bytes != 0 && !data_) throw std::bad_alloc();
    count_ = count;
  }

  // Makes room for at least `count` elements; earlier contents are lost when it has to grow.
  T* reserve(std::size_t count) {
    if (count > count_) reset(count);
    return data_.get();
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  std::size_t bytes() const { return count_ * sizeof(T); }

 private:
  struct Free {
    void operator()(T* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t count_ = 0;
};

}  // namespace ktbridge
