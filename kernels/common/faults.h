// Files that are mapped into this process, and a sentence instead of a silent death where one of them can no
// longer be read: it was truncated, or its device or network failed. The kernel then sends SIGBUS.
#pragma once

#include <cstddef>
#include <string>

namespace ktbridge {

// From now on a SIGBUS in [begin, begin + bytes) writes `sentence` to stderr and ends the process with status
// 1; elsewhere it does what it did before. Returns a number for `forget_map`. Throws std::runtime_error if
// too many are watched.
int watch_map(const void* begin, std::size_t bytes, const std::string& sentence);
void forget_map(int number);

// What is written behind the sentence, such as where the last checkpoint is. Cut after 1,000 bytes.
void after_fault(const std::string& text);

}  // namespace ktbridge
