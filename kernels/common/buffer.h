// Owned, 64-byte aligned memory for strips and activations.
#pragma once

#include <cstddef>

#include "common/recycler.h"

namespace ktbridge {

// Array of a trivial type. Contents are undefined until written: whoever pads rows is the one who zeroes
// the padding.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t count) { reset(count); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(); }

  // Room for exactly `count` elements; earlier contents are lost.
  void reset(std::size_t count) {
    free();
    if (count == 0) return;
    std::size_t bytes = count * sizeof(T);
    data_ = static_cast<T*>(take_memory(bytes));
    bytes_ = bytes;
    count_ = count;
  }

  // Makes room for at least `count` elements; earlier contents are lost when it has to grow.
  T* reserve(std::size_t count) {
    if (count > count_) reset(count);
    return data_;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t bytes() const { return count_ * sizeof(T); }

 private:
  void free() {
    if (data_ != nullptr) give_memory(data_, bytes_);
    data_ = nullptr;
    bytes_ = count_ = 0;
  }

  T* data_ = nullptr;
  std::size_t bytes_ = 0, count_ = 0;
};

}  // namespace ktbridge
